"""Hooks of mkdocs: pages from outside of `docs`, links that hold in the repository and on the site, pictures for both themes.

Pages are written for readers of the repository, where `../recipes/README.md` is a file. On the site such a link leads to the
page of that file, or is a plain text where the site has none.
"""

from __future__ import annotations

import posixpath
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
OUTSIDE = {
    "recipes/README.md": "recipes.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "reporting.md",
}
"""Pages outside of `docs`, each with its place on the site."""
HOME = {"README.md": "index.md"}
"""Pages that the site has in another form."""
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^( *)(`{3,}).*?^\1\2", re.MULTILINE | re.DOTALL)


def on_files(files: Any, config: Any) -> Any:
    """Add the pages of `OUTSIDE`, and the pictures that the recipes show."""
    from mkdocs.structure.files import File

    for source, target in OUTSIDE.items():
        files.append(File.generated(config, target, content=(ROOT / source).read_text(encoding="utf-8")))
    for picture in sorted((ROOT / "recipes" / "pictures").glob("*.svg")):
        files.append(File.generated(config, f"pictures/recipes/{picture.name}", abs_src_path=str(picture)))
    for place, content in _reports().items():
        files.append(File.generated(config, place, content=content))
    return files


def _reports() -> dict[str, str]:
    """The reports of the gallery, made from their plans."""
    sys.path.insert(0, str(ROOT))  # mkdocs runs this file by its path
    from pipepart.report import view
    from tools.docs.plans import EXAMPLES, FOLDER

    made = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, example in EXAMPLES.items():
            compare = None if example.compare is None else FOLDER / example.compare
            page = view(FOLDER / name, Path(folder) / "report.html", compare=compare, title=example.title)
            made[f"gallery/{name}/report.html"] = page.read_text(encoding="utf-8")
    return made


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Rewrite the links of a page outside of its code blocks."""
    source = next((name for name, place in OUTSIDE.items() if place == page.file.src_uri), f"docs/{page.file.src_uri}")
    known = {file.src_uri for file in files}
    parts, end = [], 0
    for fence in _FENCE.finditer(markdown):
        parts += [_rewritten(markdown[end : fence.start()], source, page.file.src_uri, known), fence.group()]
        end = fence.end()
    return "".join([*parts, _rewritten(markdown[end:], source, page.file.src_uri, known)])


def _rewritten(text: str, source: str, page: str, known: set[str]) -> str:
    def one(match: re.Match[str]) -> str:
        picture, words, target = match.groups()
        place, mark, anchor = target.partition("#")
        if not place or "://" in place or place.startswith("mailto:"):
            return match.group()
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), place))
        found = _on_site(path, known)
        if found is None:  # a file of the repository that is no page; what does not exist is left for mkdocs to find
            return words if (ROOT / path).exists() else match.group()
        link = posixpath.relpath(found, posixpath.dirname(page) or ".")
        dark = found.removesuffix(".svg") + "_dark.svg"
        if picture and dark in known:
            other = posixpath.relpath(dark, posixpath.dirname(page) or ".")
            return f"![{words}]({link}#only-light)![{words}]({other}#only-dark)"
        return f"{picture}[{words}]({link}{mark}{anchor})"

    return _LINK.sub(one, text)


def _on_site(path: str, known: set[str]) -> str | None:
    """The place on the site of a file of the repository; None if the site does not have it."""
    inside = path.removeprefix("docs/") if path.startswith("docs/") else None
    pictures = (
        path.replace("recipes/pictures/", "pictures/recipes/", 1) if path.startswith("recipes/pictures/") else None
    )
    for place in (OUTSIDE.get(path), HOME.get(path), inside, pictures):
        if place is not None and place in known:
            return place
    return None
