"""Measured costs: every op is run forward and backward on the device, and scaled to the time of the whole step."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from pipepart.cost.analytic import analytic
from pipepart.cost.device_memory import lent, lent_tensor, stays_on_host
from pipepart.cost.measured_op import MeasuredOp, OpKind
from pipepart.cost.op_costs import SPLIT_LAYERS, OpCosts
from pipepart.cost.this_machine import this_machine
from pipepart.cost.timing import Context, Timer, device_under, own_copy, split_layer, state_kept, time_step, typical
from pipepart.devices import computes_on_host
from pipepart.graph import op_graph
from pipepart.recording import Recording
from pipepart.recording.op import has_op, op_of

__all__ = ["NO_MEMORY", "profile"]

NO_MEMORY = "the memory of the device is too small"
"""The start of a note of costs that depend on the memory that was free; they are not kept."""


def profile(recording: Recording, leaves: Sequence[Any], context: Context = nullcontext) -> OpCosts:
    """Measure every op of a recording on the leaves of one micro-batch; buffers and random state are restored.

    An op that runs alone has other costs than in the step (dispatch, caches, the start of the autograd engine), so the
    times are scaled: they add up to the measured forward and backward of the whole step.

    Ops of one kind (the same module or function on the same shapes, as in the layers of a transformer) share their
    measurements: they cost the same, and a busy machine must not make one of two equal layers look slower. The time of
    an op is the lower quartile of its repeats, since a disturbance only makes a measurement longer.

    An op that fails when it is run alone gets a computed cost and a note. If the memory of the device ends, all ops from
    there on do.

    The leaves are on the device that is measured. If the parameters are on the host, since the whole model does not fit on
    the device, only those of one op at a time are there, and the step is not timed as a whole.
    """
    module = recording.graph_module()
    leaves = [own_copy(leaf) for leaf in leaves]
    device = device_under([*leaves, *recording.root.parameters()])
    names = [node.name for node in recording.ops]
    lends = stays_on_host(recording.root, device)
    forward = backward = 0.0
    with state_kept(recording.root):  # gradients accumulate as in a step of several micro-batches
        single = _OpProfiler(module, context, device, lends)
        try:
            single.run(*(own_copy(leaf) for leaf in leaves))
        except Exception as error:
            single.give_up(names, error)
        single.settle()
        if lends:
            single.notes.append("the step is not timed as a whole: the model does not fit on one device")
        elif not single.out_of_memory:
            try:
                forward, backward = time_step(module, leaves, recording.loss_index, context)
            except torch.OutOfMemoryError as error:
                single.release()
                single.notes.append(f"{NO_MEMORY} to time the step as a whole: {_one_line(error)}")
            except Exception as error:
                single.notes.append(f"the step could not be timed as a whole: {_one_line(error)}")
    found = [single.found.get(name, MeasuredOp()) for name in names]
    if single.failed:
        found = _completed(recording, names, found, single.failed)
    f_scale = _scale(forward, (m.forward for m in found))
    b_scale = _scale(backward, (m.backward for m in found))
    by_python = split_layer()
    numbers = {name: index for index, name in enumerate(names)}
    sizes = [op_of(node).output_bytes for node in recording.ops]
    return OpCosts(
        names=tuple(names),
        forward=tuple(m.forward * f_scale for m in found),
        backward_input=tuple((m.backward - m.weight) * b_scale for m in found),
        backward_weight=tuple(m.weight * b_scale for m in found),
        parameter_bytes=tuple(m.parameter_bytes for m in found),
        saved_bytes=tuple(m.saved_bytes for m in found),
        output_bytes=tuple(sizes),
        source="profile",
        split_extra=tuple(m.split * b_scale + (by_python if m.trained and m.splits else 0.0) for m in found),
        savers=tuple(single.savers_of(name, numbers) for name in names),
        notes=tuple(single.notes),
    )


def _completed(
    recording: Recording, names: Sequence[str], found: Sequence[MeasuredOp], failed: set[str]
) -> list[MeasuredOp]:
    """Return the measurements, with costs computed from FLOPs and bytes for the ops that could not be measured."""
    (kind,) = this_machine().kinds.values()
    computed = analytic(op_graph(recording), kind)
    at = {name: index for index, name in enumerate(computed.names)}
    complete = []
    for name, measured in zip(names, found):
        if name in failed and name in at:
            i = at[name]
            measured = replace(
                measured,
                forward=computed.forward[i],
                backward=computed.backward[i],
                weight=computed.backward_weight[i] if measured.splits else 0.0,
                parameter_bytes=computed.parameter_bytes[i],
                saved_bytes=computed.saved_bytes[i],
            )
        complete.append(measured)
    return complete


class _OpProfiler(fx.Interpreter):
    """Interprets the graph, and runs each op alone several times on its real inputs."""

    def __init__(self, module: fx.GraphModule, context: Context, device: torch.device, lends: bool = False) -> None:
        super().__init__(module)
        self._timer, self._device, self._lends = Timer(device), device, lends
        self.out_of_memory = False
        self.found: dict[str, MeasuredOp] = {}
        self._context = context
        self._makers: dict[int, str] = {}
        """Storage -> the op that made it. A tensor that several ops save counts once, for the first of them."""
        self._saved: set[tuple[str, int]] = set()
        self.maker_of: dict[str, str] = {}
        """Op -> the op whose memory holds its output: another op if the output is a view."""
        self.savers: dict[str, list[str]] = {}
        """Op -> the ops that keep its memory for their backward."""
        self._kinds: dict[str, OpKind] = {}
        self.failed: set[str] = set()
        self.notes: list[str] = []

    def give_up(self, names: Sequence[str], error: Exception) -> None:
        """Mark all ops without a measurement as failed, after an op that could not be run at all."""
        self._timer.drop()
        self.failed.update(name for name in names if name not in self.found or not self.found[name].kind.forward)
        self.out_of_memory = isinstance(error, torch.OutOfMemoryError)
        why = f"{NO_MEMORY}: " if self.out_of_memory else ""
        self.notes.append(f"{why}the costs of {len(self.failed)} ops are computed, not measured: {_one_line(error)}")
        self.release()

    def release(self) -> None:
        """Give the memory of the device back that this run has used."""
        self.env.clear()
        with suppress(AttributeError, RuntimeError):
            if not computes_on_host(self._device):
                torch.accelerator.empty_cache()

    def settle(self) -> None:
        """Set the times of each op from the measurements of its kind, after all ops have run."""
        for op in self.found.values():
            if op.kind.forward:
                op.forward, op.backward = typical(op.kind.forward), typical(op.kind.backward)
                inputs_only, weights_only = typical(op.kind.inputs_only), typical(op.kind.weights_only)
                op.weight = max(0.0, op.backward - inputs_only) if op.trained else 0.0
                if not op.splits:
                    op.weight = 0.0
                elif op.trained and weights_only:
                    op.split = max(0.0, inputs_only + weights_only - op.backward)

    def savers_of(self, name: str, numbers: dict[str, int]) -> tuple[int, ...]:
        """Return the numbers of the ops that keep the output of an op for their backward."""
        savers = self.savers.get(self.maker_of.get(name, name), ())
        return tuple(sorted({numbers[saver] for saver in savers if saver in numbers}))

    def run_node(self, n: fx.Node) -> Any:
        if n.op in ("placeholder", "output"):
            return super().run_node(n)
        if n.op == "get_attr":
            value = super().run_node(n)
            return lent_tensor(value, self._device) if self._lends else value
        with lent(self._modules(n), self._device) if self._lends else nullcontext():
            return self._run_op(n)

    def _modules(self, n: fx.Node) -> list[nn.Module]:
        """Return the modules that an op calls."""
        found = [self.fetch_attr(str(n.target))] if n.op == "call_module" else []
        found += [self.env.get(node) for node in n.all_input_nodes if node.op == "get_attr"]
        return [module for module in found if isinstance(module, nn.Module)]

    def _run_op(self, n: fx.Node) -> Any:
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        signature = self._signature(n, args, kwargs)
        measured = self.found[n.name] = MeasuredOp(self._kinds.setdefault(signature, OpKind()))
        inplace = has_op(n) and op_of(n).inplace
        call = lambda a, k: getattr(self, n.op)(n.target, a, k)  # noqa: E731
        weights = self._weights(n)
        measured.parameter_bytes = sum(p.numel() * p.element_size() for p in weights)
        measured.splits = n.op == "call_module" and type(self.fetch_attr(str(n.target))) in SPLIT_LAYERS
        given = {_pointer(t) for t in _tensors((args, kwargs))}
        makers = {pointer: self._makers.get(pointer, f"batch:{pointer}") for pointer in given}
        saved: dict[int, int] = {}
        try:
            result, saved = self._measure(measured, call, args, kwargs, inplace, weights)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            self._timer.drop()
            self.failed.add(n.name)
            self.notes.append(
                f"the cost of {n.name} is computed, not measured: run alone, the op fails with {_one_line(error)}"
            )
            result = None if inplace else self._plainly(call, args, kwargs)
        if inplace:  # the repeats wrote into copies; later ops read the tensor itself
            result = self._plainly(call, args, kwargs)
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

    def _plainly(self, call: Callable[[Any, Any], Any], args: Any, kwargs: Any) -> Any:
        """Run an op once on its real inputs, which it may change, and return its result."""
        given = _tensors((args, kwargs))
        versions = [_version(t) for t in given]
        with torch.no_grad(), self._context():
            out = call(args, kwargs)
        needs = any(t.requires_grad for t in given)
        if needs:  # tensors in memory that was written need a gradient from here on
            written = {_pointer(t) for t, before in zip(given, versions) if _version(t) != before}
            for tensor in _tensors(tuple(self.env.values())) if written else ():
                if _pointer(tensor) in written and tensor.is_leaf and tensor.is_floating_point():
                    tensor.requires_grad_()
        return fx.node.map_aggregate(out, functools.partial(_detached, needs))

    def _signature(self, n: fx.Node, args: Any, kwargs: Any) -> str:
        """Return the properties that determine the cost of an op: ops with one signature are of one kind."""

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
        measured: MeasuredOp,
        call: Callable[[Any, Any], Any],
        args: Any,
        kwargs: Any,
        inplace: bool,
        weights: Sequence[nn.Parameter],
    ) -> tuple[Any, dict[int, int]]:
        """Time an op, and return its result and the storages (with their sizes) that it keeps for its backward."""
        trainable = [p for p in weights if p.requires_grad]
        kind, measured.trained, timer = measured.kind, bool(trainable), self._timer
        forward, backward, inputs_only = kind.forward, kind.backward, kind.inputs_only
        result: Any = None
        saved = _SavedBytes({p.untyped_storage().data_ptr() for p in weights})
        for repeat in kind.repeats(timer):
            leaves: list[torch.Tensor] = []
            fresh = fx.node.map_aggregate((args, kwargs), functools.partial(_leaf, leaves, inplace))
            with saved.hooks() if repeat == 0 else nullcontext(), self._context():
                started = timer.start()
                out = call(*fresh)
                timer.stop(started, forward)
            if repeat == 0:
                result = fx.node.map_aggregate(out, functools.partial(_detached, False))
            roots = [t for t in _tensors(out) if t.requires_grad and t.grad_fn is not None]
            sources = [*leaves, *trainable]
            if not roots or not sources:
                backward.append(0.0)
                inputs_only.append(0.0)
                continue
            ones = [torch.ones_like(root) for root in roots]
            split = bool(trainable and leaves) and measured.splits
            if split:
                for part, into in ((leaves, inputs_only), (trainable, kind.weights_only)):
                    started = timer.start()
                    torch.autograd.backward(roots, ones, retain_graph=True, inputs=part)
                    timer.stop(started, into)
                for leaf in leaves:
                    leaf.grad = None
            started = timer.start()
            torch.autograd.backward(roots, ones, inputs=sources)
            timer.stop(started, backward, *(() if split or trainable else (inputs_only,)))
            if trainable and not split:
                inputs_only.append(0.0)
        timer.read()
        return result, saved.found


class _SavedBytes:
    """Counts the bytes that autograd keeps for backward, without parameters."""

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


def _pointer(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _leaf(leaves: list[torch.Tensor], inplace: bool, value: Any) -> Any:
    """Return an input of an op as a leaf of a graph of its own."""
    if not isinstance(value, torch.Tensor) or (isinstance(value, nn.Parameter) and not inplace):
        return value
    fresh = value.detach()
    if value.requires_grad:
        fresh.requires_grad_(True)
        leaves.append(fresh)
    return fresh.clone() if inplace else fresh  # in-place ops may not change leaves, nor the value of another repeat


def _detached(needs: bool, value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().requires_grad_(value.requires_grad or (needs and value.is_floating_point()))


def _one_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:200]


def _tensors(value: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    fx.node.map_aggregate(value, lambda v: found.append(v) if isinstance(v, torch.Tensor) else None)
    return found


def _scale(whole: float, parts: Iterator[float] | Any) -> float:
    total = math.fsum(parts)
    return whole / total if whole > 0 and total > 0 else 1.0
