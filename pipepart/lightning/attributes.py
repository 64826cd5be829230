"""Attributes of the module that a step sets: they get their values on every rank after the step.

A tensor is that of the whole batch. A number that is computed from other numbers (a counter) is computed again. Any other
value is what Python decided in the recorded run; the values that it was decided by are guards of the recording.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from pipepart.errors import ConfigError
from pipepart.lightning.fresh_metrics import names_of_all
from pipepart.lightning.metrics import Later
from pipepart.lightning.watched_containers import Watch, Watched, is_container, wrapped
from pipepart.recording.inputs import trees
from pipepart.recording.model_state.places import is_plain_value
from pipepart.recording.model_state.reachable import OWN_NAMES
from pipepart.recording.model_state.reads import active
from pipepart.recording.recorded_run.contexts import user_line
from pipepart.recording.recorded_run.failures import Keeps
from pipepart.recording.recorded_run.ops import is_torch_leaf
from pipepart.recording.recorded_run.symbols import is_tracked
from pipepart.recording.recorded_run.tensors import holds_tensors

__all__ = ["attribute_setter", "metric_setter", "parts_watched"]


class Notes(Watch, Protocol):
    """Receiver of the attributes that a step sets."""

    is_running: bool

    def note(self, kind: str, target: str, value: Any, options: dict[str, Any] | None = None) -> int: ...

    def gave(self, text: str, value: Any) -> None: ...


class PartNotes(Notes, Protocol):
    """Receiver of attributes that submodules set."""

    parts: dict[int, str]
    """The paths of submodules, by identity."""
    repeated: frozenset[tuple[str, str]]
    """The attributes that are set after each step, by path and name."""


def attribute_setter(notes: Notes, assign: Callable[[Any, str, Any], None]) -> Callable[[Any, str, Any], None]:
    """Return the ``__setattr__`` of a module whose step is recorded. `assign` is the original one."""

    def set_attribute(self: Any, name: str, value: Any) -> None:
        if isinstance(value, Watched) and getattr(self, name, None) is value:
            return  # the second half of +=
        if not notes.is_running or name in OWN_NAMES:
            assign(self, name, value)
            return
        reads = active()
        if reads is not None:
            reads.wrote(self, name)
        if name in self._buffers and (value is None or isinstance(value, torch.Tensor)):
            _check_buffer(self, name, value)
            assign(self, name, value)  # an op of the graph
            return
        if _is_same_part(self, name, value):
            return
        _check(self, name, value)
        notes.note("set", name, value)
        if is_container(value):
            notes.gave(f"self.{name}", value)
            value = wrapped(notes, (("module", ""), ("attr", name)), value)
        assign(self, name, value)

    return set_attribute


@contextmanager
def parts_watched(notes: PartNotes) -> Iterator[None]:
    """Inside, submodules report the attributes that are set after each step."""
    base: Any = nn.Module
    assign = base.__setattr__

    def set_attribute(self: Any, name: str, value: Any) -> None:
        path, reads = notes.parts.get(id(self)), active()
        if not notes.is_running or path is None or (path, name) not in notes.repeated:
            if path is not None and reads is not None and reads.is_input(f"self.{path}.{name}"):
                raise Keeps.of(path, name)
            if (
                path is not None
                and reads is not None
                and is_torch_leaf(self)
                and name in vars(self)
                and is_plain_value(vars(self)[name])
            ):
                _refuse_setting(path, name, vars(self)[name], value)
            assign(self, name, value)
            return
        if reads is not None:
            reads.wrote(self, name)
        _check(self, name, value)
        notes.note("set", f"{path}.{name}", value)
        assign(self, name, value)

    base.__setattr__ = set_attribute
    try:
        yield
    finally:
        base.__setattr__ = assign


def metric_setter(notes: Notes, path: str, assign: Callable[[Any, str, Any], None]) -> Callable[[Any, str, Any], None]:
    """Return the ``__setattr__`` of the metric at a path, for a step that is recorded. `assign` is the original one.

    A step may set options of a metric before it feeds it, such as a scale. States belong to the methods of the metric.
    """

    def set_attribute(self: Any, name: str, value: Any) -> None:
        own = name in OWN_NAMES or name in names_of_all() or name in getattr(self, "_defaults", {})
        if notes.is_running and not own and not _is_same_part(self, name, value):
            reads = active()
            if reads is not None:
                reads.wrote(self, name)
            _check(self, name, value, f"self.{path}")
            notes.note("configure", path, value, {"name": name})
        assign(self, name, value)

    return set_attribute


def _refuse_setting(path: str, name: str, old: Any, value: Any) -> None:
    """Refuse a step that sets a number or flag of a module of torch, such as the rate of dropout, to another value."""
    if name in OWN_NAMES or name == "training" or (not is_tracked(value) and value == old):
        return
    raise ConfigError(
        f"the step sets self.{path}.{name}, an attribute of a module of torch, to another value, at {user_line()}. A recorded "
        "step does not run this Python again: set it in a hook (on_train_batch_start)."
    )


def _is_same_part(module: nn.Module, name: str, value: Any) -> bool:
    """Whether the attribute is set to the parameter or the submodule that it is."""
    return any(registry.get(name) is value is not None for registry in (module._parameters, module._modules))


def _check_buffer(module: nn.Module, name: str, value: Any) -> None:
    """Refuse a buffer of another form: stages keep its memory."""
    old: Any = module._buffers[name]
    if value is old or (isinstance(old, torch.Tensor) and isinstance(value, torch.Tensor)):
        if value is old or (value.shape == old.shape and value.dtype == old.dtype):
            return
        got = f"{value.dtype} of shape {tuple(value.shape)} instead of {old.dtype} of shape {tuple(old.shape)}"
    else:
        got = "a tensor instead of None" if old is None else "None instead of a tensor"
    raise ConfigError(
        f"the step sets self.{name}, a buffer, to {got}. A buffer keeps its form in a recorded step: give it its final form in "
        "__init__, or set it in a hook."
    )


def _check(module: nn.Module, name: str, value: Any, owner: str = "self") -> None:
    where = f"the step sets {owner}.{name}"
    if name in module._parameters or name in module._modules or isinstance(value, nn.Module):
        raise ConfigError(f"{where}, a part of the model: a recorded step cannot replace it. Replace it in a hook.")
    if name in module._buffers:
        raise ConfigError(f"{where}, a buffer, to a {type(value).__name__}. Set it to a tensor, or set it in a hook.")
    for leaf in trees.leaves_of(value):
        if isinstance(leaf, (torch.Tensor, Later)) or is_tracked(leaf) or is_plain_value(leaf):
            continue
        if isinstance(leaf, types.GeneratorType) or holds_tensors(leaf, 4):
            raise ConfigError(
                f"{where} to an object of the class {type(leaf).__name__}, which a recorded step cannot make again. Keep its "
                "tensors in attributes, lists or dicts, and make the object in a hook (on_train_batch_end)."
            )
