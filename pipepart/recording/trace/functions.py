"""Functions that compute with numpy: found when what they return becomes a tensor, and kept as one op each.

A mask that numpy draws (SpecAugment) is not in the graph. If a function of a file made the array, the call of that
function can be: it is run again at every step, on the sizes and tensors of that step.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pipepart.recording.trace.arguments import unwrap

if TYPE_CHECKING:
    from pipepart.recording.trace.recorder import Recorder

__all__ = ["calls_kept_whole", "enclosing_function", "library_functions", "places_of", "watch_makers"]

_OURS = ("torch.", "numpy.", "pipepart.", "builtins.")


@contextmanager
def watch_makers(makers: dict[int, Any], kept: list[Any]) -> Iterator[None]:
    """Note which function of a file returned which numpy array; of nested ones the outermost."""

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
    """The innermost function of a file that the recorded call is in now (methods and local functions do not count)."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != "pipepart.recording.trace.runs":
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
    """All variables of imported files that hold one of these functions of a library, under their own names."""
    key = tuple(functions)
    if _places.get(key, (0, []))[0] != len(sys.modules):
        spaces = {id(module): getattr(module, "__dict__", None) for module in list(sys.modules.values())}
        found = [
            (names, name)
            for names in spaces.values()
            if isinstance(names, dict)
            for name, function in functions.items()
            if names.get(name) is function
        ]
        _places[key] = len(sys.modules), found
    return [(names, name) for names, name in _places[key][1] if names.get(name) is functions[name]]


_places: dict[tuple[str, ...], tuple[int, list[tuple[dict[str, Any], str]]]] = {}
"""What `places_of` has found, and how many files were imported then."""


_LIBRARIES = {"torch_geometric.utils._scatter": ("scatter",), "torch_geometric.utils._softmax": ("softmax",)}
"""Functions that read from the values of a tensor how many groups there are, and are one op for that."""


def library_functions() -> list[Any]:
    """The functions of libraries that are kept whole, of those libraries that are in use."""
    modules = [(sys.modules.get(file), names) for file, names in _LIBRARIES.items()]
    return [getattr(module, name) for module, names in modules if module for name in names if hasattr(module, name)]


@contextmanager
def calls_kept_whole(recorder: Recorder, functions: Collection[Any]) -> Iterator[None]:
    """Calls of these functions are one op each, wherever their files have been imported."""
    saved: list[tuple[dict[str, Any], str, Any]] = []
    for function in functions:
        name = str(function.__name__)
        for module in list(sys.modules.values()):
            names: Any = getattr(module, "__dict__", None)
            if isinstance(names, dict) and names.get(name) is function:
                saved.append((names, name, function))
                names[name] = _recorded(recorder, function)
    try:
        yield
    finally:
        for names, known_as, original in saved:
            names[known_as] = original


def _recorded(recorder: Recorder, function: Any) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if not recorder.recording or recorder.frames:
            return function(*unwrap(args), **unwrap(kwargs))
        return recorder.run_whole(function, "call_function", function, args, kwargs)

    return call
