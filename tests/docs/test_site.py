"""The built site: no dead link, nothing from elsewhere, all reports of the gallery."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from support.pages import DOCS, page

from tools.docs.links import faults
from tools.docs.plans import EXAMPLES

ROOT = Path(__file__).parents[2]


def test_the_checker_of_links_finds_faults(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text('<a href="b.html#one">x</a><a href="b.html#two">x</a><a href="c.html">x</a>')
    (tmp_path / "b.html").write_text('<p id="one"></p><script src="https://example.org/x.js"></script><a href="#"></a>')
    (tmp_path / "c.css").write_text("@import url(https://example.org/font.css)")
    assert sorted(faults(tmp_path)) == [
        "a.html links to b.html#two, which has no such anchor",
        "a.html links to c.html, which does not exist",
        "b.html loads https://example.org/x.js",
        "c.css loads from elsewhere",
    ]


def test_every_page_is_in_the_table_of_contents() -> None:
    class Loader(yaml.SafeLoader):
        """Reads the tags of mkdocs as plain values."""

    Loader.add_multi_constructor("", lambda loader, suffix, node: None)
    settings = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader)
    listed = [name for section in settings["nav"] for names in section.values() for name in names]
    assert len(listed) == len(set(listed))
    outside = {"recipes.md", "changelog.md", "contributing.md", "reporting.md"}
    assert set(listed) == outside | {
        path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")
    }


def test_every_example_of_the_gallery_is_on_its_page() -> None:
    text = (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8")
    assert re.findall(r"\(gallery/(\w+)/report\.html\)", text) == list(EXAMPLES)
    for name, example in EXAMPLES.items():
        saved = json.loads((ROOT / "docs" / "gallery" / name / "plan.json").read_text(encoding="utf-8"))
        assert saved["microbatches"] == example.options["microbatches"]


def _public(file: str) -> set[str]:
    """The names in `__all__` of a file of the package."""
    for node in ast.parse((ROOT / "pipepart" / file).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return set(ast.literal_eval(node.value))
    raise AssertionError(f"{file} has no __all__")


def test_every_public_name_is_in_the_reference() -> None:
    pages = [path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "reference").glob("*.md")]
    shown = {name.rpartition(".")[2] for text in pages for name in re.findall(r"^::: ([\w.]+)", text, re.MULTILINE)}
    shown |= {
        name
        for text in pages
        for line in re.findall(r"^      members: \[(.*)\]", text, re.MULTILINE)
        for name in line.split(", ")
    }
    missing = {*_public("__init__.py"), *_public("lightning/__init__.py"), *_public("ray.py"), *_imported()} - shown
    assert not missing


def _imported() -> set[str]:
    """The names of the package that programs on the pages import."""
    programs = [block.body for path in DOCS.rglob("*.md") for block in page(path).blocks if block.language == "python"]
    lines = re.findall(r"^ *from pipepart[\w.]* import ([\w, ]+)$", "\n".join(programs), re.MULTILINE)
    return {name for line in lines for name in line.split(", ")}


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("material", reason='mkdocs-material is not installed (pip install -e ".[docs]")')
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)],
        cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},  # a banner about another program
        capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr[-4000:]
    assert faults(tmp_path) == []
    assert all((tmp_path / "gallery" / name / "report.html").is_file() for name in EXAMPLES)
