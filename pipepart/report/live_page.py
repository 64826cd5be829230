"""The page of a running job, which asks a server on the same address for the state and the report."""

from __future__ import annotations

import html

from pipepart.report.page import read_asset, source_of

__all__ = ["live_page"]


def live_page(title: str) -> tuple[str, str]:
    """The page, and its content security policy: its own script and style, and requests to its own server."""
    script, style = "\n" + read_asset("live.js"), "\n" + read_asset("live.css")
    filled = {"title": html.escape(title), "style": style, "script": script}
    first, *parts = read_asset("live.html").split("{{")
    text = first + "".join(filled[name.strip()] + rest for name, rest in (part.split("}}", 1) for part in parts))
    policy = (
        f"default-src 'none'; script-src {source_of(script)}; style-src {source_of(style)}; connect-src 'self'; "
        "frame-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
    )
    return text, policy
