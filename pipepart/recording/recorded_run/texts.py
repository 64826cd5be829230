"""Texts that a recorded run makes of numbers and tensors: marks stand for the values until they are known.

``f"loss {loss.item():.3f}"`` would be a constant of the recorded run. With marks, the text keeps the place of each value and
its format, so that whoever repeats the text after a step can fill in the values of that step.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from pipepart.recording.model_state.reachable import is_foreign, is_library

__all__ = ["Mark", "Texts", "has_marks", "mark", "parts_of"]

_OPEN, _CLOSE = "\ue3f0", "\ue3f1"
"""Characters for private use, which no text of a program has."""
_MARK = re.compile(f"{_OPEN}(\\d+){_CLOSE}")


@dataclass(frozen=True)
class Mark:
    """A value that the user's code has made a text of."""

    value: Any
    how: str
    """The name of the method: "__format__", "__str__" or "__repr__"."""
    spec: str

    def text(self, value: Any) -> str:
        """Return the text of another value in this place."""
        if self.how == "__format__":
            return format(value, self.spec)
        return repr(value) if self.how == "__repr__" else str(value)


@dataclass
class Texts:
    """The texts of one run. With `marking`, values in them are marks."""

    marking: bool = False
    seen: bool = False
    """Whether code of the user has made a text of a number or tensor of the run."""
    marks: list[Mark] = field(default_factory=list)

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Collect the texts of the run inside."""
        self.marks.clear()
        _running.append(self)
        try:
            yield
        finally:
            _running.pop()


_running: list[Texts] = []


def mark(value: Any, how: str, spec: str = "") -> str | None:
    """Return a mark for a value that becomes a text; None if the text is to be that of the value."""
    if not _running or not _is_user():
        return None
    texts = _running[-1]
    texts.seen = True
    if not texts.marking:
        return None
    texts.marks.append(Mark(value, how, spec))
    return f"{_OPEN}{len(texts.marks) - 1}{_CLOSE}"


def _is_user() -> bool:
    """Return whether code of the user asks for the text, and not a library for one of its own."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        name = frame.f_globals.get("__name__")
        if not is_library(name):
            return not is_foreign(name)
        frame = frame.f_back
    return False


def has_marks(text: Any) -> bool:
    """Return whether a text of the run that goes on has marks."""
    return isinstance(text, str) and bool(_running) and _OPEN in text


def parts_of(text: str, found: Callable[[Mark], Any]) -> list[Any]:
    """Return the constant parts of a text in turn with ``found(mark)`` for each of its marks."""
    pieces = _MARK.split(text)
    return [found(_running[-1].marks[int(piece)]) if i % 2 else piece for i, piece in enumerate(pieces)]
