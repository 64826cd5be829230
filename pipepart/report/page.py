"""The page: template, style, scripts and data put together into one file that needs nothing else."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from importlib import resources
from typing import Any

__all__ = ["SCRIPTS", "embed_json", "read_asset", "render_page"]

SCRIPTS = (
    "schedules.js",
    "simulate.js",
    "greedy.js",
    "timeline.js",
    "dom.js",
    "summary.js",
    "stages.js",
    "gantt.js",
    "hierarchy.js",
    "layout.js",
    "graph.js",
    "details.js",
    "whatif.js",
    "app.js",
)
"""In the order in which they run; each adds to one global object, ``pipepart``."""


def read_asset(name: str) -> str:
    return resources.files("pipepart.report").joinpath("assets").joinpath(name).read_text(encoding="utf-8")


def embed_json(data: Any) -> str:
    """JSON that can stand inside a script element: no name in it can end the element or open a comment."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text.encode("utf-8", "replace").decode("utf-8")


def _source(text: str) -> str:
    """The content security policy's name for an inline script or style: only these very bytes may run."""
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"


def render_page(payload: dict[str, Any]) -> str:
    """One self-contained HTML document. Its policy forbids the network and every script but its own."""
    script = "\n" + "\n".join(read_asset(name) for name in SCRIPTS)
    style = "\n" + read_asset("style.css")
    policy = (
        f"default-src 'none'; script-src {_source(script)}; style-src {_source(style)}; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )
    filled = {
        "policy": html.escape(policy),
        "title": html.escape(str(payload["title"])),
        "style": style,
        "script": script,
        "data": embed_json(payload),
    }
    page = read_asset("page.html")
    parts = page.split("{{")
    text = parts[0]
    for part in parts[1:]:
        name, rest = part.split("}}", 1)
        text += filled[name.strip()] + rest
    return text
