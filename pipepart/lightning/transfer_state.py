"""What hooks around the transfer of a batch read and change: Python state of the module and of the data module.

Planning runs these hooks for the first batch, before the run begins. What they have set is put back, so that the run finds
the state of one device. If that state is still the same when the run comes to this batch, the results of planning are used
and the hooks do not run a second time; else (`on_train_epoch_start` has set a scale) they run again.
"""

from __future__ import annotations

import functools
import random
import types
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from pipepart.recording.model_state.places import CONTAINERS, Place, copy_of, is_plain_value, refill
from pipepart.recording.model_state.reachable import OWN_NAMES, is_foreign, variables

__all__ = ["TransferState"]

_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
_CALLABLE = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, type, functools.partial)
_DEPTH = 5
"""Nesting of objects and containers that is followed."""
_LARGE = 4096
"""Number of items above which contents are not compared."""
_ELEMENTS = 1 << 20
"""Number of elements above which a tensor or an array is not copied."""


class _Kept(NamedTuple):
    value: Any
    contents: Any


class TransferState:
    """The state before these hooks run for planning, and after it."""

    def __init__(self, trainer: Any) -> None:
        """To be made before the hooks run."""
        module, data = trainer.lightning_module, getattr(trainer, "datamodule", None)
        self._trainer, owners = trainer, [owner for owner in (module, data) if owner is not None]
        self._variables: list[Place] = variables([getattr(owner, hook) for owner in owners for hook in _HOOKS], [])
        self._places: list[dict[str, Any]] = [vars(owner) for owner in owners]
        self._places += [vars(value) for place in self._places for _, value in _own(place) if _is_of_user(value)]
        self._places.append(vars(module)["_buffers"])
        self._alive: list[Any] = []  # their ids are compared
        self._before = [_kept(place) for place in self._places]
        self._after: list[dict[str, _Kept]] = []
        self._found: Any = None

    def hooks_have_run(self) -> None:
        """Keep what they have changed, and put back what was there before."""
        self._after = [_kept(place) for place in self._places]
        self._set(self._before, self._after)
        self._found = self._now()

    def done_again(self) -> bool:
        """If hooks would find what they have found, put their changes into effect and return True; else do nothing."""
        if not _equal(self._found, self._now()):
            return False
        self._set(self._after, self._before)
        return True

    def _set(self, wanted: list[dict[str, _Kept]], present: list[dict[str, _Kept]]) -> None:
        for place, then, now in zip(self._places, wanted, present):
            for name in now.keys() - then.keys():
                place.pop(name, None)
            for name, kept in then.items():
                other = now.get(name)
                if other is None or other.value is not kept.value:
                    place[name] = kept.value
                elif not _equal_contents(other.contents, kept.contents):
                    _fill(kept.value, kept.contents)

    def _now(self) -> Any:
        places = [{name: self._of(value, 0) for name, value in _own(place)} for place in self._places]
        numbers = [self._trainer.current_epoch, self._trainer.global_step]
        return [places, numbers, [self._of(place.read(), 0) for place in self._variables]]

    def _of(self, value: Any, depth: int) -> Any:
        """The value in a form that can be compared later."""
        kind = type(value)
        if is_plain_value(value):
            return kind, value
        if isinstance(value, torch.Tensor) and value.is_meta:
            return "of another stage"
        self._alive.append(value)
        if isinstance(value, (torch.Tensor, np.ndarray, torch.Generator, np.random.Generator, random.Random)):
            version = value._version if isinstance(value, torch.Tensor) and not value.is_inference() else 0
            contents = None if isinstance(value, torch.Tensor) else _contents(value)
            return id(value), version, str(contents) if not isinstance(contents, np.ndarray) else contents.tobytes()
        if isinstance(value, (list, tuple, dict, set)) and depth < _DEPTH and len(value) <= _LARGE:
            items = value.items() if isinstance(value, dict) else enumerate(value)
            return kind, [(key, self._of(item, depth + 1)) for key, item in items]
        if depth < _DEPTH and (_is_of_user(value) or kind is types.SimpleNamespace):
            return id(value), [(key, self._of(item, depth + 1)) for key, item in vars(value).items()]
        return id(value)


def _is_of_user(value: Any) -> bool:
    """Whether a value is an object of a class of the user, whose attributes are state of the user."""
    return (
        hasattr(value, "__dict__")
        and not isinstance(value, (nn.Module, torch.Tensor, *_CALLABLE))
        and not is_foreign(type(value).__module__)
    )


def _own(place: dict[str, Any]) -> list[tuple[str, Any]]:
    """Attributes of the user."""
    return [
        (name, value)
        for name, value in place.items()
        if name not in OWN_NAMES and not name.startswith("_pipepart") and not isinstance(value, _CALLABLE)
    ]


def _kept(place: dict[str, Any]) -> dict[str, _Kept]:
    return {name: _Kept(value, _contents(value)) for name, value in _own(place)}


def _contents(value: Any) -> Any:
    """A copy of what a call may change inside a value; None if nothing is known or it is too large."""
    if type(value) in CONTAINERS:
        return copy_of(value)
    if isinstance(value, torch.Tensor):
        return value.detach().clone() if value.numel() <= _ELEMENTS and not value.is_meta else None
    if isinstance(value, np.ndarray):
        return value.copy() if value.size <= _ELEMENTS else None
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    return value.getstate() if isinstance(value, random.Random) else None


def _fill(value: Any, contents: Any) -> None:
    """Give a value the contents that `_contents` has copied."""
    if type(value) in CONTAINERS:
        refill(value, contents)
    elif isinstance(value, torch.Tensor):
        with torch.no_grad():
            value.copy_(contents)
    elif isinstance(value, np.ndarray):
        value[...] = contents
    elif isinstance(value, torch.Generator):
        value.set_state(torch.tensor(contents, dtype=torch.uint8))
    elif isinstance(value, np.random.Generator):
        value.bit_generator.state = contents
    elif isinstance(value, random.Random):
        value.setstate(contents)


def _equal_contents(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return np.array_equal(a, b)
    if type(a) in CONTAINERS and type(a) is type(b):
        return len(a) == len(b) and _equal(a, b)
    return _equal(a, b)


def _equal(a: Any, b: Any) -> bool:
    try:
        return bool(a == b)
    except Exception:
        return False
