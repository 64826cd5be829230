"""Cached functions (``functools.lru_cache``, ``cache``) that are called with sizes.

A hit returns the result of an earlier call, so that sizes would become constants. While a model is recorded, such a
function computes again for tracked numbers, and its cache keeps none of them. It is found from the frame that uses a
tracked number as a key, among the functions that this frame can call.
"""

from __future__ import annotations

import functools
import gc
import itertools
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipepart.recording.recorded_run.failures import NotRecordable
from pipepart.recording.recorded_run.symbols import Tracked
from pipepart.recording.recorded_run.tensors import has_tracked, unwrap

if TYPE_CHECKING:
    from pipepart.recording.recorded_run.recorder import Recorder

__all__ = ["CachedFunction", "cached_in", "forget"]

_CACHED: Any = type(functools.lru_cache(lambda: None))
_ABSENT = object()
_DEPTH = 3
"""Largest number of attributes between a variable and a call: ``package.file.function(n)``."""


@dataclass(frozen=True)
class CachedFunction:
    """A cached function and one place that refers to it."""

    function: Any
    value: Any
    """Object at the place: the function itself, or a static or class method of it."""
    holder: Any
    """Namespace, cell, object or class with the place."""
    name: str

    def replacement(self, recorder: Recorder) -> tuple[Any, str, Any]:
        """Return the patch under which calls of the function with tracked numbers compute again."""
        call = _anew(recorder, self.function)
        return self.holder, self.name, call if self.value is self.function else type(self.value)(call)


def cached_in(frame: types.FrameType) -> list[CachedFunction]:
    """Return the cached functions that the code of a frame can call by name."""
    if str(frame.f_globals.get("__name__", "")).startswith("pipepart.recording."):
        return []
    code, found = frame.f_code, []
    names = set(code.co_names)
    for name in names:
        if name in frame.f_globals:
            found += _cached(frame.f_globals[name], frame.f_globals, name)
    for cell in _cells(frame):
        found += _cached(cell.cell_contents, cell, "cell_contents")
    level = [frame.f_globals[name] for name in names if name in frame.f_globals] + list(frame.f_locals.values())
    seen: set[int] = set()
    for _ in range(_DEPTH):
        following = []
        for owner in level:
            if id(owner) in seen or isinstance(owner, (int, float, str, tuple, list, dict, Tracked)):
                continue
            seen.add(id(owner))
            for name in names:
                holder, value = _attribute(owner, name)
                if value is not _ABSENT:
                    found += _cached(value, holder, name)
                    following.append(value)
        level = following
    return found


def _cells(frame: types.FrameType) -> Iterator[Any]:
    """Yield the cells of variables of enclosing functions of the function that runs in the frame."""
    names = frame.f_code.co_freevars
    if not any(type(frame.f_locals.get(name)) is _CACHED for name in names):
        return
    for function in gc.get_referrers(frame.f_code):
        if isinstance(function, types.FunctionType) and function.__closure__:
            for cell, name in zip(function.__closure__, names):
                try:
                    if cell.cell_contents is frame.f_locals.get(name, _ABSENT):
                        yield cell
                except ValueError:  # not filled yet
                    continue


def _attribute(owner: Any, name: str) -> tuple[Any, Any]:
    """Return the holder of an attribute (the object, its class or a base) and its value, without calling anything."""
    holders = owner.__mro__ if isinstance(owner, type) else (owner, *type(owner).__mro__)
    for holder in holders:
        attributes = _names(holder)
        if name in attributes:
            return holder, attributes[name]
    return None, _ABSENT


def _names(holder: Any) -> Any:
    try:
        return type.__getattribute__(holder, "__dict__") if isinstance(holder, type) else vars(holder)
    except (AttributeError, TypeError):  # slots, or no Python object
        return {}


def _cached(value: Any, holder: Any, name: str) -> list[CachedFunction]:
    function = value.__func__ if type(value) in (staticmethod, classmethod) else value
    return [CachedFunction(function, value, holder, name)] if type(function) is _CACHED else []


def forget(functions: Sequence[CachedFunction]) -> None:
    """Clear the caches that hold tracked numbers of a recorded run."""
    for function in {id(item.function): item.function for item in functions}.values():
        keys = [key for part in gc.get_referents(function) if type(part) is dict for key in part]
        if any(_holds_tracked(key) for key in keys):
            function.cache_clear()


def _holds_tracked(key: Any) -> bool:
    return isinstance(key, Tracked) or (isinstance(key, (tuple, list)) and any(_holds_tracked(item) for item in key))


def _anew(recorder: Recorder, function: Any) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if recorder.builder.idle or not has_tracked((args, kwargs)):
            return function(*unwrap(args), **unwrap(kwargs))
        known = len(recorder.facts)
        result = function.__wrapped__(*args, **kwargs)
        if any(fact.random for fact in itertools.islice(recorder.facts.values(), known, None)):
            raise NotRecordable(
                f"{getattr(function, '__qualname__', 'a function')} is cached (functools.lru_cache) and draws random "
                f"numbers, in {recorder.builder.here()}: the model keeps the first draw for each size. Draw them once, "
                "into a buffer"
            )
        return result

    functools.update_wrapper(call, function)
    return call
