"""Run a model eagerly and write down every torch-level call as a node of an fx graph."""

from __future__ import annotations

import operator
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
import torch.nn as nn
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode

from pipepart.recording.model_state.places import Guards
from pipepart.recording.trace import intrinsics, ops
from pipepart.recording.trace.arguments import has_tensor, tensors_in, unwrap
from pipepart.recording.trace.facts import gradient_edge, is_same_memory, outside_rng, reached, storage_of, version_of
from pipepart.recording.trace.failures import DataDependent, DrawsOutside, FromNumpy, NotRecordable
from pipepart.recording.trace.functions import enclosing_function
from pipepart.recording.trace.graph_recorder import GraphRecorder, unseen
from pipepart.recording.trace.naming import name_of
from pipepart.recording.trace.state_numbers import fixed_sizes

__all__ = ["RecordMode", "Recorder"]


class RecordMode(TorchFunctionMode):
    """Sends every torch-level call to the recorder."""

    def __init__(self, recorder: Recorder):
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.recorder.torch_call(func, args, kwargs or {})


def _plain(tensors: list[torch.Tensor]) -> bool:
    """Whether no tensor is of a class that has its own idea of torch functions."""
    return all(type(tensor) in (torch.Tensor, nn.Parameter) for tensor in tensors)


def _joined(a: tuple[Any, ...], b: tuple[Any, ...]) -> tuple[Any, ...]:
    """What was known before a call of some inputs and of others."""
    return a[0] + b[0], {**a[1], **b[1]}, a[2] + b[2]


@dataclass
class _Frame:
    """A module or function that is run whole: what it may touch."""

    tensors: set[int]
    prefix: str | None
    borrowed: dict[str, torch.Tensor] | None = None
    """Parameters and buffers that it uses without owning them, if it may."""


_INSIDE = _Frame(set(), "")


class Recorder(GraphRecorder):
    """One recorded run: every call of torch becomes a node, with what is known of it.

    `whole` names modules to keep as one op; `guards` allows to specialise on data (with a check in the graph).
    """

    def __init__(self, root: nn.Module, names: Any, whole: frozenset[str], guards: bool, fake: bool = False):
        super().__init__(root, names)
        self.whole, self.guards, self.fake = whole, guards, fake
        self.frames: list[_Frame] = []
        self.recording = True
        self.failed_in: list[str] | None = None
        self.watching = False  # whether each module is asked if it draws random numbers outside torch
        self.drawn: Any = None  # the state of those random numbers, as far as ops that are kept whole account for it
        self.has_state = False  # whether numbers of the user's Python state are inputs of the graph
        self.guards_of_state = Guards()
        self.notes: list[str] = []
        self.rng_state: torch.Tensor | None = None  # of torch, after the last op
        self.leaf_edges: dict[int, tuple[Any, int]] = {}
        self.makers: dict[int, Any] = {}  # the function that returned a numpy array, by the identity of the array

    # ---------------------------------------------------------------- calls

    def torch_call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One torch function or tensor method that the running model calls."""
        plain_args, plain_kwargs = unwrap(args), unwrap(kwargs)
        if not self.recording:
            return func(*plain_args, **plain_kwargs)
        if self.frames:
            self._check_inside(args, kwargs)
            return func(*plain_args, **plain_kwargs)
        name = name_of(func)
        if name in ops.NOT_OPS or name == "_set_grad_enabled":
            return func(*plain_args, **plain_kwargs)
        if self.has_state and name not in ops.ARITHMETIC:
            args, kwargs = fixed_sizes(name, args), fixed_sizes(name, kwargs)
        if name == "__iter__":
            return iter(self.torch_call(torch.unbind, (args[0], 0), {}))
        if name == "__get__":
            return self._property(func, args)
        if name == "__set__" and getattr(func.__self__, "__name__", "") not in ("requires_grad", "grad"):
            if func.__self__.__name__ == "data" and is_same_memory(args[0], args[1]):
                return None  # `module.to(device)` where the module is there already
            raise NotRecordable(f"assignment to Tensor.{func.__self__.__name__} in {self.here()}")
        if func is torch.autograd.grad or func is torch.autograd.backward or name == "backward":
            raise NotRecordable(f"{name} is called while the model runs, in {self.here()}")
        if name in ops.DATA_READS:
            return self._read_data(func, name, args, kwargs, plain_args, plain_kwargs)
        if name == "register_hook":
            self.make("call_method", name, (self.node_of(args[0]), self.constant(args[1])), {})
            return func(*plain_args, **plain_kwargs)
        if name in ("unbind", "split", "chunk", "tensor_split") and self._is_dynamic(args):
            raise DataDependent(f"{name} of a tensor whose shape depends on data, in {self.here()}")
        inputs = tensors_in((args, kwargs))
        before = self._before(inputs)
        self.frames.append(_INSIDE)  # what the op itself calls (the autograd function of a custom op) is part of it
        try:
            out = func(*plain_args, **plain_kwargs)
        finally:
            self.frames.pop()
        if not has_tensor(out) and out is not None:
            return self._number(name, args, kwargs, out)
        if name in ("tensor", "as_tensor", "from_numpy") and args and type(args[0]).__module__ == "numpy":
            self._check_numpy(args[0])
        self.known = {id(tensor): node for tensor, node in zip(inputs, before[2])}
        node_args, node_kwargs = self.argument(tuple(args)), self.argument(dict(kwargs))
        self.known = {}
        node_args, node_kwargs = self._follow_training(func, name, node_args, node_kwargs)
        if name in ops.OPERATORS and not node_kwargs and ops.tensor_method(func, name):
            node = self.make("call_function", ops.OPERATORS[name], node_args, {})
        elif ops.tensor_method(func, name):
            node = self.make("call_method", name, node_args, node_kwargs)
        else:
            node = self.make("call_function", func, node_args, node_kwargs)
        fact = self.facts[node]
        fact.random = ops.is_random_name(name) and plain_kwargs.get("training") is not False
        fact.from_data = any(self.facts[n].from_data and self.facts[n].number is not None for n in node.all_input_nodes)
        fact.dynamic = fact.from_data or self._shape_from_data(name, args, kwargs)
        if name in ("batch_norm", "instance_norm"):  # changes its running statistics without counting versions
            statistics = [*args[1:3], kwargs.get("running_mean"), kwargs.get("running_var")]
            fact.mutates.update(storage_of(t) for t in statistics if isinstance(t, torch.Tensor))
        self._finish(node, inputs, before, out)
        return out

    def run_whole(
        self,
        call: Callable[..., Any],
        op: str,
        target: Any,
        args: Any,
        kwargs: Any,
        *,
        lead: tuple[Any, ...] = (),
        prefix: str | None = None,
        own: list[torch.Tensor] | None = None,
        stateful: bool = False,
        random: bool = False,
        closed: bool = False,
        borrows: bool = False,
    ) -> Any:
        """Record a call without looking inside. What it touches must be among its arguments or below `prefix`.

        `closed` calls are known to touch nothing else: what they do is not watched. A call that `borrows` may use any
        parameters and buffers of the model; the op has them as its argument ``uses``.
        """
        inputs = tensors_in((args, kwargs))
        node_args, node_kwargs = self.argument(tuple(args)), self.argument(dict(kwargs))
        state = own or []
        if self._draws_outside():
            raise DrawsOutside(f"random numbers outside torch (Python's random or numpy) are drawn in {self.here()}")
        frame = _Frame({id(t) for t in inputs}, prefix, {} if borrows else None)
        self.frames.append(frame)
        try:
            before = self._before(inputs)
            versions = [version_of(t) for t in state]
            with torch._C.DisableTorchFunction() if closed and _plain(inputs) else nullcontext():
                out = call(*unwrap(tuple(args)), **unwrap(dict(kwargs)))
            changed = any(version_of(t) != v for t, v in zip(state, versions))
        finally:
            self.frames.pop()
        random = self._draws_outside() or random
        if frame.borrowed:
            node_kwargs = {**node_kwargs, "uses": tuple(self.read_attribute(name) for name in frame.borrowed)}
            more = list(frame.borrowed.values())
            inputs, before = inputs + more, _joined(before, self._before(more))
        node = self.make(op, target, tuple(lead) + node_args, node_kwargs)
        self.facts[node].stateful, self.facts[node].random = changed or stateful, random
        self._finish(node, inputs, before, out)
        return out

    # ---------------------------------------------------------------- parts of a call

    def _draws_outside(self) -> bool:
        """Whether random numbers outside torch were drawn since this was last asked (if modules are watched)."""
        before, self.drawn = self.drawn, outside_rng() if self.watching else self.drawn
        return bool(before != self.drawn)

    def _drew(self) -> bool:
        """Whether torch's random numbers are further on than after the last op; fake tensors draw none."""
        if self.fake:
            return False
        before, self.rng_state = self.rng_state, torch.default_generator.get_state()
        return before is not None and not torch.equal(before, self.rng_state)

    @unseen
    def _before(self, inputs: list[torch.Tensor]) -> tuple[Any, ...]:
        edges = {}
        nodes = [self._node_of(tensor) for tensor in inputs]
        for tensor, node in zip(inputs, nodes):
            if tensor.requires_grad and not tensor.is_inference():
                edges[self._edge(tensor)] = node
                base = tensor._base  # changed in place, a view hangs on the history of its base and no more on its own
                if base is not None and base.requires_grad:
                    edges.setdefault(self._edge(base), node)
        if self.rng_state is None:
            self._drew()
        return [version_of(t) for t in inputs], edges, nodes

    def _edge(self, tensor: torch.Tensor) -> tuple[Any, int]:
        """Where gradients of a tensor go in autograd's graph; of a parameter always the same."""
        function = tensor.grad_fn
        if function is not None:
            return function, tensor.output_nr
        key = id(tensor)
        known = self.leaf_edges.get(key)
        if known is None:
            edge = gradient_edge(tensor)
            known = (edge.node, edge.output_nr) if edge is not None else (None, 0)
            if key in self.tensor_names:
                self.leaf_edges[key] = known
        return known

    @unseen
    def _finish(self, node: fx.Node, inputs: list[torch.Tensor], before: tuple[Any, ...], out: Any) -> None:
        versions, edges, nodes = before
        fact = self.facts[node]
        for tensor, version in zip(inputs, versions):
            storage = storage_of(tensor)
            fact.reads.add(storage)
            if version_of(tensor) != version:
                fact.mutates.add(storage)
        fact.random = self._drew() or fact.random
        known = [self.facts[n] for n in node.all_input_nodes]
        fact.varies = fact.random or node.op == "call_module" or any(f.varies or f.number is not None for f in known)
        fact.chance = (fact.random or any(f.chance for f in known)) and all(
            f.chance or (not f.varies and f.number is None) for f in known
        )
        fact.dynamic = fact.dynamic or (not fact.mutates and any(self.facts[n].dynamic for n in nodes))
        for storage in fact.mutates:
            self.mutations[storage] = node
            fact.writes.add(storage)
        self._bind_result(out, node)
        outs = tensors_in(out)
        if not outs:
            outs = [tensor for tensor in inputs if storage_of(tensor) in fact.mutates]
        fact.differentiates = reached(outs, edges)
        for source, its in zip(node.all_input_nodes, known):  # objects made of tensors
            if its.tensor is None and its.differentiates & fact.differentiates:
                fact.differentiates.add(source)
        fact.requires_grad = any(o.requires_grad for o in outs)

    def _bind_result(self, out: Any, node: fx.Node) -> None:
        if isinstance(out, torch.Tensor):
            self._bind(out, node)
            if out.dim() == 0:
                self.facts[node].dynamic = False
            return
        if type(out).__module__ == "numpy" or isinstance(out, PackedSequence):
            self.values[id(out)] = node
            self.kept.append(out)
        items: list[tuple[Any, Any, Any]] = []
        if isinstance(out, PackedSequence):
            items = [(getattr, name, getattr(out, name)) for name in out._fields]
        elif isinstance(out, (tuple, list)):
            items = [(operator.getitem, i, item) for i, item in enumerate(out)]
        elif isinstance(out, dict):
            items = [(operator.getitem, key, item) for key, item in out.items()]
        elif hasattr(out, "__dict__") and not isinstance(out, (type, nn.Module)) and has_tensor(vars(out)):
            items = [(getattr, key, item) for key, item in vars(out).items()]
        for target, key, item in items:
            if (
                isinstance(item, torch.Tensor)
                and id(item) in self.values
                and storage_of(item) in self.facts[node].reads
            ):
                continue  # an argument handed through unchanged
            if has_tensor(item):
                part = self.make("call_function", target, (node, key), {})
                fact, whole = self.facts[part], self.facts[node]
                fact.varies, fact.dynamic, fact.grad_mode = whole.varies, whole.dynamic, whole.grad_mode
                fact.differentiates = {node}
                self._bind_result(item, part)

    def _property(self, func: Any, args: tuple[Any, ...]) -> Any:
        name = getattr(func.__self__, "__name__", "?")
        tensor = args[0]
        if name in ("shape", "ndim", "dtype", "device", "requires_grad", "is_leaf", "grad_fn", "layout", "_version"):
            out = func(tensor)
            return self._sizes(tensor, out, "size") if name == "shape" else out
        inputs = [tensor]
        before = self._before(inputs)
        out = func(tensor)
        if not isinstance(out, torch.Tensor) or out is tensor:
            return out
        if id(out) in self.values or id(out) in self.tensor_names:
            return out
        node = self.make("call_function", getattr, (self.node_of(tensor), name), {})
        self._finish(node, inputs, before, out)
        return out

    def _check_numpy(self, array: Any) -> None:
        if id(array) not in self.values and getattr(array, "size", 1) > 0:
            error = FromNumpy(
                f"a numpy array of shape {getattr(array, 'shape', ())} becomes a tensor while the model runs; "
                f"what numpy computed is not in the graph ({self.here()})"
            )
            error.function = self.makers.get(id(array)) or enclosing_function()
            raise error

    def _check_inside(self, args: Any, kwargs: Any) -> None:
        frame = self.frames[-1]
        for tensor in tensors_in((args, kwargs)):
            key = id(tensor)
            if key in frame.tensors:
                continue
            name = self.tensor_names.get(key)
            if name is not None and frame.borrowed is not None:
                frame.borrowed[name] = tensor
            elif name is not None:
                inside = frame.prefix is not None and (name.startswith(f"{frame.prefix}.") or self._tied(tensor, frame))
                if not inside and tensor.requires_grad and frame.prefix != "":
                    raise NotRecordable(
                        f"parameter {name!r} is used inside {self.here()}, which is kept whole and does not own it"
                    )
            elif key in self.values and self.facts[self.values[key]].varies:
                raise NotRecordable(
                    f"{self.here()} uses a tensor of shape {tuple(tensor.shape)} that is not among its arguments; "
                    "it is kept whole, so the tensor would not be updated"
                )

    def _tied(self, tensor: torch.Tensor, frame: _Frame) -> bool:
        module = self.root.get_submodule(frame.prefix) if frame.prefix else self.root
        return any(tensor is own for own in module.parameters()) or any(tensor is own for own in module.buffers())

    def _follow_training(self, func: Any, name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        path, module = self.stack[-1]
        flag = f"{path}.training" if path else "training"
        position = ops.training_position(func)
        if position is not None:
            given = kwargs.get("training", args[position] if len(args) > position else None)
            without = name == "batch_norm" and kwargs.get("running_mean", args[1] if len(args) > 1 else None) is None
            if given is None or without:  # without running statistics, the flag is no matter of modes
                return args, kwargs
            if isinstance(given, bool) and given == module.training:
                if "training" in kwargs:
                    kwargs = {**kwargs, "training": self.read_attribute(flag)}
                else:
                    args = (*args[:position], self.read_attribute(flag), *args[position + 1 :])
        elif name == "scaled_dot_product_attention" and module.training:
            rate = kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0)
            if isinstance(rate, float) and rate > 0:
                node = self.number_node(intrinsics.dropout_rate, (rate, self.read_attribute(flag)), rate)
                if "dropout_p" in kwargs:
                    kwargs = {**kwargs, "dropout_p": node}
                else:
                    args = (*args[:4], node, *args[5:])
        return args, kwargs

    def _is_dynamic(self, args: Any) -> bool:
        return any(self.facts[self.node_of(tensor)].dynamic for tensor in tensors_in(args))

    def _shape_from_data(self, name: str, args: Any, kwargs: Any) -> bool:
        if name == "repeat_interleave":
            return any(isinstance(arg, torch.Tensor) for arg in (*args[1:2], kwargs.get("repeats"))) and (
                "output_size" not in kwargs
            )
        if name in ops.DATA_SHAPED or (name == "where" and len(args) + len(kwargs) == 1):
            return True
        return name == "__getitem__" and any(t.dtype in (torch.bool, torch.uint8) for t in tensors_in(args[1:]))
