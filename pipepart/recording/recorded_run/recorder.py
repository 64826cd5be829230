"""Recorder of one run: the model runs eagerly, and every torch-level call becomes a node of an fx graph."""

from __future__ import annotations

import operator
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.fx as fx
import torch.nn as nn
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode

from pipepart.errors import CaptureError
from pipepart.recording.model_state.places import Guards
from pipepart.recording.recorded_run import moments, ops, texts
from pipepart.recording.recorded_run.assigned_data import set_data
from pipepart.recording.recorded_run.contexts import outside_rng
from pipepart.recording.recorded_run.conversions import with_plain_dtype
from pipepart.recording.recorded_run.failures import DrawsOutside, FromNumpy, NotRecordable
from pipepart.recording.recorded_run.functions import enclosing_function
from pipepart.recording.recorded_run.graph_builder import Frame, GraphBuilder, unseen
from pipepart.recording.recorded_run.numbers import NumberRecorder
from pipepart.recording.recorded_run.symbols import fixed_sizes
from pipepart.recording.recorded_run.tensors import (
    gradient_edge,
    has_tensor,
    reached,
    storage_of,
    tensors_in,
    unwrap,
    version_of,
)
from pipepart.recording.recorded_run.training_flags import follow_training

__all__ = ["RecordMode", "Recorder"]


class RecordMode(TorchFunctionMode):
    """Sends every torch-level call to the recorder."""

    def __init__(self, recorder: Recorder):
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.recorder.torch_call(func, args, kwargs or {})


def _plain(tensors: list[torch.Tensor]) -> bool:
    """Return whether no tensor is of a class that overrides torch functions."""
    return all(type(tensor) in (torch.Tensor, nn.Parameter) for tensor in tensors)


_INSIDE = Frame(set(), "")


class Recorder:
    """Records the calls of one run: torch functions one by one, and calls that are kept whole.

    The `builder` makes the nodes, and `numbers` records Python numbers. `whole` names modules to keep as one op;
    `guards` allows Python to branch on data, with a check in the graph; with `fake`, tensors have no contents.
    """

    def __init__(self, root: nn.Module, names: Any, whole: frozenset[str], guards: bool, fake: bool = False):
        self.builder = GraphBuilder(root, names)
        self.numbers = NumberRecorder(self.builder, guards)
        self.graph, self.facts, self.constants = self.builder.graph, self.builder.facts, self.builder.constants
        self.values, self.mutations = self.builder.values, self.builder.mutations
        self.frames, self.tensor_names = self.builder.frames, self.builder.tensor_names
        self.whole, self.fake = whole, fake
        self.opened: frozenset[str] = frozenset()  # modules whose ops are recorded although they could be one op
        self.failed_in: list[str] | None = None  # paths of the modules that were running when the run failed
        self.watching = False  # whether each module is checked for draws of random numbers outside torch
        self.drawn: Any = None  # the state of those random numbers after the last call that was kept whole
        self.has_state = False  # whether numbers of the user's Python state are inputs of the graph
        self.guards_of_state = Guards()
        self.notes: list[str] = []
        self.updates: dict[
            str, tuple[tuple[str, ...], str]
        ] = {}  # buffers that modules kept whole change, and the line
        self.rng_state: torch.Tensor | None = None  # of torch, after the last op
        self.leaf_edges: dict[int, tuple[Any, int]] = {}
        self.makers: dict[int, Any] = {}  # the function that returned each numpy array, by identity of the array

    def note(self, text: str) -> None:
        """Add a note for the user, once."""
        if text not in self.notes:
            self.notes.append(text)

    def is_one_op(self, module: nn.Module, path: str) -> bool:
        """Return whether a call of a module is one op."""
        return path in self.whole or (path not in self.opened and ops.is_leaf(module))

    # ---------------------------------------------------------------- calls

    def torch_call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run and record one torch function or tensor method that the model calls.

        Calls that are not ops, that read data or that cannot be recorded are handled first; all other calls are ops.
        """
        kwargs = with_plain_dtype(kwargs)
        plain_args, plain_kwargs = unwrap(args), unwrap(kwargs)
        if not self.builder.recording:
            return func(*plain_args, **plain_kwargs)
        if self.frames:
            self._check_inside(args, kwargs)
            return func(*plain_args, **plain_kwargs)
        name = ops.name_of(func)
        if name in ops.NOT_OPS or name == "_set_grad_enabled":
            made = texts.mark(args[0], name, *plain_args[1:2]) if name in ops.TEXTS else None
            return func(*plain_args, **plain_kwargs) if made is None else made
        if self.has_state and name not in ops.ARITHMETIC:
            args, kwargs = fixed_sizes(name, args), fixed_sizes(name, kwargs)
        if name == "__iter__":
            return iter(self.torch_call(torch.unbind, (args[0], 0), {}))
        if moments.counting():
            self._check_acting(func, name, args)
        if name == "__get__":
            return False if moments.is_frozen(func, plain_args[0]) else self._property(func, args)
        if name == "__set__" and getattr(func.__self__, "__name__", "") not in ("requires_grad", "grad"):
            if func.__self__.__name__ == "data" and set_data(self, args[0], args[1]):
                return None
            hint = "; an update of parameters belongs between steps (on_train_batch_start, on_train_batch_end)"
            hint = hint if func.__self__.__name__ == "data" else ""
            raise NotRecordable(f"Tensor.{func.__self__.__name__} is assigned in {self.builder.here()}{hint}")
        if func is torch.autograd.grad or func is torch.autograd.backward or name == "backward":
            use = " (use torch.func.grad, which is recorded as one op)" if name == "grad" else ""
            raise NotRecordable(f"{name} is called while the model runs, in {self.builder.here()}{use}")
        if name in ops.DATA_READS:
            return self.numbers.read_data(func, name, args, kwargs, plain_args, plain_kwargs)
        if name == "register_hook":
            tensor, hook = self.builder.node_of(args[0]), self.builder.constant(args[1])
            self.builder.make("call_method", name, (tensor, hook), {})
            return func(*plain_args, **plain_kwargs)
        if name in ("unbind", "split", "chunk", "tensor_split") and self._is_dynamic(args):
            self.numbers.fix_pieces(name, args, kwargs)
        return self._op(func, name, args, kwargs, plain_args, plain_kwargs)

    def _check_acting(self, func: Any, name: str, args: tuple[Any, ...]) -> None:
        """Refuse calls that make no sense in a step that acts (manual optimization) and is only recorded."""
        at_root = len(self.builder.stack) == 1
        reason = moments.refused(func, name, args[0] if args else None, at_root)
        if reason:
            raise CaptureError(f"{self.builder.here()}: {reason}.")

    def _op(self, func: Any, name: str, args: Any, kwargs: Any, plain_args: Any, plain_kwargs: Any) -> Any:
        """Run and record one op, or a call that gives a number."""
        inputs = tensors_in((args, kwargs))
        before = self._before(inputs)
        self.frames.append(_INSIDE)  # calls inside the op (the autograd function of a custom op) are part of it
        try:
            out = func(*plain_args, **plain_kwargs)
        finally:
            self.frames.pop()
        if not has_tensor(out) and out is not None:
            return self.numbers.result(name, args, kwargs, out)
        if name in ("tensor", "as_tensor", "from_numpy") and args and type(args[0]).__module__ == "numpy":
            self._check_numpy(args[0])
        builder = self.builder
        builder.known = {id(tensor): node for tensor, node in zip(inputs, before[2])}
        node_args, node_kwargs = builder.argument(tuple(args)), builder.argument(dict(kwargs))
        builder.known = {}
        node_args, node_kwargs = follow_training(self, func, name, node_args, node_kwargs)
        if name in ops.OPERATORS and not node_kwargs and ops.tensor_method(func, name):
            node = builder.make("call_function", ops.OPERATORS[name], node_args, {})
        elif ops.tensor_method(func, name):
            node = builder.make("call_method", name, node_args, node_kwargs)
        else:
            node = builder.make("call_function", func, node_args, node_kwargs)
        fact = self.facts[node]
        fact.random = ops.is_random_name(name) and plain_kwargs.get("training") is not False
        fact.from_data = any(self.facts[n].from_data and self.facts[n].number is not None for n in node.all_input_nodes)
        fact.dynamic_shape = fact.from_data or ops.shape_from_data(name, args, kwargs)
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
        """Record a call as one op. The tensors that it uses must be among its arguments or below `prefix`.

        `closed` calls are known to use nothing else, so that the torch functions inside them are not watched. A call
        that `borrows` may use any parameters and buffers of the model; the op has them as its argument ``uses``.
        `lead` are arguments of the op before those of the call, and `own` are the buffers of the called module.
        """
        inputs = tensors_in((args, kwargs))
        node_args, node_kwargs = self.builder.argument(tuple(args)), self.builder.argument(dict(kwargs))
        state = own or []
        if self._draws_outside():
            where = self.builder.here()
            raise DrawsOutside(f"random numbers outside torch (Python's random or numpy) are drawn in {where}")
        frame = Frame({id(t) for t in inputs}, prefix, {} if borrows else None)
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
            node_kwargs = {**node_kwargs, "uses": tuple(map(self.builder.read_attribute, frame.borrowed))}
            more = list(frame.borrowed.values())
            versions, edges, nodes = self._before(more)
            inputs, before = inputs + more, (before[0] + versions, {**before[1], **edges}, before[2] + nodes)
        node = self.builder.make(op, target, tuple(lead) + node_args, node_kwargs)
        self.facts[node].stateful, self.facts[node].random = changed or stateful, random
        self._finish(node, inputs, before, out)
        return out

    # ---------------------------------------------------------------- parts of a call

    def _draws_outside(self) -> bool:
        """Return whether random numbers outside torch were drawn since the last call of this method, if modules are watched."""
        before, self.drawn = self.drawn, outside_rng() if self.watching else self.drawn
        return bool(before != self.drawn)

    def _drew(self) -> bool:
        """Return whether random numbers of torch were drawn since the last op; fake tensors draw none."""
        if self.fake:
            return False
        before, self.rng_state = self.rng_state, torch.default_generator.get_state()
        return before is not None and not torch.equal(before, self.rng_state)

    @unseen
    def _before(self, inputs: list[torch.Tensor]) -> tuple[Any, ...]:
        """Return versions, edges of autograd's graph and nodes of the inputs of a call, before it runs."""
        edges = {}
        nodes = [self.builder.find(tensor) for tensor in inputs]
        for tensor, node in zip(inputs, nodes):
            if tensor.requires_grad and not tensor.is_inference():
                edges[self._edge(tensor)] = node
                base = tensor._base  # after a change in place, the history of a view is that of its base
                if base is not None and base.requires_grad:
                    edges.setdefault(self._edge(base), node)
        if self.rng_state is None:
            self._drew()
        return [version_of(t) for t in inputs], edges, nodes

    def _edge(self, tensor: torch.Tensor) -> tuple[Any, int]:
        """Return the edge of autograd's graph for a tensor; that of a parameter never changes."""
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
        """Complete the notes on a call that has run, and bind its results."""
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
        if not fact.mutates and any(self.facts[n].dynamic_shape for n in nodes):
            fact.dynamic_shape = True
        if moments.counting() and fact.mutates:
            self._check_parameters(fact.mutates)
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

    def _check_parameters(self, changed: set[Any]) -> None:
        """Refuse a step that acts and changes parameters in place: its segments would run with the changed ones."""
        for name, parameter in self.builder.root.named_parameters():
            if storage_of(parameter) in changed:
                raise CaptureError(
                    f"{self.builder.here()}: the step changes the parameter {name} in place. Do so in a hook "
                    "(on_train_batch_end), which runs once per step."
                )

    def _bind_result(self, out: Any, node: fx.Node) -> None:
        if isinstance(out, torch.Tensor):
            self.builder.bind(out, node)
            if out.dim() == 0:
                self.facts[node].dynamic_shape = False
            return
        if type(out).__module__ == "numpy" or isinstance(out, PackedSequence):
            self.values[id(out)] = node
            self.builder.kept.append(out)
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
            whole = self.facts[node]
            if isinstance(item, torch.Tensor) and id(item) in self.values and storage_of(item) in whole.reads:
                continue  # an argument that is returned unchanged
            if has_tensor(item):
                part = self.builder.make("call_function", target, (node, key), {})
                fact = self.facts[part]
                fact.varies, fact.dynamic_shape, fact.grad_mode = whole.varies, whole.dynamic_shape, whole.grad_mode
                fact.differentiates = {node}
                self._bind_result(item, part)

    def _property(self, func: Any, args: tuple[Any, ...]) -> Any:
        name = getattr(func.__self__, "__name__", "?")
        tensor = args[0]
        if name in ("shape", "ndim", "dtype", "device", "requires_grad", "is_leaf", "grad_fn", "layout", "_version"):
            out = func(tensor)
            return self.numbers.sizes(tensor, out) if name == "shape" else out
        inputs = [tensor]
        before = self._before(inputs)
        out = func(tensor)
        if not isinstance(out, torch.Tensor) or out is tensor:
            return out
        if id(out) in self.values or id(out) in self.tensor_names:
            return out
        node = self.builder.make("call_function", getattr, (self.builder.node_of(tensor), name), {})
        self._finish(node, inputs, before, out)
        return out

    def _check_numpy(self, array: Any) -> None:
        if id(array) not in self.values and getattr(array, "size", 1) > 0:
            error = FromNumpy(
                f"a numpy array of shape {getattr(array, 'shape', ())} becomes a tensor while the model runs; "
                f"the computation of numpy is not in the graph ({self.builder.here()})"
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
                        f"parameter {name!r} is used inside {self.builder.here()}, which is kept whole and does not "
                        "own it"
                    )
            elif key in self.values and self.facts[self.values[key]].varies:
                raise NotRecordable(
                    f"{self.builder.here()} uses a tensor of shape {tuple(tensor.shape)} that is not among its arguments; "
                    "it is kept whole, so the tensor would not be updated"
                )

    def _tied(self, tensor: torch.Tensor, frame: Frame) -> bool:
        root = self.builder.root
        module = root.get_submodule(frame.prefix) if frame.prefix else root
        return any(tensor is own for own in module.parameters()) or any(tensor is own for own in module.buffers())

    def _is_dynamic(self, args: Any) -> bool:
        return any(self.facts[self.builder.node_of(tensor)].dynamic_shape for tensor in tensors_in(args))
