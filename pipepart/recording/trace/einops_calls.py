"""Functions of einops: one op each, called again at every step with the sizes of that step."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from pipepart.recording.trace.arguments import tensors_in, unwrap
from pipepart.recording.trace.functions import places_of
from pipepart.recording.trace.recorder import Recorder

__all__ = ["einops_recorded", "is_einops_layer"]

_FUNCTIONS = ("rearrange", "reduce", "repeat", "einsum", "pack", "unpack")


def is_einops_layer(kind: type) -> bool:
    """Whether a module class is one of einops' layers (``Rearrange``, ``Reduce``, ``EinMix``)."""
    return kind.__module__.startswith("einops.layers.")


@contextmanager
def einops_recorded(recorder: Recorder) -> Iterator[None]:
    """Calls of einops' functions are one op each, wherever they have been imported; nothing if einops is not in use."""
    einops: Any = sys.modules.get("einops")
    saved: list[tuple[dict[str, Any], str, Any]] = []
    if einops is not None:
        originals = {name: getattr(einops, name) for name in _FUNCTIONS if hasattr(einops, name)}
        calls = {name: _recorded(recorder, name, function) for name, function in originals.items()}
        for names, name in places_of(originals):
            if not str(names.get("__name__")).startswith("einops."):
                saved.append((names, name, names[name]))
                names[name] = calls[name]
    try:
        yield
    finally:
        for names, known_as, original in saved:
            names[known_as] = original


def _recorded(recorder: Recorder, name: str, function: Any) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if not recorder.recording or recorder.frames or not tensors_in((args, kwargs)):
            return function(*unwrap(args), **unwrap(kwargs))
        out = recorder.run_whole(function, "call_function", function, args, kwargs, closed=True)
        return (out[0], _packed(args, kwargs)) if name == "pack" else out

    return call


def _packed(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The shapes that ``pack`` returns, taken from its tensors: so they are followed as all sizes are."""
    given = dict(zip(("tensors", "pattern"), args)) | kwargs
    axes = given["pattern"].split()
    before, after = axes.index("*"), len(axes) - axes.index("*") - 1
    return [tensor.shape[before : len(tensor.shape) - after] for tensor in given["tensors"]]
