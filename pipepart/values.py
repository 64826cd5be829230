"""Values from users: their types, their ranges, and their safe form in messages, tables and pictures.

`typed` is the only code that compares a value with an annotation, for options, for configurations and for files.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
import types
import typing
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal

from pipepart.errors import ConfigError, PlanError, did_you_mean

__all__ = [
    "COUNT", "MOST_WHOLE", "SECONDS", "Count", "Misfit", "Positive", "Range", "Seconds", "check_fields", "check_number", "fits",
    "inside", "printable", "shortened", "typed",
]  # fmt: skip


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
MOST_WHOLE = 2**53
"""The largest whole number that a file may hold: the largest that JSON readers agree on."""
Count = Annotated[int, COUNT]
Positive = Annotated[int, Range(1, MOST_WHOLE)]
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


class Misfit(Exception):
    """A value that does not fit its type: its place, and the sentence about it if the type is not the reason."""

    def __init__(self, place: str, value: Any, expected: str, sentence: str = "") -> None:
        super().__init__(sentence or expected)
        self.place, self.value, self.expected, self.sentence = place, value, expected, sentence


def inside(place: str, key: str | int) -> str:
    """The place of an entry of an object by its name, or of a list by its number."""
    if isinstance(key, int):
        return f"{place}[{key}]"
    name = printable(key[:80])
    return f"{place}.{name}" if place else name


_PLAIN: dict[Any, tuple[Any, ...]] = {
    bool: (lambda value: isinstance(value, bool), "True", "False"),
    str: (lambda value: isinstance(value, str), "a string"),
    int: (lambda value: _is_number(value, int), "a whole number"),
    float: (lambda value: _is_number(value, float), "a number"),
    None: (lambda value: value is None, "None"),
    type(None): (lambda value: value is None, "None"),
}
"""Plain types: the test of a value, and the words for the type."""
_IN_FILES: dict[Any, Any] = {int: Annotated[int, Range(0, MOST_WHOLE)], float: Annotated[float, Range(0, 1e300)]}
"""Ranges of the numbers in files that declare none."""


def _test(annotation: Any) -> Callable[[Any], bool] | None:
    """The test of a plain type, of one with a range, or of a list of words; None for other types."""
    parts = typing.get_args(annotation)
    if typing.get_origin(annotation) is Annotated:
        inner, ranges = _test(parts[0]), [part for part in parts[1:] if isinstance(part, Range)]
        return inner and (lambda value: inner(value) and all(allowed.holds(value) for allowed in ranges))
    if typing.get_origin(annotation) is Literal:
        return lambda value: any(type(value) is type(word) and value == word for word in parts)
    return _PLAIN[annotation][0] if annotation in _PLAIN else None


def typed(value: Any, annotation: Any, place: str = "", file: bool = False) -> Any:
    """Return the value as its type, or raise a `Misfit` with the place of the part that does not fit.

    Lists become tuples. Types other than numbers, strings, literals and containers are left to the callee. In a `file`,
    numbers are finite and not negative unless they declare a range, and an object becomes the dataclass of its type: a
    field that has a default may be missing, and a field that the dataclass does not have is refused.
    """
    annotation = _IN_FILES.get(annotation, annotation) if file else annotation
    test, origin, parts = _test(annotation), typing.get_origin(annotation), typing.get_args(annotation)
    if test is not None:
        if test(value):
            return value
        raise Misfit(place, value, _expected(annotation, value))
    if origin is Annotated:
        return typed(value, parts[0], place, file)
    if origin in (typing.Union, types.UnionType):
        return _one_of(value, annotation, place, file)
    kind = origin or annotation
    if not inspect.isclass(kind) or kind is object:
        return value
    if issubclass(kind, Collection) and not issubclass(kind, (str, bytes, Mapping)):
        return _entries(value, annotation, place, file)
    built = file and dataclasses.is_dataclass(kind)
    if built or issubclass(kind, Mapping):
        named = isinstance(value, Mapping) and (parts[:1] != (str,) or all(isinstance(name, str) for name in value))
        if not named:
            raise Misfit(place, value, _expected(annotation, value))
        if built:
            return _built(value, kind, place)
        inner = parts[1] if parts else Any
        return {name: typed(entry, inner, inside(place, str(name)), file) for name, entry in value.items()}
    return value


def _one_of(value: Any, annotation: Any, place: str, file: bool) -> Any:
    deeper = None
    for part in typing.get_args(annotation):
        try:
            return typed(value, part, place, file)
        except Misfit as problem:
            deeper = problem if problem.place != place or problem.sentence else deeper
    raise deeper or Misfit(place, value, _expected(annotation, value))


def _entries(value: Any, annotation: Any, place: str, file: bool) -> Any:
    kind, parts = typing.get_origin(annotation) or annotation, typing.get_args(annotation)
    listed = isinstance(value, (list, tuple) if file or kind is tuple else Collection)
    many = kind is not tuple or not parts or parts[1:] == (...,)
    if not listed or isinstance(value, (str, bytes, Mapping)) or not (many or len(value) == len(parts)):
        raise Misfit(place, value, _expected(annotation, value))
    first = parts[0] if parts else Any
    test = _test(_IN_FILES.get(first, first) if file else first)
    if many and test is not None and all(map(test, value)):  # long columns need no place for each entry
        return tuple(value)
    kinds = (first,) * len(value) if many else parts
    return tuple(typed(item, kind, inside(place, i), file) for i, (item, kind) in enumerate(zip(value, kinds)))


def _built(given: Mapping[str, Any], kind: Any, place: str) -> Any:
    """The dataclass of an object in a file."""
    hints = _hints(kind)
    for name in given:
        if name not in hints and not getattr(kind, "OPEN_ENDED", False):
            known = did_you_mean(str(name), hints)
            raise Misfit(place, given, "", f"unknown field {inside(place, str(name))!r}: {known}")
    for field in dataclasses.fields(kind):
        if field.name not in given and field.default is field.default_factory is dataclasses.MISSING:
            raise Misfit(place, given, "", f"there is no field {inside(place, field.name)!r}")
    return kind(**{name: typed(given[name], hints[name], inside(place, name), True) for name in hints if name in given})


@cache
def _hints(kind: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(kind, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def fits(value: Any, annotation: Any) -> bool:
    """Whether a value has a type."""
    try:
        typed(value, annotation)
    except Misfit:
        return False
    return True


def _expected(annotation: Any, value: Any) -> str:
    """A type in words, with the limit that a value breaks."""
    *first, last = _words(annotation, value)
    return f"{', '.join(first)} or {last}" if first else last


def _words(annotation: Any, value: Any) -> list[str]:
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return [f"{_words(parts[0], value)[0]} {parts[1].text(value)}"]
    if origin in (typing.Union, types.UnionType):
        return [word for part in parts for word in _words(part, value)]
    if origin is Literal:
        return [repr(word) for word in parts]
    if annotation in _PLAIN:
        return list(_PLAIN[annotation][1:])
    if origin is tuple and parts[1:] != (...,):
        return [f"a list of {len(parts)} entries"]
    kind = origin or annotation
    if inspect.isclass(kind) and (issubclass(kind, Mapping) or dataclasses.is_dataclass(kind)):
        return ["an object with named fields"]
    inner = {str: " of strings", int: " of whole numbers", float: " of numbers"}
    return ["a list" + (inner.get(parts[0], " of lists") if parts else "")]


def check_fields(options: Any) -> None:
    """Compare every field of a dataclass with the type and range that its annotation declares.

    Fields of other types (a plan, a batch) are not checked.
    """
    kind: Any = type(options)
    for name, annotation in _hints(kind).items():
        try:
            typed(getattr(options, name), annotation, name)
        except Misfit as problem:
            got = shortened(problem.value)
            if typing.get_origin(annotation) is Literal:
                known = did_you_mean(got, typing.get_args(annotation))
                raise ConfigError(f"{name} {got} is not known: {known}") from None
            raise PlanError(f"{problem.place} must be {problem.expected}, got {got}") from None


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
