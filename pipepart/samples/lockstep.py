"""A recording run on a batch and on its parts at the same time, op by op, each with a state of its own.

The model is in eval mode and, where the ops allow it, in float64, so that only ops that combine samples make a
difference. The model does not change: copies take the place of its parameters and buffers.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.fx as fx
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from pipepart.recording import Recording
from pipepart.recording.execution.ops_run import resolve
from pipepart.recording.model_state.state import preserved
from pipepart.recording.op import op_of
from pipepart.recording.recorded_run.contexts import outside_rng
from pipepart.recording.recorded_run.intrinsics import check, set_attribute
from pipepart.samples.follow import assigned_path
from pipepart.samples.kept_state import changed_buffers, persistent_writes
from pipepart.samples.laws import Law, concatenated_dim, law_of

__all__ = ["Lockstep", "Split", "evaluating", "run_in_lockstep", "with_other_numbers"]

_NARROW = (torch.float32, torch.float16, torch.bfloat16)
_WIDE = {**dict.fromkeys(_NARROW, torch.float64), torch.complex64: torch.complex128}
_CASTS = {"float": "double", "half": "double", "bfloat16": "double"}
_WHOLE = (torch.int64, torch.int32)
_UNINITIALISED = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided")
_APART = 0.05
"""The least scale of the random change of a parameter: a parameter that starts at zero often switches something off."""
_NORMS = ("batch_norm", "native_batch_norm")


@dataclass(frozen=True)
class Split:
    """The leaves of a batch and of the parts into which it is split."""

    whole: Sequence[Any]
    parts: Sequence[Sequence[Any]]
    sizes: tuple[int, ...]
    """The number of samples of each part."""
    sums: frozenset[int] = frozenset()
    """Outputs that are sums over the parts instead of means."""
    free: frozenset[int] = frozenset()
    """Outputs that are merged in another way, and are not compared."""

    def weights(self, output: int) -> list[float]:
        """Return the weight of each part in an output."""
        return [1.0 if output in self.sums else size / sum(self.sizes) for size in self.sizes]


def with_other_numbers(recording: Recording, split: Split) -> Split | None:
    """Return the split with other numbers of the step and of the Python state; None if the recording reads none."""
    placeholders = recording.graph.find_nodes(op="placeholder")
    places = {
        i
        for i, (spec, node) in enumerate(zip(recording.inputs, placeholders))
        if spec.kind == "number" and (spec.place is not None or spec.value is not None) and node.users
    }

    def others(leaves: Sequence[Any]) -> list[Any]:
        return [_other_number(leaf) if i in places else leaf for i, leaf in enumerate(leaves)]

    return replace(split, whole=others(split.whole), parts=[others(part) for part in split.parts]) if places else None


def _other_number(number: Any) -> Any:
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        return number
    return number + 1 if isinstance(number, int) else 1.5 * number + 0.375


class _Run:
    """The values of one batch: of the whole, or of one part."""

    def __init__(
        self,
        recording: Recording,
        leaves: Sequence[Any],
        parameters: dict[int, torch.Tensor],
        exact: bool,
        generator: torch.Generator | None,
        state: frozenset[str] = frozenset(),
    ):
        """With a `generator`, parameters and the buffers `state` are other than those of the model."""
        self.recording, self.exact, self.parameters, self.generator = recording, exact, parameters, generator
        self.state = state if generator is not None else frozenset()
        self.values: dict[fx.Node, Any] = {}
        self.assigned: dict[str, Any] = {}
        self.buffers: dict[int, torch.Tensor] = {}
        placeholders = [node for node in recording.graph.nodes if node.op == "placeholder"]
        self.leaves = {node: self._own(leaf) for node, leaf in zip(placeholders, leaves)}

    def step(self, node: fx.Node) -> Any:
        """Run one node and keep its value."""
        self.values[node] = value = self._result(node)
        return value

    def set(self, node: fx.Node, value: Any) -> None:
        """Give a node another value, also in memory that it has changed in place."""
        before = self.values[node]
        if op_of(node).inplace and isinstance(before, torch.Tensor):
            with torch.no_grad():
                before.copy_(value)
        else:
            self.values[node] = value

    def _result(self, node: fx.Node) -> Any:
        if node.op == "placeholder":
            return self.leaves[node]
        if node.op == "get_attr":
            return self._attribute(str(node.target))
        args, kwargs = fx.node.map_aggregate((node.args, dict(node.kwargs)), self._value)  # type: ignore[misc]
        if node.op == "output":
            return args[0]
        if node.target is set_attribute:
            self.assigned[assigned_path(node)] = args[2]
            return None
        if node.target is check:  # sizes were checked before; the runtime checks branches on data
            return None
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(bool(op_of(node).grad_mode)))
            if not self.exact:
                for device, dtype in op_of(node).autocast:
                    if isinstance(dtype, torch.dtype):
                        stack.enter_context(torch.autocast(device, dtype=dtype))
            if node.op == "call_module":
                return self._module(resolve(self.recording.root, str(node.target)), args, kwargs)
            if node.op == "call_method":
                name = str(node.target)
                return getattr(args[0], _CASTS.get(name, name) if self.exact else name)(*args[1:], **kwargs)
            return node.target(*args, **kwargs)  # type: ignore[operator]

    def _value(self, argument: Any) -> Any:
        """Return the value of an argument of an op."""
        if isinstance(argument, fx.Node):
            return self.values[argument]
        return _WIDE.get(argument, argument) if self.exact and isinstance(argument, torch.dtype) else argument

    def _attribute(self, path: str) -> Any:
        if path in self.assigned:
            return self.assigned[path]
        constants = self.recording.constants
        value = constants[path] if path in constants else resolve(self.recording.root, path)
        return self._tensor(value, path) if isinstance(value, torch.Tensor) else value

    def _tensor(self, tensor: torch.Tensor, path: str = "") -> torch.Tensor:
        if isinstance(tensor, nn.Parameter):
            if id(tensor) not in self.parameters:
                self.parameters[id(tensor)] = self._moved(self._own(tensor)).requires_grad_(tensor.requires_grad)
            return self.parameters[id(tensor)]
        if id(tensor) not in self.buffers:
            own = self._own(tensor)
            self.buffers[id(tensor)] = _later(own) if path in self.state else own
        return self.buffers[id(tensor)]

    def _own(self, leaf: Any) -> Any:
        """Return a copy of a tensor; an exact run has floating-point tensors in float64."""
        if not isinstance(leaf, torch.Tensor):
            return leaf
        wide = self.exact and leaf.dtype in _NARROW
        return leaf.detach().to(torch.float64) if wide else leaf.detach().clone()

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a parameter with other values: in a new model, gates may be closed and all samples may take the same path."""
        if self.generator is None or not tensor.is_floating_point():
            return tensor
        noise = torch.randn(tensor.shape, generator=self.generator, dtype=torch.float64).to(tensor)
        if self.generator.initial_seed() and tensor.numel():  # a later run: far from the model and from other runs
            order = torch.randperm(tensor.numel(), generator=self.generator).to(tensor.device)
            tensor = tensor.flatten()[order].view_as(tensor)
        grown = tensor * 2 if tensor.dim() > 1 else tensor  # samples differ more after each layer
        return grown + noise * (0.3 * tensor.abs() + _APART)

    def _module(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        named = [*module.named_parameters(), *module.named_buffers()]
        if not named:
            return module(*args, **kwargs)
        if any(isinstance(part, torch.jit.ScriptModule) for part in module.modules()):
            if self.exact:
                raise TypeError("a scripted module keeps its own parameters")
            self.parameters.update({id(p): p for p in module.parameters()})
            return module(*args, **kwargs)
        stand_ins = {name: self._tensor(tensor) for name, tensor in named}
        return torch.func.functional_call(module, stand_ins, args, kwargs)


class Lockstep:
    """The whole batch and its parts, side by side, after all nodes have run."""

    def __init__(
        self, recording: Recording, split: Split, moved: int | None, exact: bool, state: frozenset[str] = frozenset()
    ) -> None:
        """Run all nodes. With the seed `moved`, parameters and the buffers `state` are other than those of the model."""
        self.recording, self.split, self.exact = recording, split, exact
        self.laws: dict[fx.Node, Law] = {}
        self.chance: set[fx.Node] = set()
        """Nodes whose law may hold for this batch alone: counts and flags made from values without a law."""
        self.fragile: set[fx.Node] = set()
        """Nodes whose law does not follow from the laws of their arguments and is seen in whole numbers alone, and nodes
        that are made from such nodes alone."""
        self.parameters: dict[int, torch.Tensor] = {}
        generator = torch.Generator().manual_seed(moved) if moved is not None else None
        self.whole, *self.parts = (
            _Run(recording, leaves, self.parameters, exact, generator, state) for leaves in (split.whole, *split.parts)
        )
        with ExitStack() as stack:
            if exact:
                stack.callback(torch.set_default_dtype, torch.get_default_dtype())
                torch.set_default_dtype(torch.float64)
            for node in recording.graph.nodes:
                self._step(node)

    def _step(self, node: fx.Node) -> None:
        before = _random_state() if op_of(node).random or hasattr(node.target, "stable_name") else None
        whole = self.whole.step(node)
        drawn = before is not None and before != _random_state()
        for part in self.parts:
            part.step(node)
        name = getattr(node.target, "__name__", str(node.target))
        if node.op not in ("placeholder", "get_attr", "output"):
            if name == "randperm":
                self._offset(node)
            elif drawn or name in _UNINITIALISED:
                self._draw(node, whole)
            elif self._normalises(node, name):
                self._as_parts(node)
        self.laws[node] = law = self._law(node)
        doubtful = any(source in self.chance or not self.laws[source].known for source in node.all_input_nodes)
        counts = law.known and _is_count(self.whole.values[node])
        if counts and doubtful:
            self.chance.add(node)
        if (counts and (doubtful or any(self._adds_up(source) for source in node.all_input_nodes))) or (
            law.known and self._made_of_fragile(node)
        ):
            self.fragile.add(node)

    def _values(self, node: fx.Node) -> list[Any]:
        return [part.values[node] for part in self.parts]

    def _law(self, node: fx.Node) -> Law:
        return law_of(self.whole.values[node], self._values(node), self.split.sizes)

    def _made_of_fragile(self, node: fx.Node) -> bool:
        sources = [source for source in node.all_input_nodes if isinstance(self.whole.values[source], torch.Tensor)]
        own = [source for source in sources if source in self.fragile or self.laws[source].kind != "shared"]
        return bool(own) and all(source in self.fragile for source in own)

    def _adds_up(self, node: fx.Node) -> bool:
        """Return whether a tensor of the whole has other values than those of the parts, not only more of them."""
        return self.laws[node].kind in ("mean", "sum") and isinstance(self.whole.values[node], torch.Tensor)

    def _consistent(self, node: fx.Node) -> bool:
        return all(self.laws[source].known for source in node.all_input_nodes)

    def _draw(self, node: fx.Node, whole: Any) -> None:
        """Give each part the random numbers that the whole has drawn for the samples of the part."""
        if not isinstance(whole, (torch.Tensor, np.ndarray)) or not self._consistent(node):
            return
        values = self._values(node)
        pieces: Sequence[Any] = [whole] * len(values)
        if any(value.shape != whole.shape for value in values):
            dim = concatenated_dim(whole, values)
            if dim is None:
                return
            pieces = torch.as_tensor(whole).split([value.shape[dim] for value in values], dim)
            pieces = [piece.numpy() for piece in pieces] if isinstance(whole, np.ndarray) else pieces
        for part, piece in zip(self.parts, pieces):
            part.set(node, piece)

    def _offset(self, node: fx.Node) -> None:
        """Give the whole a random order of samples in which the samples of each part stay together."""
        values = self._values(node)
        offsets = itertools.accumulate((len(value) for value in values[:-1]), initial=0)
        together = torch.cat([value + offset for value, offset in zip(values, offsets)])
        if together.shape == self.whole.values[node].shape:
            self.whole.set(node, together)

    def _normalises(self, node: fx.Node, name: str) -> bool:
        if node.op == "call_module":
            layer = resolve(self.recording.root, str(node.target))
            return isinstance(layer, _BatchNorm) and layer.running_mean is None
        return node.op == "call_function" and name in _NORMS

    def _as_parts(self, node: fx.Node) -> None:
        """Give the whole the values of its parts, for a layer that normalises over the batch even in eval mode."""
        values = self._values(node)
        if not isinstance(values[0], torch.Tensor) or not self._consistent(node):
            return
        together = torch.cat(values)
        if together.shape == self.whole.values[node].shape and not self._law(node).known:
            self.whole.set(node, together)


def run_in_lockstep(recording: Recording, split: Split, moved: int | None = None) -> Lockstep:
    """Run a batch and its parts in float64, or in the types of the model if an op does not support float64.

    With the seed `moved`, parameters have other values than those of the model, and buffers that the step changes have those
    of a later step, if the step takes them: a count that starts at zero would look like a sum over samples.
    """
    later = frozenset(changed_buffers(recording, persistent_writes(recording)) if moved is not None else ())
    for state in (later, frozenset[str]()) if later else (later,):
        for exact in (True, False):
            with suppress(Exception):
                return Lockstep(recording, split, moved, exact, state)
    return Lockstep(recording, split, moved, exact=False)


def _later(buffer: torch.Tensor) -> torch.Tensor:
    """Return a buffer with other values: numbers and counts are larger, and values that are not negative stay so."""
    if buffer.is_floating_point():
        noise = torch.rand(buffer.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(buffer)
        return buffer + noise * (0.3 * buffer.abs() + _APART)
    return buffer + 1 if buffer.numel() == 1 and buffer.dtype in _WHOLE else buffer


def _is_count(value: Any) -> bool:
    """Return whether a value consists of whole numbers, which are easily equal by chance; real numbers are not."""
    if isinstance(value, torch.Tensor):
        return not value.is_complex() and (not value.is_floating_point() or bool((value == value.round()).all()))
    return isinstance(value, (bool, int)) or (isinstance(value, float) and value.is_integer())


def _random_state() -> tuple[bytes, Any]:
    """Return the state of all generators from which a model on this device draws."""
    return torch.get_rng_state().numpy().tobytes(), outside_rng()


@contextmanager
def evaluating(root: nn.Module) -> Iterator[None]:
    """Put the model into eval mode; afterwards, restore its modes and everything else that a run may change."""
    with preserved(root):
        root.eval()
        yield
