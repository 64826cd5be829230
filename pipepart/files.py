"""Files of plans, traces, graphs, costs and clusters: JSON and YAML with limits, and typed access to their contents.

A file may hold anything, so every value passes `typed` of `pipepart.values`, which refuses wrong types, numbers outside
of their ranges, and unknown or missing names. Each refusal is one sentence with the path and the field. Files are written
whole or not at all. This module does not know plans or models.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar, cast

from pipepart.errors import PipepartError, PlanError
from pipepart.values import Misfit, inside, shortened, typed

__all__ = [
    "Field",
    "keep_json",
    "load_json",
    "load_yaml",
    "may_fail",
    "parse_json",
    "read_text",
    "write_whole",
]

_log = logging.getLogger("pipepart")

_MOST_BYTES = 2**28
_MOST_YAML_BYTES = 2**18
"""YAML is written by hand, and its parser is slow."""
_DEEPEST = 50
"""Levels of nesting of a YAML file."""

_Kind = TypeVar("_Kind")


def read_text(path: str | Path, error: type[PipepartError] = PlanError, most: int = _MOST_BYTES) -> str:
    """Read the text of a regular file of at most so many bytes. Other kinds of files, such as pipes, are not waited for."""
    shown = shortened(str(path), 300)
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise error(f"cannot read {shown}: expected a regular file")
            data = file.read(most + 1) if found.st_size <= most else b""
        if found.st_size > most or len(data) > most:
            raise error(f"cannot read {shown}: it has more than {most} bytes, which is the limit")
        return data.decode("utf-8")
    except OSError as problem:
        reason = "expected a regular file" if isinstance(problem, IsADirectoryError) else problem.strerror
        raise error(f"cannot read {shown}: {reason}") from problem
    except ValueError as problem:  # bytes that are not UTF-8, or a path with a null character
        raise error(f"cannot read {shown}: {problem}") from problem


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the field {shortened(next(n for n in names if names.count(n) > 1))} occurs twice")
    return found


def parse_json(text: str, name: str, error: type[PipepartError] = PlanError) -> Field:
    """Parse a JSON document; `name` is its name in errors. A field that occurs twice is refused."""
    try:
        return Field(json.loads(text, object_pairs_hook=_object), name, error=error)
    except RecursionError as problem:
        raise error(f"{name} is not usable JSON: it is nested too deeply") from problem
    except ValueError as problem:
        raise error(f"{name} is not JSON: {problem}") from problem


def load_json(path: str | Path, error: type[PipepartError] = PlanError) -> Field:
    """Read a JSON file."""
    return parse_json(read_text(path, error), str(path), error)


def load_yaml(path: str | Path, error: type[PipepartError] = PlanError) -> Field:
    """Read a YAML file. Aliases are refused, since a short file could stand for a document of any size."""
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    text = read_text(path, error, _MOST_YAML_BYTES)
    try:
        flow = yaml.FlowMappingStartToken, yaml.FlowSequenceStartToken
        opening = yaml.BlockMappingStartToken, yaml.BlockSequenceStartToken, *flow
        closing = yaml.BlockEndToken, yaml.FlowMappingEndToken, yaml.FlowSequenceEndToken
        depth = 0
        for token in yaml.scan(text):
            if isinstance(token, yaml.AliasToken):
                raise error(f"{str(path)!r} is not usable YAML: it has an alias (*{token.value}), which is not allowed")
            depth += isinstance(token, opening) - isinstance(token, closing)
            if depth > _DEEPEST:
                raise error(f"{str(path)!r} is not usable YAML: it is nested more than {_DEEPEST} levels deep")
        return Field(OmegaConf.to_container(OmegaConf.create(text), resolve=True), str(path), error=error)
    except (yaml.YAMLError, OmegaConfBaseException, RecursionError, ValueError) as problem:
        raise error(f"{str(path)!r} is not usable YAML: {problem}") from problem
    except (AssertionError, TypeError) as problem:  # a document that is a single number or date
        raise error(f"{str(path)!r} is not usable YAML; expected a mapping") from problem


def write_whole(path: str | Path, text: str, sync: bool = False) -> None:
    """Write a text file whole or not at all: beside its place, and renamed when it is complete.

    A file that was there before stays if the new one cannot be written. `sync` waits until the text is on the disk.
    """
    target = Path(os.path.realpath(path))
    regular = target.is_file() or not target.exists()  # others, such as /dev/stdout, are written to directly
    beside = target.with_name(f"{target.name}.{os.getpid()}.part") if regular else target
    try:
        if regular:
            beside.unlink(missing_ok=True)
        with open(beside, "x" if regular else "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            if sync:
                os.fsync(file.fileno())
        if regular:
            os.replace(beside, target)
    except BaseException:
        if regular:
            with suppress(OSError):
                beside.unlink()
        raise


@contextmanager
def may_fail(what: str) -> Iterator[None]:
    """Replace an error inside by one warning. The code inside writes `what`, on which the run does not depend."""
    try:
        yield
    except Exception as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or f"{type(error).__name__}: {error}"
        _log.warning(f"pipepart: {what} could not be written: {reason}. Training and checkpoints are not affected.")


def keep_json(path: Path, data: Any) -> None:
    """Write a file of a cache. A cache that cannot be written costs time, not the run."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(data) + "\n")


@dataclasses.dataclass(frozen=True)
class Field:
    """A value from a file, with its place for errors."""

    value: Any
    path: str
    place: str = ""
    error: type[PipepartError] = PlanError

    def refused(self, expected: str) -> PipepartError:
        """Make the error for a value that is not the expected one."""
        return self._refusal(Misfit(self.place, self.value, expected))

    def _refusal(self, problem: Misfit) -> PipepartError:
        if problem.sentence:
            return self.error(f"{self.path}: {problem.sentence}")
        held = problem.value if isinstance(problem.value, (dict, list)) else ()
        shown = f"a {type(held).__name__} of {len(held)} entries" if held else shortened(problem.value)
        where = f"{self.path}: {problem.place}" if problem.place else self.path
        return self.error(f"{where} is {shown}; expected {problem.expected}")

    def at(self, key: str | int) -> Field:
        """Return the entry of an object by its name, or of a list by its number."""
        place = inside(self.place, key)
        if isinstance(key, str) and key not in self.entries():
            raise self.error(f"{self.path}: there is no field {place!r}")
        return dataclasses.replace(self, value=self.value[key], place=place)

    def entries(self) -> Mapping[str, Any]:
        """Return the object that this value is."""
        return self.read(Mapping[str, Any])  # type: ignore[type-abstract]

    def read(self, kind: type[_Kind]) -> _Kind:
        """Return the value as a dataclass, a tuple, a mapping or a plain value of this type (see `typed`)."""
        try:
            return cast(_Kind, typed(self.value, kind, self.place, file=True))
        except Misfit as problem:
            raise self._refusal(problem) from None
        except PipepartError as problem:  # of a dataclass
            raise self.error(f"{self.path}: {problem}") from problem
