"""Functions that are one op each: those that compute with numpy, those of einops, and some of other libraries.

A mask that numpy draws (SpecAugment) is not in the graph. If a function of a file made the array, the call of that
function can be in the graph: it is run again at every step, on the sizes and tensors of that step. Such a function is
found when its array becomes a tensor.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pipepart.recording.recorded_run.tensors import tensors_in, unwrap

if TYPE_CHECKING:
    from pipepart.recording.recorded_run.recorder import Recorder

__all__ = ["enclosing_function", "library_functions", "places_of", "replacements", "watch_makers"]

_OURS = ("torch.", "numpy.", "pipepart.", "builtins.")


@contextmanager
def watch_makers(makers: dict[int, Any], kept: list[Any]) -> Iterator[None]:
    """Note the function of a file that returned each numpy array; of nested functions the outermost."""

    def seen(frame: types.FrameType, event: str, value: Any) -> None:
        if event == "return" and type(value).__module__ == "numpy" and hasattr(value, "shape"):
            function = _function_of(frame)
            if function is not None:
                makers[id(value)] = function
                kept.append(value)

    before = sys.getprofile()
    sys.setprofile(seen)
    try:
        yield
    finally:
        sys.setprofile(before)


def enclosing_function() -> Any:
    """Return the innermost running function of a file (methods and local functions do not count), or None."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != "pipepart.recording.recorded_run.runs":
        function = _function_of(frame)
        if function is not None:
            return function
        frame = frame.f_back
    return None


def _function_of(frame: types.FrameType) -> Any:
    code = frame.f_code
    if f"{frame.f_globals.get('__name__', '')}.".startswith(_OURS):
        return None
    function = frame.f_globals.get(code.co_name)
    return function if isinstance(function, types.FunctionType) and function.__code__ is code else None


def places_of(functions: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    """Return all variables of imported files that hold one of these functions of a library, under their own names."""
    key = tuple(functions)
    if _places.get(key, (0, []))[0] != len(sys.modules):
        _places[key] = len(sys.modules), _holding(functions)
    return [(names, name) for names, name in _places[key][1] if names.get(name) is functions[name]]


def _holding(functions: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    spaces = {id(module): getattr(module, "__dict__", None) for module in list(sys.modules.values())}
    return [
        (names, name)
        for names in spaces.values()
        if isinstance(names, dict)
        for name, function in functions.items()
        if names.get(name) is function
    ]


_places: dict[tuple[str, ...], tuple[int, list[tuple[dict[str, Any], str]]]] = {}
"""Results of `places_of`, with the number of files that were imported then."""


_LIBRARIES = {"torch_geometric.utils._scatter": ("scatter",), "torch_geometric.utils._softmax": ("softmax",)}
"""Functions that read the number of groups from the contents of a tensor, and are one op each for this reason."""


def library_functions() -> list[Any]:
    """Return the functions that are kept whole of the libraries that are in use."""
    modules = [(sys.modules.get(file), names) for file, names in _LIBRARIES.items()]
    return [getattr(module, name) for module, names in modules if module for name in names if hasattr(module, name)]


def replacements(recorder: Recorder, functions: Collection[Any]) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Yield the patches under which calls of these functions, and of those of einops, are one op each.

    A patch is a namespace, a name in it and the new value. Functions are found wherever they have been imported.
    """
    for function in functions:
        for names, name in _holding({str(function.__name__): function}):
            yield names, name, _recorded(recorder, function)
    einops: Any = sys.modules.get("einops")
    if einops is not None:
        originals = {name: getattr(einops, name) for name in _EINOPS if hasattr(einops, name)}
        calls = {name: _einops_call(recorder, name, function) for name, function in originals.items()}
        for names, name in places_of(originals):
            if not str(names.get("__name__")).startswith("einops."):
                yield names, name, calls[name]


def _recorded(recorder: Recorder, function: Any) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if recorder.builder.idle:
            return function(*unwrap(args), **unwrap(kwargs))
        return recorder.run_whole(function, "call_function", function, args, kwargs)

    return call


_EINOPS = ("rearrange", "reduce", "repeat", "einsum", "pack", "unpack")


def _einops_call(recorder: Recorder, name: str, function: Any) -> Callable[..., Any]:
    """Return a function of einops as one op, which is called again at every step with the sizes of that step."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if recorder.builder.idle or not tensors_in((args, kwargs)):
            return function(*unwrap(args), **unwrap(kwargs))
        out = recorder.run_whole(function, "call_function", function, args, kwargs, closed=True)
        return (out[0], _packed(args, kwargs)) if name == "pack" else out

    return call


def _packed(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the shapes that ``pack`` returns, read from its tensors so that their sizes are tracked."""
    given = dict(zip(("tensors", "pattern"), args)) | kwargs
    axes = given["pattern"].split()
    before, after = axes.index("*"), len(axes) - axes.index("*") - 1
    return [tensor.shape[before : len(tensor.shape) - after] for tensor in given["tensors"]]
