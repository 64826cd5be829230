"""Run a model eagerly and write down every torch-level call as a node of an fx graph."""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx
import torch.nn as nn
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode

from pipepart.capture import intrinsics, ops, symbols
from pipepart.errors import CaptureError

__all__ = ["DataDependent", "Fact", "NotRecordable", "Recorder"]


class NotRecordable(CaptureError):
    """Something that cannot be written down as ops; keeping the module around it whole may help."""


class DataDependent(NotRecordable):
    """Python control flow (or a Python number) that depends on the contents of a tensor."""


@dataclass
class Fact:
    """What was seen when a node was recorded."""

    module: str = ""
    module_class: str = ""
    source: str = ""
    tensor: torch.Tensor | None = None
    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None
    nbytes: int = 0
    requires_grad: bool = False
    number: Any = None
    varies: bool = False
    random: bool = False
    chance: bool = False
    """Comes from random numbers alone: no input and no parameter has a part in it."""
    dynamic: bool = False
    stateful: bool = False
    from_data: bool = False
    grad_mode: bool = True
    autocast: tuple[Any, ...] = ()
    reads: set[Any] = field(default_factory=set)
    writes: set[Any] = field(default_factory=set)
    mutates: set[Any] = field(default_factory=set)
    differentiates: set[fx.Node] = field(default_factory=set)
    rows: tuple[tuple[int, ...], ...] = ()


def storage_of(tensor: torch.Tensor) -> Any:
    """A key that tensors share if they share memory."""
    try:
        return tensor.untyped_storage()._cdata
    except (RuntimeError, NotImplementedError):
        return ("object", id(tensor))


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was changed in place."""
    return 0 if tensor.is_inference() else tensor._version


def autocast_state() -> tuple[Any, ...]:
    """The autocast settings that ops see now."""
    return tuple(
        (device, torch.get_autocast_dtype(device)) for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)
    )


_TORCH = str(torch.__path__[0])
_HERE = __file__.rpartition("/")[0]


def user_line() -> str:
    """File and line of the innermost frame that belongs neither to torch nor to us."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((_TORCH, _HERE, "<")):
            return f"{name.rpartition('/')[2]}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


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


class Recorder:
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

    # ---------------------------------------------------------------- nodes

    def make(
        self, op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str | None = None
    ) -> fx.Node:
        """A new node at the end of the graph, with what is known of where it was made."""
        if op == "call_function" and not isinstance(target, str):
            target = _nameable(target)
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

    def number_node(self, target: Callable[..., Any], args: tuple[Any, ...], value: Any) -> fx.Node:
        """A node for a Python number computed from other numbers."""
        node = self.make("call_function", target, args, {})
        fact = self.facts[node]
        fact.number, fact.varies = value, True
        sources = [self.facts[arg] for arg in args if isinstance(arg, fx.Node)]
        fact.chance = any(source.chance for source in sources) and all(s.chance or not s.varies for s in sources)
        fact.from_data = any(self.facts[arg].from_data for arg in args if isinstance(arg, fx.Node))
        return node

    def compared(self, op: Callable[..., Any], a: Any, b: Any, result: bool, from_data: bool) -> None:
        """Python looked at a tracked number: the graph holds only while it would see the same."""
        if self.frames or not self.recording:
            return
        where = f"{op.__name__} in module {self.stack[-1][0]!r} at {user_line()}"
        if from_data and not self.guards:
            raise DataDependent(f"a Python decision on a number that was read from a tensor ({where})")
        left, right = (x.node() if symbols.is_tracked(x) else x for x in (a, b))
        seen = self.number_node(op, (left, right), result)
        if self.facts[seen].chance:
            if _certain(seen):
                return
            raise NotRecordable(f"Python decides by a random number ({where}); e.g. LayerDrop: set its rate to 0")
        guard = self.make("call_function", intrinsics.check, (seen, result, where), {})
        self.facts[guard].from_data = self.facts[seen].from_data

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
        name = _name_of(func)
        if name in ops.NOT_OPS or name == "_set_grad_enabled":
            return func(*plain_args, **plain_kwargs)
        if name == "__iter__":
            return iter(self.torch_call(torch.unbind, (args[0], 0), {}))
        if name == "__get__":
            return self._property(func, args)
        if name == "__set__" and getattr(func.__self__, "__name__", "") not in ("requires_grad", "grad"):
            raise NotRecordable(f"assignment to Tensor.{func.__self__.__name__} in {self._here()}")
        if func is torch.autograd.grad or func is torch.autograd.backward or name == "backward":
            raise NotRecordable(f"{name} is called while the model runs, in {self._here()}")
        if name in ops.DATA_READS:
            return self._read_data(func, name, args, kwargs, plain_args, plain_kwargs)
        if name == "register_hook":
            self.make("call_method", name, (self.node_of(args[0]), self.constant(args[1])), {})
            return func(*plain_args, **plain_kwargs)
        if name in ("unbind", "split", "chunk", "tensor_split") and self._is_dynamic(args):
            raise DataDependent(f"{name} of a tensor whose shape depends on data, in {self._here()}")
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

    def _sizes(self, tensor: torch.Tensor, sizes: Any, method: str) -> Any:
        wrapped = [self._size(tensor, dim, size, method) for dim, size in enumerate(sizes)]
        return torch.Size(wrapped) if method == "size" else tuple(wrapped)

    def _size(self, tensor: torch.Tensor, dim: int, size: int, method: str = "size") -> Any:
        node = self.node_of(tensor)
        if node.op == "get_attr" or not self.facts[node].varies:
            return size
        return symbols.track(size, self, lambda: self._size_node(node, method, (dim,), size), self.facts[node].dynamic)

    def _size_node(self, node: fx.Node, method: str, args: tuple[Any, ...], value: int) -> fx.Node:
        made = self.make("call_method", method, (node, *args), {})
        fact = self.facts[made]
        fact.number, fact.varies, fact.from_data = value, True, self.facts[node].dynamic
        return made

    def length(self, tensor: torch.Tensor, size: int) -> Any:
        """``len(tensor)`` as a tracked number."""
        return self._size(tensor, 0, size) if self.recording and not self.frames else size

    def _number(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
        tensor = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if tensor is None:
            return out
        if name in ("size", "stride"):
            dim = args[1] if len(args) > 1 else kwargs.get("dim")
            if dim is None:
                return self._sizes(tensor, out, name)
            return self._size(tensor, int(dim), out, name)
        if name in ("numel", "nelement"):
            node = self.node_of(tensor)
            if node.op == "get_attr" or not self.facts[node].varies:
                return out
            return symbols.track(out, self, lambda: self._size_node(node, "numel", (), out), self.facts[node].dynamic)
        return out

    def _read_data(self, func: Any, name: str, args: Any, kwargs: Any, plain_args: Any, plain_kwargs: Any) -> Any:
        inputs = tensors_in((args, kwargs))
        nodes = [self.node_of(tensor) for tensor in inputs]
        if not any(self.facts[node].varies for node in nodes):
            return func(*plain_args, **plain_kwargs)
        where = f"Tensor.{name} in {self._here()}"
        fake = any(hasattr(tensor, "fake_mode") for tensor in inputs)
        if name == "item" and not fake:
            out, node = func(*plain_args, **plain_kwargs), nodes[0]
            return (
                symbols.track(out, self, lambda: self._item_node(node, out), True)
                if type(out) is not bool
                else (self._specialise(node, out, where))
            )
        if len(nodes) == 1 and self.facts[nodes[0]].chance and _certain(nodes[0]):
            return _outcome(nodes[0]) if fake else func(*plain_args, **plain_kwargs)
        if not self.guards or fake:
            raise DataDependent(f"Python reads the contents of a tensor ({where})")
        out = func(*plain_args, **plain_kwargs)
        if name in ("numpy", "__array__"):
            raise DataDependent(f"a tensor is turned into a numpy array ({where})")
        if len(inputs) != 1:
            raise DataDependent(f"Python compares the contents of tensors ({where})")
        return self._specialise(nodes[0], out, where)

    def _item_node(self, node: fx.Node, value: Any) -> fx.Node:
        made = self.make("call_method", "item", (node,), {})
        fact = self.facts[made]
        fact.number, fact.varies, fact.from_data, fact.chance = value, True, True, self.facts[node].chance
        return made

    def _specialise(self, node: fx.Node, value: Any, where: str) -> Any:
        if not self.guards:
            raise DataDependent(f"Python reads the contents of a tensor ({where})")
        if self.facts[node].chance:
            if _certain(node):
                return value
            raise NotRecordable(f"Python decides by a random number ({where}); e.g. LayerDrop: set its rate to 0")
        guard = self.make("call_function", intrinsics.check, (node, value, where), {})
        self.facts[guard].from_data = True
        return value

    def _check_numpy(self, array: Any) -> None:
        if id(array) not in self.values and getattr(array, "size", 1) > 0:
            raise NotRecordable(
                f"a numpy array of shape {getattr(array, 'shape', ())} becomes a tensor while the model runs; "
                f"what numpy computed is not in the graph ({self._here()})"
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
                        f"parameter {name!r} is used inside {self._here()}, which is kept whole and does not own it"
                    )
            elif key in self.values and self.facts[self.values[key]].varies:
                raise NotRecordable(
                    f"{self._here()} uses a tensor of shape {tuple(tensor.shape)} that is not among its arguments; "
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

    def _here(self) -> str:
        return f"module {self.stack[-1][0]!r} ({type(self.stack[-1][1]).__name__}) at {user_line()}"


_PLAIN = (bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


def _certain(comparison: fx.Node) -> bool:
    """Whether a comparison of a uniform random number has one outcome only (a rate of 0 or 1)."""
    limits = [arg for arg in comparison.args if type(arg) in (int, float)]
    return len(limits) == 1 and (limits[0] <= 0 or limits[0] >= 1)


def _outcome(comparison: fx.Node) -> bool:
    """The outcome of a certain comparison, without drawing the number."""
    name = comparison.target if isinstance(comparison.target, str) else comparison.target.__name__
    values = [arg if type(arg) in (int, float) else 0.5 for arg in comparison.args]
    return bool(getattr(operator, name.strip("_"))(*values))


def _name_of(function: Any) -> str:
    try:
        return ops.DUNDERS.get(function) or getattr(function, "__name__", str(function))
    except TypeError:  # not hashable
        return str(getattr(function, "__name__", function))


def _nameable(function: Any) -> Any:
    """`function`, or a plain function around it if fx cannot write its name into code."""
    try:
        name = fx.node._get_qualified_name(function)
        if name.startswith("torch."):  # fx trusts that such a name can be looked up
            found: Any = torch
            for part in name.split(".")[1:]:
                found = getattr(found, part)
            if found is not function:
                raise AttributeError(name)
        return function
    except Exception:
        return intrinsics.opaque_function(function, getattr(function, "__qualname__", type(function).__name__))


def unwrap(value: Any) -> Any:
    """Arguments with the bare numbers in place of tracked ones."""
    if symbols.is_tracked(value):
        return symbols.plain(value)
    if isinstance(value, torch.Size):
        return torch.Size([symbols.plain(item) for item in value])
    if type(value) in (tuple, list):
        return type(value)(unwrap(item) for item in value)
    if type(value) is dict:
        return {key: unwrap(item) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(unwrap(value.start), unwrap(value.stop), unwrap(value.step))
    return value


def tensors_in(value: Any, found: list[torch.Tensor] | None = None) -> list[torch.Tensor]:
    """All tensors in nested arguments."""
    found = [] if found is None else found
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif isinstance(value, (tuple, list)):
        for item in value:
            tensors_in(item, found)
    elif isinstance(value, dict):
        for item in value.values():
            tensors_in(item, found)
    elif isinstance(value, slice):
        tensors_in((value.start, value.stop, value.step), found)
    return found


def has_tensor(value: Any) -> bool:
    """Whether a result holds tensors, also as attributes of an object."""
    if tensors_in(value):
        return True
    if type(value).__module__ == "numpy":
        return True
    return hasattr(value, "__dict__") and not isinstance(value, (type, nn.Module)) and bool(tensors_in(vars(value)))


def reached(outs: list[torch.Tensor], edges: dict[Any, fx.Node]) -> set[fx.Node]:
    """Which inputs get a gradient from these outputs, by walking autograd's graph back to them."""
    if not edges:
        return set()
    found: set[fx.Node] = set()
    seen = set()
    todo = []
    for out in outs:
        if out.requires_grad and not out.is_inference():
            edge = torch.autograd.graph.get_gradient_edge(out)
            todo.append((edge.node, edge.output_nr))
    while todo:
        key = todo.pop()
        if key in seen or key[0] is None:
            continue
        seen.add(key)
        if key in edges:
            found.add(edges[key])
            continue
        todo.extend(key[0].next_functions)
    return found
