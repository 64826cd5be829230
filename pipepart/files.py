"""Files of plans, traces, graphs, costs and clusters: JSON and YAML with limits, and typed access to what they hold.

A file may hold anything, so every value passes a `Field`, which refuses wrong types, NaN, negative and infinite numbers,
and unknown or missing names. Each refusal is one sentence with the path and the field. Knows nothing of plans or models.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from pipepart.errors import PipepartError, PlanError, did_you_mean

__all__ = ["MOST_WHOLE", "Field", "keep_json", "load_json", "load_yaml", "parse_json", "read_text"]

MOST_WHOLE = 2**53
"""The largest whole number that a file may hold: the largest that JSON readers agree on."""
_MOST_NUMBER = 1e300
_MOST_BYTES = 2**28
_MOST_YAML_BYTES = 2**18
"""YAML is written by hand, and its parser is slow."""
_DEEPEST = 50
"""Levels of nesting of a YAML file."""

_Kind = TypeVar("_Kind")


def read_text(path: str | Path, error: type[PipepartError] = PlanError, most: int = _MOST_BYTES) -> str:
    """Read the text of a regular file of at most so many bytes."""
    try:
        if not Path(path).is_file() and Path(path).exists():
            raise error(f"cannot read {str(path)!r}: expected a regular file")
        with open(path, "rb") as file:
            data = file.read(most + 1)
        if len(data) > most:
            raise error(f"cannot read {str(path)!r}: it has more than {most} bytes, which is the limit")
        return data.decode("utf-8")
    except OSError as problem:
        raise error(f"cannot read {str(path)!r}: {problem.strerror}") from problem
    except ValueError as problem:  # bytes that are not UTF-8, or a path with a null character
        raise error(f"cannot read {str(path)!r}: {problem}") from problem


def parse_json(text: str, name: str, error: type[PipepartError] = PlanError) -> Field:
    """Parse a JSON document; `name` is its name in errors."""
    try:
        return Field(json.loads(text), name, error=error)
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


def keep_json(path: Path, data: Any) -> None:
    """Write a file of a cache, whole or not at all. A cache that cannot be written costs time, not the run."""
    beside = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(json.dumps(data) + "\n")
        os.replace(beside, path)
    except OSError:
        with suppress(OSError):
            beside.unlink()


@dataclasses.dataclass(frozen=True)
class Field:
    """A value from a file, with its place for errors."""

    value: Any
    path: str
    place: str = ""
    error: type[PipepartError] = PlanError

    def refused(self, expected: str) -> PipepartError:
        """Make the error for a value that is not the expected one."""
        held = self.value if isinstance(self.value, (dict, list)) else ()
        shown = f"a {type(held).__name__} of {len(held)} entries" if held else repr(self.value)[:80]
        where = f"{self.path}: {self.place}" if self.place else self.path
        return self.error(f"{where} is {shown}; expected {expected}")

    def at(self, key: str | int) -> Field:
        """Return the entry of an object by its name, or of a list by its number."""
        place = f"{self.place}[{key}]" if isinstance(key, int) else f"{self.place}.{key}".lstrip(".")
        if isinstance(key, str) and key not in self.entries():
            raise self.error(f"{self.path} has no field {place!r}")
        return dataclasses.replace(self, value=self.value[key], place=place)

    def entries(self) -> Mapping[str, Any]:
        """Return the object that this value is."""
        if not isinstance(self.value, collections.abc.Mapping) or not all(isinstance(key, str) for key in self.value):
            raise self.refused("an object with named fields")
        return self.value

    def whole(self, least: int = 0, most: int = MOST_WHOLE) -> int:
        """Return a whole number in a range."""
        if type(self.value) is not int or not least <= self.value <= most:
            raise self.refused(f"a whole number from {least} to {most}")
        return self.value

    def read(self, kind: type[_Kind]) -> _Kind:
        """Return the value as a dataclass, a tuple, a mapping or a plain value of this type.

        Numbers must be finite and not negative. Objects become dataclasses, lists become tuples; a field that has a
        default may be missing, and a field that the dataclass does not have is refused.
        """
        return cast(_Kind, self._read(kind))

    def _read(self, kind: Any) -> Any:
        origin, parts = get_origin(kind), get_args(kind)
        if kind in _PLAIN:
            plain = _PLAIN[kind]
            if not plain.accepts(self.value):
                raise self.refused(plain.expected)
            return self.value
        if origin in (Union, UnionType):  # a type or None
            return None if self.value is None else self._read(next(part for part in parts if part is not NoneType))
        if origin is tuple:
            return self._list(parts)
        if origin in (dict, collections.abc.Mapping):
            return {name: self.at(name)._read(parts[1]) for name in self.entries()}
        return self._dataclass(kind)

    def _list(self, parts: tuple[Any, ...]) -> tuple[Any, ...]:
        if not isinstance(self.value, (list, tuple)):
            raise self.refused("a list")
        if parts[-1] is not Ellipsis:
            if len(self.value) != len(parts):
                raise self.refused(f"a list of {len(parts)} entries")
            return tuple(self.at(index)._read(part) for index, part in enumerate(parts))
        plain = _PLAIN.get(parts[0])
        if plain is not None and all(map(plain.accepts, self.value)):  # long columns need no field for each entry
            return tuple(self.value)
        return tuple(self.at(index)._read(parts[0]) for index in range(len(self.value)))

    def _dataclass(self, kind: Any) -> Any:
        hints, given = _hints(kind), self.entries()
        for name in given:
            if name not in hints:
                raise self.error(f"{self.path}: unknown field {self.at(name).place!r}: {did_you_mean(name, hints)}")
        needed = {field.name for field in dataclasses.fields(kind) if _is_needed(field)}
        values = {name: self.at(name)._read(hints[name]) for name in hints if name in given or name in needed}
        try:
            return kind(**values)
        except PipepartError as problem:
            raise self.error(f"{self.path}: {problem}") from problem


@dataclasses.dataclass(frozen=True)
class _Plain:
    """A plain type: its test, and its description in errors."""

    accepts: Callable[[Any], bool]
    expected: str


_PLAIN: dict[Any, _Plain] = {
    bool: _Plain(lambda value: isinstance(value, bool), "true or false"),
    str: _Plain(lambda value: isinstance(value, str), "a text"),
    int: _Plain(
        lambda value: type(value) is int and 0 <= value <= MOST_WHOLE, f"a whole number from 0 to {MOST_WHOLE}"
    ),
    float: _Plain(
        lambda value: type(value) in (int, float) and 0 <= value <= _MOST_NUMBER, f"a number from 0 to {_MOST_NUMBER:g}"
    ),
}


def _is_needed(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


@cache
def _hints(kind: type) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}
