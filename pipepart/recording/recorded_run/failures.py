"""Reasons why a call cannot be recorded, and why a recording no longer holds."""

from __future__ import annotations

from typing import Any

from pipepart.errors import CaptureError

__all__ = [
    "ChangesWhole",
    "Converted",
    "DataDependent",
    "DrawsOutside",
    "FromNumpy",
    "GuardError",
    "Keeps",
    "NotRecordable",
    "StateChanged",
    "Unsettled",
    "Updates",
]


class GuardError(CaptureError):
    """A value that the recording was specialised on has changed; recording again would work."""


class StateChanged(GuardError):
    """A place of the Python state that is an input of the graph no longer holds a number of the recorded type."""


class NotRecordable(CaptureError):
    """A part of the model cannot be written as ops; keeping the module around it whole may help.

    `also` lists other modules in which the same run found the same problem, each with its message.
    """

    also: tuple[tuple[str, str], ...] = ()


class DataDependent(NotRecordable):
    """Python control flow, or a Python number, depends on the contents of a tensor."""


class Converted(DataDependent):
    """``float(x)`` or ``int(x)`` is called on a tracked number or a tensor. Another run keeps track of the results."""


class DrawsOutside(NotRecordable):
    """The model draws random numbers of Python or numpy, which are not in the graph. A second run finds the module."""


class FromNumpy(NotRecordable):
    """A tensor is made of an array that numpy computed. `function` made the array, if known: it can be kept whole."""

    function: Any = None


class Updates(NotRecordable):
    """A module that is one op updates its buffers. If its ops are recorded, it can do so once per batch."""


class Unsettled(NotRecordable):
    """A call changes plain Python attributes of a module. If a second call does not, the first has set the module up.

    `attributes` are the paths and names of the attributes.
    """

    attributes: tuple[tuple[str, str], ...] = ()


class Keeps(NotRecordable):
    """A call keeps a number of the step, or a number that was read from a tensor, in an attribute of a submodule."""

    attributes: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, path: str, name: str) -> Keeps:
        """Return the failure for one attribute."""
        failure = cls(f"attribute {name!r} of module {path!r} keeps a number of the step")
        failure.attributes = ((path, name),)
        return failure


class ChangesWhole(Unsettled):
    """A module that is kept whole changes plain Python attributes of itself."""
