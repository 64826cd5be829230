"""Why a part of a model cannot be written down as ops."""

from __future__ import annotations

from typing import Any

from pipepart.errors import CaptureError

__all__ = ["DataDependent", "DrawsOutside", "FromNumpy", "NotRecordable", "Unsettled"]


class NotRecordable(CaptureError):
    """Something that cannot be written down as ops; keeping the module around it whole may help.

    `also` are other modules that the same run found to have the same trouble, and what it is there.
    """

    also: tuple[tuple[str, str], ...] = ()


class DataDependent(NotRecordable):
    """Python control flow (or a Python number) that depends on the contents of a tensor."""


class DrawsOutside(NotRecordable):
    """Random numbers of Python or numpy: they are not in the graph. Which module draws them is found by a second run."""


class FromNumpy(NotRecordable):
    """A tensor is made of what numpy computed. `function` made the array, if that is known: it can be kept whole."""

    function: Any = None


class Unsettled(NotRecordable):
    """A call changes plain Python attributes of a module. If a second call does not, the first has only set it up."""
