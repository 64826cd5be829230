"""The commands on all pages exist, with their options, and ask for configurations that compose."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.pages import DOCS, page

from pipepart.cli.config import checked, compose_config
from pipepart.cli.main import main
from pipepart.errors import PipepartError

ROOT = DOCS.parent
SHOWN = [*sorted(DOCS.rglob("*.md")), *(ROOT / name for name in ("README.md", "recipes/README.md", "CONTRIBUTING.md"))]
CONFIGURED = ("train", "plan", "verify", "bench")
COMMANDS = (*CONFIGURED, "view", "export", "predict", "recipes", "doctor", "selftest")
_INLINE = re.compile(r"`([^`\n]*\bpipepart [^`\n]*|(?:make|python -m tools)[^`\n]*)`")
_END = {"&", "&&", "|", ";", ">"}


def _lines(path: Path) -> Iterator[str]:
    """The lines that the blocks and the texts of a page show as commands."""
    for block in page(path).blocks:
        if block.language in ("bash", "console"):
            for line in block.body.replace("\\\n", " ").splitlines():
                yield line.removeprefix("$ ")
    prose = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    yield from (match[1] for match in _INLINE.finditer(prose))


def _commands(path: Path) -> Iterator[list[str]]:
    """The words of each command, without what the shell takes for itself."""
    for line in _lines(path):
        words = shlex.split(line, comments=True)
        for word in words:
            if word in _END:
                words = words[: words.index(word)]
                break
        yield [word for word in words if "$" not in word and "..." not in word]


def _told(path: Path) -> Iterator[tuple[str, list[str]]]:
    """Calls of the command line: the command and its words."""
    for words in _commands(path):
        for place, word in enumerate(words[:-1]):
            if word in ("pipepart", "pipepart.cli") and words[place + 1] in COMMANDS:
                yield words[place + 1], words[place + 2 :]
                break


def _composed(command: str, words: list[str]) -> None:
    """Compose the configuration of a call. A sweep is composed with its first values."""
    overrides = [word for word in words if re.match(r"[+~]*[\w.@/]+=", word) and not word.endswith(".yaml")]
    if "-m" in words:
        overrides = [re.sub(r"=([^\[{,]+),.*", r"=\1", word) for word in overrides if not word.startswith("hydra.")]
    checked(compose_config(overrides, "plan" if command == "plan" else "train"))


@pytest.mark.slow
def test_calls_of_the_command_line_compose() -> None:
    wrong, seen = [], set()
    for path in SHOWN:
        for command, words in _told(path):
            call = (command in CONFIGURED and command, *(word for word in words if "=" in word))
            if command in (*CONFIGURED, "export", "predict") and call not in seen and "--config-dir" not in words:
                seen.add(call)
                try:
                    _composed(command, words)
                except PipepartError as error:
                    wrong.append(f"{path.relative_to(ROOT)}: pipepart {command} {shlex.join(words)}: {error}")
    assert not wrong, "\n".join(wrong)
    assert len(seen) > 20


def test_options_of_the_command_line_exist(capsys: pytest.CaptureFixture[str]) -> None:
    wrong, helps = [], {}
    for path in SHOWN:
        for command, words in _told(path):
            if command not in helps:
                with pytest.raises(SystemExit):
                    main([command, "--help"])
                helps[command] = set(re.findall(r"(?<![\w-])--?[\w-]+", capsys.readouterr().out))
            given = {word for word in words if re.fullmatch(r"--?[a-z][\w-]*", word)}
            if command != "bench" or words[:1] != ["schedules"]:
                wrong += [
                    f"{path.relative_to(ROOT)}: pipepart {command} has no {option}" for option in given - helps[command]
                ]
    assert not wrong, "\n".join(wrong)
    assert helps.keys() == set(COMMANDS)


def test_other_commands_of_the_project_exist() -> None:
    targets = set(re.findall(r"^([\w-]+(?: [\w-]+)*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    targets = {target for together in targets for target in together.split()}
    wrong = []
    for path in SHOWN:
        for words in _commands(path):
            if words[:1] == ["make"] and len(words) > 1 and words[1] not in targets:
                wrong.append(f"{path.relative_to(ROOT)}: make {words[1]}")
            if words[:2] == ["python", "-m"] and words[2].startswith("tools.") and find_spec(words[2]) is None:
                wrong.append(f"{path.relative_to(ROOT)}: python -m {words[2]}")
    assert not wrong
