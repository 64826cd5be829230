"""Names and state of the modules of a model: recording looks names up and leaves the state as it was.

A library may install hooks in the first call and set a flag, so that the next call does not install them again. One
without the other breaks the model. Therefore hooks and flags are always put back, and kept, together.
"""

from __future__ import annotations

import gc
import logging
import random
import sys
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn as nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from pipepart.devices import computes_on_host, kept_draws
from pipepart.errors import CaptureError
from pipepart.recording.model_state.kept_parameters import KeptParameters
from pipepart.recording.model_state.places import CONTAINERS, is_plain_value, refill, same_items
from pipepart.recording.model_state.reachable import OWN_NAMES

__all__ = [
    "Names",
    "Snapshot",
    "device_of",
    "is_abstract",
    "names_of",
    "no_collection",
    "not_compiled",
    "preserved",
    "refuse_wrapped",
    "stand_ins",
    "stays_on_host",
    "tensor_names",
]


@dataclass(frozen=True)
class Names:
    """Full names of the modules and tensors of a root, by identity; tied ones have their first name."""

    listed: list[tuple[str, nn.Module]]
    modules: dict[int, str]
    tensors: dict[int, str]
    kept: list[torch.Tensor]
    """The tensors themselves, so that their identities stay valid."""


def names_of(root: nn.Module) -> Names:
    """Return the names of all modules and tensors that a recorded run of `root` may use."""
    listed, tensors = list(root.named_modules()), tensor_names(root)
    kept: list[torch.Tensor] = [*root.parameters(), *root.buffers()]
    for path, module in listed:
        for key, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                tensors.setdefault(id(value), f"{path}.{key}" if path else key)
                kept.append(value)
    return Names(listed, {id(module): path for path, module in listed}, tensors, kept)


def tensor_names(root: nn.Module) -> dict[int, str]:
    """Return the first name of each parameter and buffer of the root, by identity, in order."""
    names: dict[int, str] = {}
    for name, tensor in [*root.named_parameters(), *root.named_buffers()]:
        names.setdefault(id(tensor), name)
    return names


@contextmanager
def no_collection() -> Iterator[None]:
    """Switch Python's collector of cycles off: recording makes many small objects that all stay."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


def refuse_wrapped(root: nn.Module) -> None:
    """Raise a `CaptureError` for modules that are already distributed or not built yet."""
    for path, module in root.named_modules():
        home, name = type(module).__module__, type(module).__name__
        reason = ""
        if home.startswith(("torch.nn.parallel", "torch.distributed")) and "._checkpoint." not in home:
            reason = "wraps its module for distributed training; capture the module inside it"
        elif any(nn.parameter.is_lazy(p) for p in module.parameters(recurse=False)):
            reason = "is lazy and has no parameters yet; run the model once before it is recorded"
        if reason:
            raise CaptureError(f"module {path!r} ({name}) {reason}")


@contextmanager
def not_compiled() -> Iterator[None]:
    """Run the originals of functions and modules that were compiled by ``torch.compile``."""
    if "torch._dynamo.eval_frame" not in sys.modules:  # nothing is compiled, and importing it takes seconds
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


# ---------------------------------------------------------------- state at one moment

_REGISTRIES = frozenset({"_parameters", "_buffers", "_modules"})
_HOOKS = tuple(name for name in vars(nn.Module()) if name.endswith("_hooks") or "_hooks_" in name)
"""Attributes of modules that hold hooks."""


@dataclass(frozen=True)
class _Items:
    """Describes a container in a change of attributes."""

    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class _Module:
    """The attributes of one module at one moment, with copies of its plain containers and of its registries.

    Registries are its parameters, buffers and hooks, if there are any and they are in a dictionary of Python.
    """

    path: str
    module: nn.Module
    attributes: dict[str, Any]
    containers: dict[str, Any]
    registries: dict[str, dict[Any, Any]]


class Snapshot:
    """The Python state of modules at one moment, to find or to undo the changes that a run makes."""

    def __init__(self, modules: Iterable[tuple[str, nn.Module]]):
        self.modules = [
            _Module(path, module, vars(module).copy(), _containers(module), _registries(module))
            for path, module in modules
        ]

    def plain_attributes(self) -> dict[tuple[str, str], Any]:
        """Return the plain attributes of all modules, by path and name."""
        found = ((known.path, name, value) for known in self.modules for name, value in known.attributes.items())
        return {(path, name): value for path, name, value in found if is_plain_value(value)}

    def changes(self) -> Iterator[tuple[str, nn.Module, str, Any, Any]]:
        """Yield module path, module, attribute, value before and value now of each attribute that has changed, by name."""
        for known in self.modules:
            before: dict[str, Any] = {**known.attributes, **known.registries.get("_buffers", {})}
            now: dict[str, Any] = {**vars(known.module), **_registries(known.module).get("_buffers", {})}
            for name, value in sorted(now.items(), key=lambda item: item[0]):
                old: Any = before.get(name)
                if value is not old:
                    if name not in _REGISTRIES and name != "training":
                        yield known.path, known.module, name, old, value
                elif name in known.containers and not same_items(known.containers[name], value):
                    was, count = len(known.containers[name]), len(now[name])
                    after = f"{count} items" if was != count else f"{count} other items"
                    yield known.path, known.module, name, _Items(f"{was} items"), _Items(after)

    def hook_changes(self) -> Iterator[tuple[str, str]]:
        """Yield the module path and the registry of hooks that were added or removed."""
        for known in self.modules:
            now = _registries(known.module)
            for name in _HOOKS:
                if not same_items(known.registries.get(name, {}), now.get(name, {})):
                    yield known.path, name

    def restore(self) -> None:
        """Restore the attributes, registries and containers of that moment, and remove all others."""
        for known in self.modules:
            refill(vars(known.module), known.attributes)
            for name, copy in known.containers.items():
                if not same_items(copy, known.attributes[name]):
                    refill(known.attributes[name], copy)
            _put_back(known, ("_parameters", "_buffers", *_HOOKS))

    def restore_setup(self) -> None:
        """Restore the plain attributes and the hooks of that moment, and remove all other plain attributes and hooks."""
        for known in self.modules:
            now = vars(known.module)
            for name in [name for name, value in now.items() if name not in known.attributes and is_plain_value(value)]:
                del now[name]
            now.update((name, v) for name, v in known.attributes.items() if name != "training" and is_plain_value(v))
            _put_back(known, _HOOKS)


def _containers(module: nn.Module) -> dict[str, Any]:
    """Return copies of the plain containers of a module that a forward may change."""
    return {
        name: value.copy()
        for name, value in vars(module).items()
        if type(value) in CONTAINERS and (name not in OWN_NAMES or name == "_non_persistent_buffers_set")
    }


def _registries(module: nn.Module) -> dict[str, dict[Any, Any]]:
    own = vars(module)
    return {
        name: dict(registry)
        for name in ("_parameters", "_buffers", *_HOOKS)
        if (registry := own.get(name)) and type(registry) in (dict, OrderedDict)
    }


def _put_back(known: _Module, names: Iterable[str]) -> None:
    for name in names:
        registry, wanted = vars(known.module).get(name), known.registries.get(name, {})
        if type(registry) in (dict, OrderedDict) and (registry or wanted):
            refill(registry, wanted)


@contextmanager
def preserved(root: nn.Module, modules: Sequence[nn.Module] | None = None) -> Iterator[None]:
    """Leave tensors, gradients, attributes, hooks and random number generators as before, whatever runs inside.

    `modules` are those of the root, if the caller has a list of them.
    """
    modules = modules or list(root.modules())
    tensors = [value for module in modules for value in vars(module).values() if isinstance(value, torch.Tensor)]
    own = [value for module in modules for value in module._buffers.values() if value is not None]
    distinct = {id(tensor): tensor for tensor in [*own, *tensors] if not tensor.is_inference()}
    buffers = [(tensor, tensor.detach().clone()) for tensor in distinct.values()]
    parameters = {id(p): p for module in modules for p in module._parameters.values() if p is not None}
    grads = [(parameter, parameter.grad) for parameter in parameters.values()]
    before = Snapshot(("", module) for module in modules)
    try:
        with _same_draws(), KeptParameters(parameters.values()):
            yield
    finally:
        before.restore()
        with torch.no_grad():
            for buffer, value in buffers:  # all of them: batch norm writes its statistics without counting versions
                if buffer.is_meta:
                    continue
                if buffer.shape == value.shape:
                    if not isinstance(buffer, FakeTensor):  # those have no values
                        buffer.copy_(value)
                else:  # a table that was made longer in place
                    buffer.data = value
        for parameter, grad in grads:
            parameter.grad = grad


@contextmanager
def _same_draws() -> Iterator[None]:
    """Leave the random number generators of torch, Python and numpy as before."""
    python_rng, numpy_rng = random.getstate(), np.random.get_state()
    try:
        with kept_draws():
            yield
    finally:
        random.setstate(python_rng)
        np.random.set_state(numpy_rng)


# ---------------------------------------------------------------- models without memory


def is_abstract(root: nn.Module, target: torch.device | None = None) -> bool:
    """Return whether a module cannot be run on `target` (default: where it is): parts of it have no memory, or not there."""
    if target is not None and stays_on_host(root, target):
        return True
    return any(tensor.is_meta for tensor in [*root.parameters(), *root.buffers()])


def stays_on_host(root: nn.Module, target: torch.device) -> bool:
    """Return whether the example is on an accelerator and all parameters are on the host, since they do not fit there."""
    if computes_on_host(target):
        return False
    homes = {parameter.device.type for parameter in root.parameters()}
    return homes == {"cpu"}


def device_of(leaves: Iterable[Any]) -> torch.device:
    """Return the device of an example: that of its first tensor, or the CPU if no tensor has memory."""
    found = (leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor) and not leaf.is_meta)
    return next(found, torch.device("cpu"))


@contextmanager
def stand_ins(root: nn.Module, target: torch.device) -> Iterator[Any]:
    """Replace all parameters, buffers and tensor attributes by fake tensors (shape and dtype, no memory).

    Yields the fake mode. Parameters and buffers are on `target`, the device of the example, as they will be when the model
    runs: so `x.device` and autocast are recorded as they are there. Other tensors stay on their device, as in
    `Module.to`. Inside the context, names refer to the fake tensors.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes: dict[int, Any] = {}
    moves = {id(tensor) for tensor in (*root.parameters(), *root.buffers())}

    def fake(tensor: torch.Tensor) -> Any:
        if id(tensor) not in fakes:
            device = target if tensor.is_meta or id(tensor) in moves else tensor.device
            with mode:
                made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
                if isinstance(tensor, nn.Parameter):
                    made = nn.Parameter(made, requires_grad=tensor.requires_grad)
                fakes[id(tensor)] = made
        return fakes[id(tensor)]

    saved: list[tuple[dict[str, Any], dict[str, Any]]] = []
    registry: Any
    for module in root.modules():
        for registry in (module._parameters, module._buffers, module.__dict__):
            if type(registry) is not dict:  # a scripted module keeps its own
                continue
            tensors = {key: value for key, value in registry.items() if isinstance(value, torch.Tensor)}
            if tensors:
                saved.append((registry, tensors))
                registry.update({key: fake(value) for key, value in tensors.items()})
    logger = logging.getLogger(
        "torch._subclasses.fake_tensor"
    )  # logs every op that fails on fake tensors, as some must
    logged, logger.disabled = logger.disabled, True
    try:
        yield mode
    finally:
        logger.disabled = logged
        for registry, tensors in saved:
            registry.update(tensors)
