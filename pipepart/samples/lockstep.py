"""A recording run on a batch and on its parts at the same time, op by op, each with a state of its own.

In eval mode and, where the ops allow it, in float64, so that what differs does so because samples met. Nothing of the
model is touched: parameters and buffers are stood in for.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
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
from pipepart.recording.trace.contexts import outside_rng
from pipepart.recording.trace.intrinsics import check, set_attribute
from pipepart.samples.laws import Law, law_of

__all__ = ["Lockstep", "Run", "evaluating"]

_NARROW = (torch.float32, torch.float16, torch.bfloat16)
_CASTS = {"float": "double", "half": "double", "bfloat16": "double"}
_UNINITIALISED = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided")
_APART = 0.05
"""How far a parameter is moved at least; zeros are often where something is switched off at the start."""
_NORMS = ("batch_norm", "native_batch_norm")


class Run:
    """The values of one batch: of the whole, or of one part."""

    def __init__(
        self,
        recording: Recording,
        leaves: Sequence[Any],
        parameters: dict[int, torch.Tensor],
        exact: bool,
        generator: torch.Generator | None,
    ):
        self.recording, self.exact, self.parameters, self.generator = recording, exact, parameters, generator
        self.values: dict[fx.Node, Any] = {}
        self.assigned: dict[str, Any] = {}
        self.buffers: dict[int, torch.Tensor] = {}
        placeholders = [node for node in recording.graph.nodes if node.op == "placeholder"]
        self.leaves = {node: self._own(leaf) for node, leaf in zip(placeholders, leaves)}

    def step(self, node: fx.Node) -> Any:
        """Run one node; its value is kept."""
        self.values[node] = value = self._result(node)
        return value

    def set(self, node: fx.Node, value: Any) -> None:
        """Give a node another value; memory that it has changed in place gets it too."""
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
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), self.values.__getitem__)  # type: ignore[misc]
        if node.op == "output":
            return args[0]
        if node.target is set_attribute:
            owner: Any = node.args[0]
            self.assigned[f"{owner.target}.{args[1]}" if owner.target else str(args[1])] = args[2]
            return None
        if node.target is check:  # sizes were looked at before; what data decided is for the runtime to look at
            return None
        if self.exact:
            args, kwargs = _widened(args), _widened(kwargs)
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

    def _attribute(self, path: str) -> Any:
        if path in self.assigned:
            return self.assigned[path]
        constants = self.recording.constants
        value = constants[path] if path in constants else resolve(self.recording.root, path)
        return self._tensor(value) if isinstance(value, torch.Tensor) else value

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, nn.Parameter):
            if id(tensor) not in self.parameters:
                self.parameters[id(tensor)] = self._moved(self._own(tensor)).requires_grad_(tensor.requires_grad)
            return self.parameters[id(tensor)]
        if id(tensor) not in self.buffers:
            self.buffers[id(tensor)] = self._own(tensor)
        return self.buffers[id(tensor)]

    def _own(self, leaf: Any) -> Any:
        """A copy of a tensor, in float64 if it is a floating one."""
        if not isinstance(leaf, torch.Tensor):
            return leaf
        wide = self.exact and leaf.dtype in _NARROW
        return leaf.detach().to(torch.float64) if wide else leaf.detach().clone()

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        """A parameter somewhere else: at the start, gates are closed and all samples may take the same way."""
        if self.generator is None or not tensor.is_floating_point():
            return tensor
        noise = torch.randn(tensor.shape, generator=self.generator, dtype=torch.float64).to(tensor)
        if (
            self.generator.initial_seed() and tensor.numel()
        ):  # once more: as far from the model and from the others as can be
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
    """The whole batch and its parts, side by side. `laws` has what holds for each node that has run."""

    def __init__(
        self,
        recording: Recording,
        whole: Sequence[Any],
        parts: Sequence[Sequence[Any]],
        sizes: Sequence[int],
        moved: int | None = None,
    ):
        """With `moved`, with other parameters than those of the model: the seed that they are drawn with."""
        self.recording, self.sizes, self._moved = recording, tuple(sizes), moved
        self._leaves = (whole, parts)
        self.laws: dict[fx.Node, Law] = {}
        self.norms: list[fx.Node] = []
        """Layers that normalise over the batch even in eval mode; the whole gets what its parts have."""
        self.chance: set[fx.Node] = set()
        """Nodes whose law may hold for this batch alone: counts and flags made of values that have no law."""
        self.fragile: set[fx.Node] = set()
        """Nodes whose law is no consequence of those of its arguments and is seen in whole numbers alone, and what is made
        of nothing else."""
        self.exact = True

    def run(self) -> None:
        """Run all nodes; once more in the types of the model if an op cannot do float64."""
        try:
            self._run(exact=True)
        except Exception:
            self._run(exact=False)

    def _run(self, exact: bool) -> None:
        whole, parts = self._leaves
        self.exact, self.laws, self.norms, self.chance, self.fragile = exact, {}, [], set(), set()
        self.parameters: dict[int, torch.Tensor] = {}
        generator = torch.Generator().manual_seed(self._moved) if self._moved is not None else None
        self.whole = Run(self.recording, whole, self.parameters, exact, generator)
        self.parts = [Run(self.recording, part, self.parameters, exact, generator) for part in parts]
        with _default_dtype(torch.float64) if exact else ExitStack():
            for node in self.recording.graph.nodes:
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
        values = [part.values[node] for part in self.parts]
        self.laws[node] = law = law_of(self.whole.values[node], values, self.sizes)
        doubtful = any(source in self.chance or not self.laws[source].known for source in node.all_input_nodes)
        counts = law.known and _is_count(self.whole.values[node])
        if counts and doubtful:
            self.chance.add(node)
        if (counts and (doubtful or any(self._adds_up(source) for source in node.all_input_nodes))) or (
            law.known and self._made_of_fragile(node)
        ):
            self.fragile.add(node)

    def _made_of_fragile(self, node: fx.Node) -> bool:
        sources = [source for source in node.all_input_nodes if isinstance(self.whole.values[source], torch.Tensor)]
        own = [source for source in sources if source in self.fragile or self.laws[source].kind != "shared"]
        return bool(own) and all(source in self.fragile for source in own)

    def _adds_up(self, node: fx.Node) -> bool:
        """Whether a tensor of the whole is another one than in the parts, not only more of it."""
        return self.laws[node].kind in ("mean", "sum") and isinstance(self.whole.values[node], torch.Tensor)

    def _consistent(self, node: fx.Node) -> bool:
        return all(self.laws[source].known for source in node.all_input_nodes)

    def _draw(self, node: fx.Node, whole: Any) -> None:
        """Random numbers of the whole for the parts too, each its own samples."""
        if not isinstance(whole, (torch.Tensor, np.ndarray)) or not self._consistent(node):
            return
        values = [part.values[node] for part in self.parts]
        if all(value.shape == whole.shape for value in values):
            pieces: Sequence[Any] = [whole] * len(values)
        else:
            lengths = _lengths(whole, values)
            if lengths is None:
                return
            pieces = torch.as_tensor(whole).split(lengths[1], lengths[0])
            pieces = [piece.numpy() for piece in pieces] if isinstance(whole, np.ndarray) else pieces
        for part, piece in zip(self.parts, pieces):
            part.set(node, piece)

    def _offset(self, node: fx.Node) -> None:
        """A random order of samples: in the whole, each part keeps to itself."""
        values = [part.values[node] for part in self.parts]
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
        values = [part.values[node] for part in self.parts]
        if not isinstance(values[0], torch.Tensor) or not self._consistent(node):
            return
        together = torch.cat(values)
        if (
            together.shape == self.whole.values[node].shape
            and not law_of(self.whole.values[node], values, self.sizes).known
        ):
            self.norms.append(node)
            self.whole.set(node, together)


def _is_count(value: Any) -> bool:
    """Whether a value is made of whole numbers, which are easily equal by chance; real numbers are not."""
    if isinstance(value, torch.Tensor):
        return not value.is_complex() and (not value.is_floating_point() or bool((value == value.round()).all()))
    return isinstance(value, (bool, int)) or (isinstance(value, float) and value.is_integer())


def _random_state() -> tuple[bytes, Any]:
    """All generators that a model on this device draws from."""
    return torch.get_rng_state().numpy().tobytes(), outside_rng()


def _lengths(whole: Any, parts: Sequence[Any]) -> tuple[int, list[int]] | None:
    """The dimension along which the parts have the size of the whole together, and their sizes."""
    for dim in range(whole.ndim):
        if all(part.ndim == whole.ndim for part in parts):
            lengths = [part.shape[dim] for part in parts]
            if sum(lengths) == whole.shape[dim] != lengths[0]:
                return dim, lengths
    return None


def _widened(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return torch.float64 if value in _NARROW else torch.complex128 if value == torch.complex64 else value
    if type(value) in (tuple, list):
        return type(value)(_widened(item) for item in value)
    if type(value) is dict:
        return {key: _widened(item) for key, item in value.items()}
    return value


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def evaluating(root: nn.Module) -> Iterator[None]:
    """The model in eval mode, with everything that a run may change put back afterwards, the modes too."""
    with preserved(root):
        root.eval()
        yield
