"""The documentation: its programs run as they stand, every option has its section, and pictures and links are right."""

from __future__ import annotations

import ast
import builtins
import io
import linecache
import os
import re
import subprocess
import sys
import tempfile
import tokenize
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.environment import job_environment
from support.pages import DOCS, Page, page
from support.ranks import run_ranks

from pipepart.lightning.strategy_options import StrategyOptions

PAGES = {path.relative_to(DOCS).as_posix(): page(path) for path in sorted(DOCS.rglob("*.md"))}
GUIDES = [name for name in PAGES if name.startswith("howto/") and PAGES[name].program]
"""Pages whose programs are run by two ranks of a pool."""
PROGRAMS = [name for name in PAGES if PAGES[name].commands and name.startswith(("start", "tutorials/", "moving/"))]
"""Pages with commands."""
TAUGHT = [name for name in PAGES if name.startswith(("start", "tutorials/", "howto/", "moving/"))]
NOT_RUN = {"ds.py"}
"""Programs of other libraries that are not installed here; their pages say so."""
TAKERS = ("Pipeline", "PipelineStrategy", "NotebookStrategy")
_ELSEWHERE = object()
"""A value that is known only when a program runs."""
PATIENCE = 400


# ---- quick checks of every block


@pytest.mark.parametrize("name", PAGES)
def test_every_block_of_python_is_python(name: str) -> None:
    for title, text in _sources(PAGES[name]):
        ast.parse(text, filename=title)


def _sources(shown: Page) -> Iterator[tuple[str, str]]:
    """The files and programs of a page with the places that name them. Elsewhere, each block is a program of its own."""
    if shown.name in TAUGHT:
        yield from ((f"{shown.name}: {file}", text) for file, text in shown.files.items() if file.endswith(".py"))
        yield f"{shown.name}", shown.program
    else:
        yield from ((f"{shown.name}:{b.line}", b.body) for b in shown.blocks if b.language == "python")


@pytest.mark.parametrize("name", TAUGHT)
def test_names_that_are_imported_exist(name: str) -> None:
    for title, text in _sources(PAGES[name]):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and node.module:
                package = node.module.partition(".")[0]
                if package == "pipepart":
                    lost = [alias.name for alias in node.names if not hasattr(import_module(node.module), alias.name)]
                    assert not lost, f"{title} imports {lost} from {node.module}"


@pytest.mark.parametrize("name", PAGES)
def test_options_exist(name: str) -> None:
    known = set(StrategyOptions.names())
    for title, text in _sources(PAGES[name]):
        program = ast.parse(text)
        tried = {id(node) for part in ast.walk(program) if isinstance(part, ast.Try) for node in ast.walk(part)}
        for node in ast.walk(program):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in TAKERS:
                given = {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg is not None}
                wrong = set(given) - known
                assert not wrong, f"{title} gives {wrong} to {node.func.id}"  # type: ignore[attr-defined]
                if id(node) in tried:  # a page that shows a refusal
                    continue
                values = {option: _value(value) for option, value in given.items()}
                StrategyOptions(**{option: value for option, value in values.items() if value is not _ELSEWHERE})


def _value(node: ast.expr) -> Any:
    """The value of a literal that needs no file."""
    try:
        value = ast.literal_eval(node)
    except ValueError:
        return _ELSEWHERE
    return _ELSEWHERE if isinstance(value, str) and value.endswith((".csv", ".json")) else value


def test_only_kinds_of_blocks_that_are_known() -> None:
    for name in TAUGHT:
        for block in PAGES[name].blocks:
            assert block.language in {"python", "bash", "console", "text"}, f"{name}:{block.line}: {block.language}"


def test_a_page_with_commands_or_programs_is_run() -> None:
    assert {name for name in TAUGHT if PAGES[name].commands or PAGES[name].program} == {*PROGRAMS, *GUIDES}
    assert not set(PROGRAMS) & set(GUIDES)  # of a page with both, one kind would not be run
    for name in PROGRAMS:
        commands = PAGES[name].commands
        idle = {file for file in PAGES[name].files if file not in commands} - NOT_RUN
        assert not idle, f"{name}: no command uses {idle}"


def test_every_option_has_its_section() -> None:
    rows = re.findall(r"^\| (\w+) \| ", (DOCS / "options.md").read_text(), re.MULTILINE)
    options = set(rows) - {"option"}
    assert options == set(StrategyOptions.names())
    sections = re.findall(r"^## `(\w+)`: ", "\n".join((DOCS / name).read_text() for name in GUIDES), re.MULTILINE)
    assert sorted(sections) == sorted(options)
    index = (DOCS / "howto" / "index.md").read_text()
    assert {option for option in options if f"`{option}`" not in index} == set()


# ---- pictures


def test_pictures_are_those_of_the_simulator() -> None:
    from tools.docs.pictures import FOLDER, pictures

    made = pictures()
    assert {path.name for path in FOLDER.glob("*.svg")} == set(made)
    different = [name for name, text in made.items() if (FOLDER / name).read_text(encoding="utf-8") != text]
    assert not different, f"{different} differ: python -m tools.docs.pictures"


# ---- programs


def _run(shown: Page, folder: Path, commands: str) -> str:
    """Run the commands of a page as somebody types them, in a folder with its files. Returns what they print."""
    shown.write(folder)
    environment = job_environment(PYTHONUNBUFFERED="1", WANDB_MODE="offline")
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment["PATH"]])
    with tempfile.TemporaryFile("w+") as said:
        done = subprocess.run(
            ["bash", "-e", "-o", "pipefail", "-c", commands],
            cwd=folder, env=environment, stdout=said, stderr=subprocess.STDOUT, timeout=PATIENCE, check=False,
        )  # fmt: skip
        said.seek(0)
        text = said.read()
    assert done.returncode == 0, f"{shown.name}: exit code {done.returncode}\n{text[-6000:]}"
    return text


@pytest.mark.slow
@pytest.mark.timeout(420)
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_programs_of_a_page(name: str, tmp_path: Path) -> None:
    said = _run(PAGES[name], tmp_path, PAGES[name].commands)
    _CHECKS.get(name, lambda said, folder: None)(said, tmp_path)


def _lightning(said: str, folder: Path) -> None:
    assert "the origin is in class 0" in said and float(re.findall(r"accuracy (\d\.\d+)", said)[0]) > 0.9
    assert {"plan.json", "report.html", "trace.json"} <= {path.name for path in (folder / "runs" / "first").iterdir()}


def _pytorch(said: str, folder: Path) -> None:
    [held], [alone] = re.findall(r"held out (\S+)", said), re.findall(r"in one process (\S+)", said)
    assert float(held) == pytest.approx(float(alone), abs=2e-3)


def _large(said: str, folder: Path) -> None:
    shares = [int(share) for share in re.findall(r"rank \d holds (\d+)%", said)]
    assert len(shares) == 2 and max(shares) < 100 and "loaded " in said


def _plans(said: str, folder: Path) -> None:
    assert "4 stage(s) = 4 device(s)" in said and (folder / "plan.svg").is_file()


def _machines(said: str, folder: Path) -> None:
    assert "1 process on each of 2 machines" in said
    assert len(list(folder.glob("runs/*/result.json"))) == 1


def _failures(said: str, folder: Path) -> None:
    assert "the run has failed" in said and "last.ckpt" in said and "terminated with code -9" in said
    assert re.findall(r"rank \d has done (\d+) steps", said) == ["10", "10"]


def _same_losses(said: str, folder: Path) -> None:
    losses: dict[str, set[str]] = {}
    for step, loss in re.findall(r"step (\d)  loss (\S+)", said):
        losses.setdefault(step, set()).add(loss)
    assert len(losses) == 4
    for step, found in losses.items():
        assert max(map(float, found)) - min(map(float, found)) < 2e-5, (step, found)


_CHECKS = {
    "tutorials/lightning.md": _lightning,
    "tutorials/pytorch.md": _pytorch,
    "tutorials/large_model.md": _large,
    "tutorials/plans.md": _plans,
    "tutorials/machines.md": _machines,
    "tutorials/failures.md": _failures,
    "moving/ddp.md": _same_losses,
    "moving/fsdp.md": _same_losses,
    "moving/torch_pipelining.md": _same_losses,
    "moving/deepspeed.md": _same_losses,
}


# ---- guides: programs of two ranks


def _guide(path: str, folder: str) -> list[tuple[int, str]]:
    """Run the Python blocks of a page on this rank. Returns each line that prints, with what it prints."""
    shown, printed = page(Path(path)), []

    def noted(*values: Any, **options: Any) -> None:
        printed.append((sys._getframe(1).f_lineno, " ".join(map(str, values))))
        builtins.print(*values, **options)

    before, module = (os.getcwd(), list(sys.path)), ModuleType("guide")
    sys.modules["guide"] = module
    os.chdir(folder)
    sys.path.insert(0, folder)
    sys.modules.pop("example", None)
    try:
        linecache.cache[shown.name] = (0, None, shown.program.splitlines(keepends=True), shown.name)
        vars(module)["print"] = noted
        exec(compile(shown.program, shown.name, "exec"), vars(module))
    finally:
        os.chdir(before[0])
        sys.path[:] = before[1]
        for name in ("example", "guide"):
            sys.modules.pop(name, None)
    return printed


def _promises(text: str) -> dict[int, str]:
    """The comments after calls of print, by line: what the page says that they print."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    lines = text.splitlines()
    comments = {t.start[0]: t.string[1:].strip() for t in tokens if t.type == tokenize.COMMENT}
    return {line: words for line, words in comments.items() if lines[line - 1].lstrip().startswith("print(")}


@pytest.mark.slow
@pytest.mark.timeout(420)
@pytest.mark.parametrize("name", GUIDES)
def test_the_programs_of_a_guide(name: str, tmp_path: Path) -> None:
    PAGES["howto/index.md"].write(tmp_path)
    promises, found = _promises(PAGES[name].program), {}
    for printed in run_ranks(2, _guide, str(PAGES[name].path), str(tmp_path), timeout=PATIENCE - 20):
        for line, words in printed:
            found[line] = words
            assert promises.get(line, words) == words, f"{name}:{line}"
    assert set(promises) <= set(found), f"{name}: lines that were not reached"
