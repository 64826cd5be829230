"""Run a model eagerly and write down every torch-level call as a node of an fx graph."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
import torch.nn as nn
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode

from pipepart.capture import intrinsics, ops, symbols
from pipepart.capture.arguments import has_tensor, tensors_in, unwrap
from pipepart.capture.facts import Fact, autocast_state, reached, storage_of, user_line, version_of
from pipepart.capture.failures import DataDependent, NotRecordable
from pipepart.capture.naming import name_of, nameable
from pipepart.capture.number_recorder import NumberRecorder

__all__ = ["RecordMode", "Recorder"]


class RecordMode(TorchFunctionMode):
    """Sends every torch-level call to the recorder."""

    def __init__(self, recorder: Recorder):
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.recorder.torch_call(func, args, kwargs or {})


@dataclass
class _Frame:
    """A module or function that is run whole: what it may touch."""

    tensors: set[int]
    prefix: str | None


def _unseen(method: Callable[..., Any]) -> Callable[..., Any]:
    """Our own bookkeeping touches tensors too: it must not be recorded."""

    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return method(*args, **kwargs)

    return run


class Recorder(NumberRecorder):
    """One recorded run: a graph under construction, and which tensor belongs to which node.

    `whole` names modules to keep as one op; `guards` allows to specialise on data (with a check in the graph).
    """

    def __init__(self, root: nn.Module, names: Any, whole: frozenset[str], guards: bool, fake: bool = False):
        self.root, self.whole, self.guards, self.fake = root, whole, guards, fake
        self.graph = fx.Graph()
        self.facts: dict[fx.Node, Fact] = {}
        self.values: dict[int, fx.Node] = {}
        self.kept: list[Any] = []
        self.module_names: dict[int, str] = names.modules
        self.tensor_names: dict[int, str] = names.tensors
        self.stack: list[tuple[str, nn.Module]] = [("", root)]
        self.frames: list[_Frame] = []
        self.attributes: dict[str, fx.Node] = {}
        self.constants: dict[str, Any] = {}
        self.constant_names: dict[int, str] = {}
        self.recording = True
        self.failed_in: list[str] | None = None
        self.outer_autocast = autocast_state()
        self.notes: list[str] = []
        self.mutations: dict[Any, fx.Node] = {}  # the last op that changed a storage in place
        self.current: dict[int, fx.Node | None] = {}  # up to which mutation the node of a tensor stands for it

    def release(self) -> None:
        """Let go of all tensors: the run is over, and only what was written down is needed."""
        self.kept.clear()
        self.values.clear()
        for fact in self.facts.values():
            fact.tensor = None

    # ---------------------------------------------------------------- nodes

    def make(
        self, op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str | None = None
    ) -> fx.Node:
        """A new node at the end of the graph, with what is known of where it was made."""
        if op == "call_function" and not isinstance(target, str):
            target = nameable(target)
        node = self.graph.create_node(op, target, args, kwargs, name)
        path, module = self.stack[-1]
        autocast = autocast_state()
        self.facts[node] = Fact(
            path,
            type(module).__name__,
            user_line(),
            grad_mode=torch.is_grad_enabled(),
            autocast=autocast if autocast != self.outer_autocast else (),
        )
        if autocast != self.outer_autocast and not autocast:
            self.facts[node].autocast = ("off",)
        return node

    def read_attribute(self, name: str) -> fx.Node:
        """The node that reads a parameter, buffer, constant or flag of the root by its full name."""
        if name not in self.attributes:
            node = self.graph.create_node("get_attr", name, (), {}, name.replace(".", "_"))
            self.facts[node] = Fact(self.stack[-1][0], type(self.stack[-1][1]).__name__)
            self.attributes[name] = node
        return self.attributes[name]

    def constant(self, value: Any) -> fx.Node:
        """The node that reads an object which belongs to no module."""
        name = self.constant_names.get(id(value))
        if name is None:
            name = f"_constant{len(self.constants)}"
            self.constants[name] = value
            self.constant_names[id(value)] = name
            self.kept.append(value)
        return self.read_attribute(name)

    @_unseen
    def bind(self, tensor: torch.Tensor, node: fx.Node) -> None:
        """From now on `tensor` is the value of `node`."""
        self.values[id(tensor)] = node
        self.kept.append(tensor)
        fact = self.facts[node]
        fact.tensor = tensor
        fact.shape, fact.dtype, fact.requires_grad = tuple(tensor.shape), tensor.dtype, tensor.requires_grad
        fact.nbytes = tensor.numel() * tensor.element_size()
        storage = storage_of(tensor)
        fact.writes.add(storage)
        self.current[id(tensor)] = self.mutations.get(storage)

    def _after_mutation(self, tensor: torch.Tensor, node: fx.Node) -> fx.Node:
        """The node of a tensor whose memory an op has changed since: it depends on that op."""
        storage = storage_of(tensor)
        mutation = self.mutations.get(storage)
        if mutation is None or self.current.get(id(tensor)) is mutation or mutation is node:
            return node
        made = self.make("call_function", intrinsics.changed, (node, mutation), {})
        fact = self.facts[made]
        fact.varies = self.facts[node].varies or self.facts[mutation].varies
        fact.dynamic = self.facts[node].dynamic
        fact.reads = {storage}
        fact.differentiates = {node, mutation}
        self.bind(tensor, made)
        return made

    @_unseen
    def node_of(self, tensor: torch.Tensor) -> fx.Node:
        """The node whose value `tensor` is; parameters, buffers and constants are read where they are first used."""
        node = self.values.get(id(tensor))
        if node is not None:
            return self._after_mutation(tensor, node)
        name = self.tensor_names.get(id(tensor))
        if name is not None:
            node = self.read_attribute(name)
            self.facts[node].varies = True
        else:
            if tensor.grad_fn is not None or (tensor.requires_grad and isinstance(tensor, nn.Parameter)):
                what = (
                    "a parameter that the module does not register"
                    if tensor.grad_fn is None
                    else (f"a result of {tensor.grad_fn.name()} that was computed outside the recorded ops")
                )
                raise NotRecordable(
                    f"a tensor of shape {tuple(tensor.shape)} is {what} "
                    f"(in module {self.stack[-1][0]!r} at {user_line()})"
                )
            if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
                raise NotRecordable(
                    f"a tensor inside torch.func (vmap, grad) in module {self.stack[-1][0]!r} at {user_line()}"
                )
            node = self.constant(tensor)
        before = self.mutations.get(storage_of(tensor))
        self.bind(tensor, node)
        if before is not None:
            self.current[id(tensor)] = None
            return self._after_mutation(tensor, node)
        return node

    # ---------------------------------------------------------------- arguments

    def argument(self, value: Any) -> Any:
        """A Python argument as fx sees it: nodes for tensors and tracked numbers, constants for the rest."""
        if isinstance(value, torch.Tensor):
            return self.node_of(value)
        if symbols.is_tracked(value):
            return value.node()
        if isinstance(value, PackedSequence):
            parts = tuple(self.argument(part) for part in value)
            node = self.make("call_function", PackedSequence, parts, {})
            self.facts[node].varies = True
            self.facts[node].differentiates = {part for part in node.all_input_nodes if self.facts[part].requires_grad}
            return node
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*(self.argument(item) for item in value))
        if isinstance(value, tuple):
            return tuple(self.argument(item) for item in value)
        if type(value) is list:
            return [self.argument(item) for item in value]
        if type(value) is dict and all(isinstance(key, str) for key in value):
            return {key: self.argument(item) for key, item in value.items()}
        if isinstance(value, slice):
            return slice(self.argument(value.start), self.argument(value.stop), self.argument(value.step))
        if type(value) is range:
            return [self.argument(item) for item in value]
        if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
            return value.item()
        if value is None or value is Ellipsis or isinstance(value, _PLAIN):
            return value
        if isinstance(value, nn.Module) and id(value) in self.module_names:
            return self.read_attribute(self.module_names[id(value)])
        if id(value) in self.values:
            return self.values[id(value)]
        return self.constant(value)

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
        if name == "__iter__":
            return iter(self.torch_call(torch.unbind, (args[0], 0), {}))
        if name == "__get__":
            return self._property(func, args)
        if name == "__set__" and getattr(func.__self__, "__name__", "") not in ("requires_grad", "grad"):
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
        out = func(*plain_args, **plain_kwargs)
        if not has_tensor(out) and out is not None:
            return self._number(name, args, kwargs, out)
        if name in ("tensor", "as_tensor", "from_numpy") and args and type(args[0]).__module__ == "numpy":
            self._check_numpy(args[0])
        node_args, node_kwargs = self.argument(tuple(args)), self.argument(dict(kwargs))
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
    ) -> Any:
        """Record a call without looking inside. What it touches must be among its arguments or below `prefix`."""
        inputs = tensors_in((args, kwargs))
        node_args, node_kwargs = self.argument(tuple(args)), self.argument(dict(kwargs))
        state = own or []
        self.frames.append(_Frame({id(t) for t in inputs}, prefix))
        try:
            before = self._before(inputs)
            versions = [version_of(t) for t in state]
            out = call(*unwrap(tuple(args)), **unwrap(dict(kwargs)))
            changed = any(version_of(t) != v for t, v in zip(state, versions))
        finally:
            self.frames.pop()
        node = self.make(op, target, tuple(lead) + node_args, node_kwargs)
        self.facts[node].stateful, self.facts[node].random = changed or stateful, random
        self._finish(node, inputs, before, out)
        return out

    # ---------------------------------------------------------------- parts of a call

    def _rng(self) -> bytes:
        """The state of torch's random numbers; fake tensors draw none."""
        return b"" if self.fake else torch.get_rng_state().numpy().tobytes()

    @_unseen
    def _before(self, inputs: list[torch.Tensor]) -> tuple[Any, ...]:
        edges = {}
        for tensor in inputs:
            if tensor.requires_grad and not tensor.is_inference():
                edge = torch.autograd.graph.get_gradient_edge(tensor)
                edges[(edge.node, edge.output_nr)] = self.node_of(tensor)
        nodes = [self.node_of(tensor) for tensor in inputs]
        return [version_of(t) for t in inputs], edges, nodes, self._rng()

    @_unseen
    def _finish(self, node: fx.Node, inputs: list[torch.Tensor], before: tuple[Any, ...], out: Any) -> None:
        versions, edges, nodes, rng = before
        fact = self.facts[node]
        for tensor, version in zip(inputs, versions):
            storage = storage_of(tensor)
            fact.reads.add(storage)
            if version_of(tensor) != version:
                fact.mutates.add(storage)
        fact.random = fact.random or rng != self._rng()
        fact.varies = (
            fact.random
            or node.op == "call_module"
            or any(self.facts[n].varies or self.facts[n].number is not None for n in node.all_input_nodes)
        )
        known = [self.facts[n] for n in node.all_input_nodes]
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
        for source in node.all_input_nodes:  # objects made of tensors
            if self.facts[source].tensor is None and self.facts[source].differentiates & fact.differentiates:
                fact.differentiates.add(source)
        fact.requires_grad = any(o.requires_grad for o in outs)

    def _bind_result(self, out: Any, node: fx.Node) -> None:
        if isinstance(out, torch.Tensor):
            self.bind(out, node)
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
            raise NotRecordable(
                f"a numpy array of shape {getattr(array, 'shape', ())} becomes a tensor while the model runs; "
                f"what numpy computed is not in the graph ({self.here()})"
            )

    def _check_inside(self, args: Any, kwargs: Any) -> None:
        frame = self.frames[-1]
        for tensor in tensors_in((args, kwargs)):
            key = id(tensor)
            if key in frame.tensors:
                continue
            name = self.tensor_names.get(key)
            if name is not None:
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
            if given is None:
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


_PLAIN = (bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
