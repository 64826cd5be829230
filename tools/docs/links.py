"""Check the built site: no dead link or anchor, and nothing that is loaded from elsewhere.

python -m tools.docs.links build/site
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

__all__ = ["faults"]

_LOADED = {"script": "src", "link": "href", "img": "src", "iframe": "src", "source": "src"}
"""Elements that make a browser load a file, with the attribute that names it."""


class _Page(HTMLParser):
    """The links, the anchors and what a browser loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if given.get("id"):
            self.anchors.add(str(given["id"]))
        if tag == "a" and given.get("href") is not None:
            self.links.append(str(given["href"]))
        if tag in _LOADED and given.get(_LOADED[tag]):
            self.loads.append(str(given[_LOADED[tag]]))


def faults(site: Path) -> list[str]:
    """Links to pages and anchors that do not exist, and files that are loaded from elsewhere."""
    site = site.resolve()
    pages = {path: _Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    pages = {
        path: page for path, page in pages.items() if path.name != "404.html"
    }  # for servers, with links of its own
    found = []
    for path, page in pages.items():
        name = path.relative_to(site)
        for link in [*page.links, *page.loads]:
            parts = urlsplit(link)
            if parts.scheme in ("http", "https") or parts.netloc:
                found += [f"{name} loads {link}"] if link in page.loads else []
            elif not parts.scheme:
                target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
                target = target / "index.html" if target.is_dir() else target
                if not target.is_file():
                    found.append(f"{name} links to {link}, which does not exist")
                elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
                    found.append(f"{name} links to {link}, which has no such anchor")
    for style in sorted(site.rglob("*.css")):
        text = style.read_text(encoding="utf-8")
        found += [f"{style.relative_to(site)} loads from elsewhere" for mark in ("url(http", "url(//") if mark in text]
    return found


if __name__ == "__main__":
    wrong = faults(Path(sys.argv[1]))
    print("\n".join(wrong) or "no dead link")
    sys.exit(1 if wrong else 0)
