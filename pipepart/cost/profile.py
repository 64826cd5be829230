"""Measured costs: every op really run forward and backward on the device, and the whole step to scale them by."""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from pipepart.capture import Recording
from pipepart.cost.costs import OpCosts

__all__ = ["profile", "state_kept", "whole_step"]

_REPEATS = (3, 15)  # of one kind of op: at least, at most
_AGAIN = 2  # of a further op of a kind that was measured before
_BUDGET = 0.02  # seconds per kind of op and direction
_STEPS = (5, 100)  # of the whole step: at least, at most
_FEW_STEPS = (3, 50)  # to see whether what was measured before still holds
_STEP_BUDGET = 1.5  # seconds for the whole step; a machine is faster in one moment and slower in the next

Context = Callable[[], AbstractContextManager[Any]]


def profile(recording: Recording, leaves: Sequence[Any], context: Context = nullcontext) -> OpCosts:
    """Run every op of a recording on the leaves of one micro-batch; state of the model (buffers, RNG) is put back.

    An op that runs alone has other costs than in the step (dispatch, caches, the start of the autograd engine), so the
    times are scaled to add up to the measured forward and backward of the whole step.

    Ops of one kind (the same module or function on the same shapes, as in the layers of a transformer) share their
    measurements: they cost the same, and a busy machine must not make one layer look slower than its twin. Of all
    repeats of an op the lower quartile counts: what disturbs a measurement only ever makes it longer.
    """
    module = recording.graph_module()
    leaves = [_own_memory(leaf) for leaf in leaves]
    with state_kept(recording.root):  # gradients are added up as in a step of several micro-batches
        single = _OpProfiler(module, context)
        single.run(*leaves)
        single.settle()
        forward, backward = _whole_step(module, leaves, recording.loss_index, context)
    names = [node.name for node in recording.ops]
    found = [single.found.get(name, _Measured()) for name in names]
    f_scale = _scale(forward, (m.forward for m in found))
    b_scale = _scale(backward, (m.backward for m in found))
    by_python = _split_layer()
    numbers = {name: index for index, name in enumerate(names)}
    sizes = [node.meta["op"].nbytes if "op" in node.meta else 0 for node in recording.ops]
    return OpCosts(
        names=tuple(names),
        forward=tuple(m.forward * f_scale for m in found),
        backward_input=tuple((m.backward - m.weight) * b_scale for m in found),
        backward_weight=tuple(m.weight * b_scale for m in found),
        parameter_bytes=tuple(m.parameter_bytes for m in found),
        saved_bytes=tuple(m.saved_bytes for m in found),
        output_bytes=tuple(sizes),
        source="profile",
        split_extra=tuple(m.split * b_scale + (by_python if m.trained else 0.0) for m in found),
        savers=tuple(single.savers_of(name, numbers) for name in names),
    )


@dataclass
class _Kind:
    """All measurements of ops that do the same on the same shapes."""

    forward: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)
    inputs_only: list[float] = field(default_factory=list)
    """The backward without the gradients of parameters."""
    weights_only: list[float] = field(default_factory=list)
    """The backward for the gradients of parameters alone."""

    def repeats(self) -> Iterator[int]:
        """Repeat numbers: at least a few, then until the budget of time is used; fewer for an op of a known kind."""
        if self.forward:
            yield from range(_AGAIN)
            return
        least, most = _REPEATS
        for repeat in range(most):
            if repeat >= least and sum(self.forward) + sum(self.backward) > 2 * _BUDGET:
                return
            yield repeat


@dataclass
class _Measured:
    kind: _Kind = field(default_factory=_Kind)
    trained: bool = False
    forward: float = 0.0
    backward: float = 0.0
    weight: float = 0.0
    """The part of the backward that makes gradients of parameters."""
    split: float = 0.0
    """What both halves of the backward take more than the whole: they share work."""
    parameter_bytes: int = 0
    saved_bytes: int = 0


class _OpProfiler(fx.Interpreter):
    """Interprets the graph, running each op alone several times on its real inputs."""

    def __init__(self, module: fx.GraphModule, context: Context) -> None:
        super().__init__(module)
        self.found: dict[str, _Measured] = {}
        self._context = context
        self._makers: dict[int, str] = {}
        """Storage -> the op that made it. A tensor saved by several ops counts once, for the first that saves it."""
        self._saved: set[tuple[str, int]] = set()
        self.maker_of: dict[str, str] = {}
        """Op -> the op whose memory its output lies in (a view lies in that of another)."""
        self.savers: dict[str, list[str]] = {}
        """Op -> the ops that keep its memory for their backward."""
        self._kinds: dict[str, _Kind] = {}

    def settle(self) -> None:
        """When all ops have run: the times of each op from the measurements of its kind."""
        for op in self.found.values():
            if op.kind.forward:
                op.forward, op.backward = _typical(op.kind.forward), _typical(op.kind.backward)
                inputs_only, weights_only = _typical(op.kind.inputs_only), _typical(op.kind.weights_only)
                op.weight = max(0.0, op.backward - inputs_only) if op.trained else 0.0
                if op.trained and weights_only:
                    op.split = max(0.0, inputs_only + weights_only - op.backward)

    def savers_of(self, name: str, numbers: dict[str, int]) -> tuple[int, ...]:
        """The numbers of the ops that keep the output of an op for their backward."""
        savers = self.savers.get(self.maker_of.get(name, name), ())
        return tuple(sorted({numbers[saver] for saver in savers if saver in numbers}))

    def run_node(self, n: fx.Node) -> Any:
        if n.op in ("placeholder", "get_attr", "output"):
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        signature = self._signature(n, args, kwargs)
        measured = self.found[n.name] = _Measured(self._kinds.setdefault(signature, _Kind()))
        inplace = "op" in n.meta and n.meta["op"].inplace
        call = lambda a, k: getattr(self, n.op)(n.target, a, k)  # noqa: E731
        weights = self._weights(n)
        measured.parameter_bytes = sum(p.numel() * p.element_size() for p in weights)
        given = {_pointer(t) for t in _tensors((args, kwargs))}
        makers = {pointer: self._makers.get(pointer, f"batch:{pointer}") for pointer in given}
        result, saved = self._measure(measured, call, args, kwargs, inplace, weights)
        for tensor in _tensors(result):
            maker = self._makers[_pointer(tensor)] = makers.setdefault(_pointer(tensor), n.name)
            self.maker_of[n.name] = maker
        for pointer, size in saved.items():
            if pointer in makers:
                self.savers.setdefault(makers[pointer], []).append(n.name)
            key = (makers.get(pointer, f"{n.name}:{pointer}"), size)
            measured.saved_bytes += 0 if key in self._saved else size
            self._saved.add(key)
        return result

    def _signature(self, n: fx.Node, args: Any, kwargs: Any) -> str:
        """What decides the cost of an op: ops with one signature are of one kind."""

        def shown(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return f"{tuple(value.shape)}{value.stride()}{value.dtype}{value.requires_grad}"
            return value

        what = repr(self.fetch_attr(str(n.target))) if n.op == "call_module" else str(n.target)
        trained = [p.requires_grad for p in self._weights(n)]
        return f"{n.op} {what} {trained} {fx.node.map_aggregate((args, kwargs), shown)!r}"

    def _weights(self, n: fx.Node) -> list[nn.Parameter]:
        found: dict[int, nn.Parameter] = {}
        if n.op == "call_module":
            found.update((id(p), p) for p in self.fetch_attr(str(n.target)).parameters())
        for node in n.all_input_nodes:
            value = self.env.get(node)
            if node.op == "get_attr" and isinstance(value, nn.Parameter):
                found[id(value)] = value
        return list(found.values())

    def _measure(
        self,
        measured: _Measured,
        call: Callable[[Any, Any], Any],
        args: Any,
        kwargs: Any,
        inplace: bool,
        weights: Sequence[nn.Parameter],
    ) -> tuple[Any, dict[int, int]]:
        """The op's result, and the storages (with their sizes) that it keeps for its backward."""
        trainable = [p for p in weights if p.requires_grad]
        kind, measured.trained = measured.kind, bool(trainable)
        forward, backward, inputs_only = kind.forward, kind.backward, kind.inputs_only
        result: Any = None
        saved = _SavedBytes({p.untyped_storage().data_ptr() for p in weights})
        for repeat in kind.repeats():
            leaves: list[torch.Tensor] = []
            fresh = fx.node.map_aggregate((args, kwargs), functools.partial(_leaf, leaves, inplace))
            with saved.hooks() if repeat == 0 else nullcontext(), self._context():
                started = _now()
                out = call(*fresh)
                forward.append(_now() - started)
            if repeat == 0:
                result = fx.node.map_aggregate(out, _detached)
            roots = [t for t in _tensors(out) if t.requires_grad and t.grad_fn is not None]
            sources = [*leaves, *trainable]
            if not roots or not sources:
                backward.append(0.0)
                inputs_only.append(0.0)
                continue
            ones = [torch.ones_like(root) for root in roots]
            split = bool(trainable and leaves)
            if split:
                inputs_only.append(_timed_backward(roots, leaves, ones, retain=True))
                kind.weights_only.append(_timed_backward(roots, trainable, ones, retain=True))
                for leaf in leaves:
                    leaf.grad = None
            backward.append(_timed_backward(roots, sources, ones, retain=False))
            if not split:
                inputs_only.append(0.0 if trainable else backward[-1])
        return result, saved.found


class _SavedBytes:
    """Counts what autograd keeps for backward, parameters left out."""

    def __init__(self, parameters: set[int]) -> None:
        self._parameters = parameters
        self.found: dict[int, int] = {}

    def hooks(self) -> AbstractContextManager[Any]:
        return torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._parameters:
            self.found[storage.data_ptr()] = storage.nbytes()
        return tensor


def _own_memory(leaf: Any) -> Any:
    """A part of a batch that lies in the memory of the whole would count as the whole where it is saved."""
    return leaf.clone() if isinstance(leaf, torch.Tensor) and not leaf.requires_grad else leaf


def _pointer(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _typical(seconds: Sequence[float]) -> float:
    """The lower quartile."""
    return sorted(seconds)[len(seconds) // 4] if seconds else 0.0


def _mean(seconds: Sequence[float]) -> float:
    """Without the longest twentieth. What disturbs a run is in its steps, each of which is a sum of many actions: they
    take what the mean says, while the share of an op is best told without disturbance."""
    kept = sorted(seconds)[: max(1, len(seconds) - -(-len(seconds) // 20))]
    return statistics.fmean(kept) if kept else 0.0


def _now() -> float:
    """The time when all that was asked of the device so far is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def _timed_backward(roots: Sequence[Any], sources: Sequence[Any], ones: Sequence[Any], retain: bool) -> float:
    started = _now()
    torch.autograd.backward(roots, ones, retain_graph=retain, inputs=sources)
    return _now() - started


def _leaf(leaves: list[torch.Tensor], inplace: bool, value: Any) -> Any:
    """An input of an op as a leaf of its own little graph."""
    if not isinstance(value, torch.Tensor) or isinstance(value, nn.Parameter):
        return value
    fresh = value.detach()
    if value.requires_grad:
        fresh.requires_grad_(True)
        leaves.append(fresh)
    return fresh.clone() if inplace else fresh  # in-place ops may not touch leaves, nor the value of another repeat


def _detached(value: Any) -> Any:
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value


def _tensors(value: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    fx.node.map_aggregate(value, lambda v: found.append(v) if isinstance(v, torch.Tensor) else None)
    return found


def whole_step(recording: Recording, leaves: Sequence[Any], context: Context = nullcontext) -> tuple[float, float]:
    """Seconds of the forward and of the backward of one micro-batch, measured quickly."""
    with state_kept(recording.root):
        module = recording.graph_module()
        return _whole_step(module, leaves, recording.loss_index, context, _FEW_STEPS, _STEP_BUDGET / 2)


def _whole_step(
    module: fx.GraphModule,
    leaves: Sequence[Any],
    loss_index: int | None,
    context: Context,
    steps: tuple[int, int] = _STEPS,
    budget: float = _STEP_BUDGET,
) -> tuple[float, float]:
    """Seconds of the forward and the backward of the whole step."""
    forward: list[float] = []
    backward: list[float] = []
    parameters = [p for p in module.parameters() if p.requires_grad]
    least, most = steps
    for repeat in range(most):
        if repeat >= least and sum(forward) + sum(backward) > budget:
            break
        with context():
            started = _now()
            outputs = module(*leaves)
            forward.append(_now() - started)
        if loss_index is not None and parameters:
            started = _now()
            torch.autograd.backward(outputs[loss_index], inputs=parameters)
            backward.append(_now() - started)
        del outputs
    # The first one warms up: it allocates what the others use again.
    return _mean(forward[1:]), _mean(backward[1:])


class _Two(torch.autograd.Function):
    """A linear layer as a split backward runs it: by a function written in Python."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return nn.functional.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return gradient.mm(weight), gradient.t().mm(x)


def _split_layer(rounds: int = 60) -> float:
    """What running a layer that way costs more than running it by torch alone, on a layer with next to no work."""
    x, weight = torch.ones(2, 4, requires_grad=True), torch.ones(4, 4, requires_grad=True)

    def typical(call: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> float:
        times = []
        for _ in range(rounds):
            started = time.perf_counter()
            out = call(x, weight)
            torch.autograd.grad(out, [x, weight], torch.ones_like(out))
            times.append(time.perf_counter() - started)
        return _typical(times)

    with torch.enable_grad():
        return max(0.0, typical(_Two.apply) - typical(nn.functional.linear))


def _scale(whole: float, parts: Iterator[float] | Any) -> float:
    total = math.fsum(parts)
    return whole / total if whole > 0 and total > 0 else 1.0


@contextmanager
def state_kept(root: nn.Module) -> Iterator[None]:
    """Buffers, gradients and the random state are as before, whatever the ops did."""
    gradients = [(parameter, parameter.grad) for parameter in root.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    buffers = [(buffer, buffer.detach().clone()) for buffer in root.buffers()]
    state = torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else None
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, before in buffers:
                if buffer.shape == before.shape:
                    buffer.copy_(before)
        torch.set_rng_state(state)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)
