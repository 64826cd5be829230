"""The pages of the documentation as programs: what a page shows is what a test runs.

=============================== ==================================================================================
block                           what a test does with it
=============================== ==================================================================================
``python title="train.py"``     written to that file; several blocks with one title are one file
``python``                      run with all other such blocks of the page, in one namespace
``yaml title=...``, ``json``    written to that file
``bash``                        run by bash, in the folder of the files, in the order of the page
``console``, ``text``           shown only: what is typed outside of a program, and what is printed
=============================== ==================================================================================
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["DOCS", "Block", "Page", "page"]

DOCS = Path(__file__).parents[2] / "docs"
_BLOCK = re.compile(r"^(?P<fence>`{3,})(?P<head>[^\n`]*)\n(?P<body>.*?)^(?P=fence)[ \t]*$", re.MULTILINE | re.DOTALL)
_TITLE = re.compile(r'title="([^"]+)"')


@dataclass(frozen=True)
class Block:
    language: str
    title: str
    body: str
    line: int


@dataclass(frozen=True)
class Page:
    path: Path
    blocks: tuple[Block, ...]

    @property
    def name(self) -> str:
        return self.path.relative_to(DOCS).as_posix()

    @property
    def files(self) -> dict[str, str]:
        """The files that the page shows, by name."""
        found: dict[str, str] = {}
        for block in self.blocks:
            if block.title:
                found[block.title] = found[block.title] + "\n\n" + block.body if block.title in found else block.body
        return found

    @property
    def program(self) -> str:
        """The Python blocks without a title, each on the line on which the page has it."""
        lines: list[str] = []
        for block in self._of("python"):
            lines += [""] * (block.line - len(lines)) + block.body.splitlines()
        return "\n".join(lines) + "\n" if lines else ""

    @property
    def commands(self) -> str:
        return "".join(block.body for block in self._of("bash"))

    def write(self, folder: Path) -> None:
        for name, text in self.files.items():
            assert "/" not in name and name not in (".", ".."), f"{self.name}: {name} is not the name of a file"
            (folder / name).write_text(text, encoding="utf-8")

    def _of(self, language: str) -> Iterator[Block]:
        return (block for block in self.blocks if block.language == language and not block.title)


def page(path: Path) -> Page:
    """Read a page. Blocks that are part of a list or of a note are found by their text without the indentation."""
    text = path.read_text(encoding="utf-8")
    blocks = []
    for match in _BLOCK.finditer(text):
        head = match["head"].strip()
        title = _TITLE.search(head)
        line = text.count("\n", 0, match.start("body"))
        blocks.append(Block(head.split()[0] if head else "", title[1] if title else "", match["body"], line))
    return Page(path, tuple(blocks))
