"""Names and state of a module: what is looked up while recording, and what recording must leave as it was."""

from __future__ import annotations

import gc
import logging
import random
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn as nn

from pipepart.errors import CaptureError
from pipepart.recording.model_state.own_names import OWN_NAMES
from pipepart.recording.model_state.setup import Hooks
from pipepart.recording.model_state.side_effects import same_items

__all__ = [
    "Attributes",
    "Names",
    "is_abstract",
    "names_of",
    "no_collection",
    "not_compiled",
    "preserved",
    "refuse_wrapped",
    "stand_ins",
]


@dataclass
class Names:
    """Full names of the modules and tensors of a root, by identity; of tied ones the first name."""

    modules: dict[int, str] = field(default_factory=dict)
    listed: list[tuple[str, nn.Module]] = field(default_factory=list)
    tensors: dict[int, str] = field(default_factory=dict)
    kept: list[Any] = field(default_factory=list)


def names_of(root: nn.Module) -> Names:
    """The names of everything that a recorded run of `root` may touch."""
    names = Names()
    names.listed = list(root.named_modules())
    for path, module in names.listed:
        names.modules[id(module)] = path
    for path, tensor in [*root.named_parameters(), *root.named_buffers()]:
        names.tensors.setdefault(id(tensor), path)
        names.kept.append(tensor)
    for path, module in names.listed:
        for key, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                names.tensors.setdefault(id(value), f"{path}.{key}" if path else key)
                names.kept.append(value)
    return names


@contextmanager
def no_collection() -> Iterator[None]:
    """Python's collector of cycles is off inside: recording makes many small objects that all stay."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


def refuse_wrapped(root: nn.Module) -> None:
    """Modules that are already distributed, or not yet built, cannot be recorded: say so by name."""
    for path, module in root.named_modules():
        home, name = type(module).__module__, type(module).__name__
        reason = ""
        if home.startswith(("torch.nn.parallel", "torch.distributed")) and "._checkpoint." not in home:
            reason = "wraps its module for distributed training; capture the module inside"
        elif any(nn.parameter.is_lazy(p) for p in module.parameters(recurse=False)):
            reason = "is lazy and has no parameters yet; run the model once before"
        if reason:
            raise CaptureError(f"module {path!r} ({name}) {reason}")


@contextmanager
def not_compiled() -> Iterator[None]:
    """Whatever ``torch.compile`` has made of functions and modules runs as what it wraps."""
    if "torch._dynamo.eval_frame" not in sys.modules:  # nothing is compiled, and importing it takes seconds
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def is_abstract(root: nn.Module) -> bool:
    """Whether a module has parameters or buffers without memory (on the meta device)."""
    return any(tensor.is_meta for tensor in [*root.parameters(), *root.buffers()])


class Attributes:
    """The plain attributes of modules at one moment, to see what a run leaves behind in Python."""

    def __init__(self, modules: Iterable[tuple[str, nn.Module]]):
        self.before: list[tuple[str, nn.Module, dict[str, Any], dict[str, Any]]] = [
            (path, module, {**vars(module), **_plain_registry(module._buffers)}, dict(_containers(module)))
            for path, module in modules
        ]

    def changes(self) -> Iterator[tuple[str, nn.Module, str, Any, Any]]:
        """Module path, module, attribute, value before and value now of each attribute that is another one now."""
        for path, module, before, containers in self.before:
            now: dict[str, Any] = {**vars(module), **_plain_registry(module._buffers)}
            for name, value in now.items():
                old = before.get(name)
                if value is not old:
                    if name not in _REGISTRIES and name != "training":
                        yield path, module, name, old, value
                elif name in containers and not same_items(containers[name], value):
                    was, now_is = len(containers[name]), len(vars(module)[name])
                    after = f"{now_is} items" if was != now_is else f"{now_is} other items"
                    yield path, module, name, f"{was} items", after


def _plain_registry(registry: Any) -> dict[str, Any]:
    return registry if type(registry) is dict else {}


@contextmanager
def preserved(root: nn.Module, modules: Sequence[nn.Module] | None = None) -> Iterator[None]:
    """Whatever runs inside, buffers, gradients, attributes, hooks and the random number generators are as before.

    `modules` are those of the root, if the caller has them at hand.
    """
    modules = modules or list(root.modules())
    tensors = [value for module in modules for value in vars(module).values() if isinstance(value, torch.Tensor)]
    own = [value for module in modules for value in module._buffers.values() if value is not None]
    distinct = {id(tensor): tensor for tensor in [*own, *tensors] if not tensor.is_inference()}
    buffers = [(tensor, tensor.detach().clone()) for tensor in distinct.values()]
    parameters = {id(p): p for module in modules for p in module._parameters.values() if p is not None}
    grads = [(parameter, parameter.grad) for parameter in parameters.values()]
    attributes = [(module, vars(module).copy(), dict(_containers(module))) for module in modules]
    registries = [
        (module, dict(module._parameters), dict(module._buffers))
        for module in modules
        if type(module._parameters) is dict and type(module._buffers) is dict
    ]
    hooks = Hooks(("", module) for module in modules)
    rng, python_rng, numpy_rng = torch.get_rng_state(), random.getstate(), np.random.get_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else None
    try:
        yield
    finally:
        for module, before, containers in attributes:
            now = vars(module)
            now.clear()
            now.update(before)
            for key, copy in containers.items():
                value = before[key]
                if not same_items(copy, value):
                    value.clear()
                    (value.extend if isinstance(value, (list, deque)) else value.update)(copy)
        hooks.put()
        for module, registered, known in registries:
            module._parameters.clear()
            module._parameters.update(registered)
            module._buffers.clear()
            module._buffers.update(known)
        with torch.no_grad():
            for buffer, value in buffers:  # not by version: batch norm changes its statistics without counting
                if buffer.is_meta:
                    continue
                if buffer.shape == value.shape:
                    buffer.copy_(value)
                else:  # a table that was made longer in place
                    buffer.data = value
        for parameter, grad in grads:
            parameter.grad = grad
        torch.set_rng_state(rng)
        random.setstate(python_rng)
        np.random.set_state(numpy_rng)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)


_REGISTRIES = frozenset({"_parameters", "_buffers", "_modules"})
_CONTAINERS = frozenset({list, dict, set, deque, OrderedDict, defaultdict, Counter})


def _containers(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Copies of the plain containers of a module that a forward may append to."""
    for key, value in vars(module).items():
        if type(value) in _CONTAINERS and (key not in OWN_NAMES or key == "_non_persistent_buffers_set"):
            yield key, value.copy()


@contextmanager
def _quiet() -> Iterator[None]:
    """Torch logs every op that fails on fake tensors, though failing is an answer that we ask for."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = before


@contextmanager
def stand_ins(root: nn.Module) -> Iterator[Any]:
    """Put fake tensors (shape and dtype, no memory) in the place of all parameters, buffers and tensor attributes.

    Yields the fake mode. The fakes live on the CPU whatever the device of the originals, so that what the model makes
    of them fits the example batch. Names refer to the fakes while they are there.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes: dict[int, Any] = {}

    def fake(tensor: torch.Tensor) -> Any:
        if id(tensor) not in fakes:
            with mode:
                made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
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
    try:
        with _quiet():
            yield mode
    finally:
        for registry, tensors in saved:
            registry.update(tensors)
