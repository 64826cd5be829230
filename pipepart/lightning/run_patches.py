"""Attributes of Lightning's classes and objects that are replaced while a run lasts, and put back when it has ended."""

from __future__ import annotations

from typing import Any

__all__ = ["RunPatches"]

_ABSENT = object()


class RunPatches:
    """The replaced attributes of one run."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def put(self, owner: Any, name: str, value: Any) -> None:
        """Replace an attribute of a class or of an object, which may have it from its class."""
        self._before.append((owner, name, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, value)

    def undo(self) -> None:
        """Put everything back, the last replacement first."""
        while self._before:
            owner, name, before = self._before.pop()
            if before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
