"""Values from users: their types, their ranges, and their safe form in messages, tables and pictures."""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
import types
import typing
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pipepart.errors import ConfigError, PlanError, did_you_mean

__all__ = [
    "COUNT",
    "SECONDS",
    "Count",
    "Range",
    "Seconds",
    "check_fields",
    "check_number",
    "fits",
    "printable",
    "shortened",
]


@dataclass(frozen=True)
class Range:
    """The numbers from `least` to `most`; with `above` without `least` itself. NaN is in no range."""

    least: float
    most: float
    above: bool = False

    def holds(self, value: float) -> bool:
        return (self.least < value if self.above else self.least <= value) and value <= self.most

    def text(self, value: Any) -> str:
        """The limit that the value breaks, as the end of `a number ...`."""
        if isinstance(value, (int, float)) and value > self.most:
            return f"of at most {self.most}"
        return f"above {self.least}" if self.above else f"of at least {self.least}"


COUNT = Range(1, 65_536)
"""Numbers of devices, stages, replicas, micro-batches and chunks."""
SECONDS = Range(0, 10_000_000, above=True)
"""Time limits."""
Count = Annotated[int, COUNT]
Seconds = Annotated[float, SECONDS]

_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff\ufffe\uffff]")


def printable(text: str, keep: str = "") -> str:
    r"""The text with control characters, lone surrogates and marks of direction written out (``\x1b``), except `keep`.

    Names of modules and texts of errors may contain any character. Written out, they can neither control a terminal nor
    make an XML file invalid.
    """
    return _UNPRINTABLE.sub(lambda m: m[0] if m[0] in keep else m[0].encode("unicode_escape").decode("ascii"), text)


def shortened(value: Any, most: int = 80) -> str:
    """A value for an error message: its `repr`, cut to `most` characters."""
    try:
        text = printable(repr(value))
    except Exception:  # a number of more than 4,300 digits, or a class whose repr fails
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= most else text[: most - 3] + "..."


def _is_number(value: Any, kind: type) -> bool:
    return not isinstance(value, bool) and isinstance(value, int if kind is int else (int, float))


def fits(value: Any, annotation: Any) -> bool:
    """Whether a value has a type. Types other than numbers, strings, literals and containers are left to the callee."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return fits(value, arguments[0]) and all(r.holds(value) for r in arguments[1:] if isinstance(r, Range))
    if annotation is None or annotation is type(None):
        return value is None
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, part) for part in arguments)
    if origin is typing.Literal:
        return any(type(value) is type(word) and value == word for word in arguments)
    if annotation is bool or annotation is str:
        return isinstance(value, annotation)
    if annotation is int or annotation is float:
        return _is_number(value, annotation)
    kind = origin or annotation
    if not inspect.isclass(kind) or kind is object:
        return True
    if kind is tuple:
        inner = (
            arguments[:1] * len(value) if isinstance(value, (list, tuple)) and arguments[1:] == (...,) else arguments
        )
        return isinstance(value, (list, tuple)) and (
            not inner or (len(inner) == len(value) and all(map(fits, value, inner)))
        )
    if issubclass(kind, Mapping):
        return isinstance(value, Mapping)
    if issubclass(kind, Collection) and kind is not bytes:
        listed = isinstance(value, Collection) and not isinstance(value, (str, bytes, Mapping))
        return listed and all(fits(item, arguments[0]) for item in value if arguments)
    return True


def _words(annotation: Any, value: Any) -> list[str]:
    """The alternatives of a type in words, with the limit that a value breaks."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return [f"{_words(arguments[0], value)[0]} {arguments[1].text(value)}"]
    if origin in (typing.Union, types.UnionType):
        return [word for part in arguments for word in _words(part, value)]
    if origin is typing.Literal:
        return [repr(word) for word in arguments]
    names = {int: "a whole number", float: "a number", str: "a string", type(None): "None"}
    if annotation is bool:
        return ["True", "False"]
    if annotation in names:
        return [names[annotation]]
    inner = {str: " of strings", int: " of whole numbers", float: " of numbers"}
    return ["a list" + (inner.get(arguments[0], " of lists") if arguments else "")]


def check_fields(options: Any) -> None:
    """Hold every field of a dataclass against its type and range, as its annotation declares them.

    Fields of other types (a plan, a batch) are not checked.
    """
    hints = typing.get_type_hints(type(options), include_extras=True)
    for field in dataclasses.fields(options):
        value, annotation = getattr(options, field.name), hints[field.name]
        if fits(value, annotation):
            continue
        if typing.get_origin(annotation) is typing.Literal:
            known = did_you_mean(shortened(value), typing.get_args(annotation))
            raise ConfigError(f"{field.name} {shortened(value)} is not known: {known}")
        *first, last = _words(annotation, value)
        expected = f"{', '.join(first)} or {last}" if first else last
        raise PlanError(f"{field.name} must be {expected}, got {shortened(value)}")


def check_number(name: str, value: Any, allowed: Range | None = None, whole: bool = False) -> None:
    """Refuse a number of a configuration that is not finite, too large for any use, or outside of its range."""
    if not _is_number(value, int if whole else float):
        raise ConfigError(f"{name} must be a {'whole ' * whole}number, got {shortened(value)}")
    finite = math.isfinite(value) if isinstance(value, float) else abs(value) < 2**63
    if not finite:
        raise ConfigError(f"{name} must be a finite number below 2**63, got {shortened(value)}")
    if allowed is not None and not allowed.holds(value):
        kind = "a whole number" if whole else "a number"
        raise ConfigError(f"{name} must be {kind} {allowed.text(value)}, got {shortened(value)}")
