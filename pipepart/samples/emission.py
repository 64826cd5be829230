"""Forms written into a graph: sums instead of means, divided by numbers of the whole batch, which become inputs."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from math import prod
from typing import Any

import torch
import torch.fx as fx

from pipepart.recording.op import OpMeta, has_op, op_of, set_op
from pipepart.samples.follow import name_of
from pipepart.samples.forms import Form, Keep, Op, Ratio, Scaled, Share, Sum, Whole
from pipepart.samples.quantities import SAMPLES, Quantity, Swap

__all__ = ["BATCHES", "Emission", "NumberInput", "Scope", "per_row", "tensor_of"]

BATCHES = "batches"
"""The key of the number of batches in a window."""


class Scope(Enum):
    """The batches from which a number is taken."""

    OWN = "own"
    """The batch of this replica."""
    ALL = "all"
    """The batches of all replicas in one step."""
    WINDOW = "window"
    """All batches of a window, of all replicas."""
    EACH = "each"
    """The batch of this replica as one of a window whose batches have equal weight."""


@dataclass(frozen=True)
class NumberInput:
    """A number of the batch that is an input of the graph."""

    scope: Scope
    key: str
    """`SAMPLES`, `BATCHES` or the name of a quantity."""


def per_row(value: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return a sum over all elements of some rows, divided by the elements of one row."""
    return value / max(1, prod(rows.shape[1:]))


def tensor_of(shape: tuple[int, ...], *elements: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the tensor with these elements."""
    return torch.tensor(elements, dtype=dtype, device=device).reshape(shape)


class Emission:
    """Writes forms beside the ops that they replace."""

    def __init__(self, graph: fx.Graph, replicas: int, device: torch.device) -> None:
        self._graph, self._replicas, self._device = graph, replicas, device
        self._made: dict[tuple[Any, ...], fx.Node] = {}
        self._numerators: dict[fx.Node, fx.Node] = {}
        self._numbers: dict[NumberInput, fx.Node] = {}
        self.origins: dict[str, str] = {}
        """For each op that was added, the op that it stands for."""

    @property
    def inputs(self) -> dict[str, NumberInput]:
        """The inputs that were added, by name."""
        return {node.name: number for number, node in self._numbers.items()}

    def write(self, form: Form, scope: Scope, divided: bool = False) -> fx.Node:
        """Write a node whose values for micro-batches add up to the value of the form for the whole batch.

        With `ALL`, the mean over replicas of these sums is the value for the batches of all replicas. With `WINDOW`, the
        sum of these means over the batches of a window is the value for all of them; only sums that no number of the batch
        divides (`divided` is False) are averaged over the batches, as Lightning does.
        """
        key = (form.node, scope, divided)
        if key not in self._made:
            self._made[key] = self._write(form, scope, divided)
        return self._made[key]

    def _write(self, form: Form, scope: Scope, divided: bool) -> fx.Node:
        node: fx.Node = form.node
        if isinstance(form, Whole):
            value = self._product(node, self.number(form.quantity, scope), self._share(Scope.OWN))
            return value if op_of(node).is_number else self._full(node, value)
        if isinstance(form, Sum):
            if scope is Scope.WINDOW and not divided:
                return self._call(node, torch.mul, (node, self._input(Scope.WINDOW, BATCHES, "each")), after=True)
            return self._times_replicas(node, node, scope)
        if isinstance(form, Share):
            return self._call(node, torch.mul, (node, self._share(scope)), after=True)
        if isinstance(form, Ratio):
            ratio = self._call(node, torch.div, (self._numerator(form), self.number(form.quantity, scope)))
            return self._times_replicas(node, ratio, scope)
        if isinstance(form, Scaled):
            inner = self._typed(self._argument(form.term, node, scope, divided=True), node)
            op = torch.mul if form.power == 1 else torch.div
            return self._call(node, op, (inner, self.number(form.quantity, scope)))
        assert isinstance(form, Op), "a value that does not depend on the batch is written for its user"
        return self._clone(form, scope, divided)

    def _clone(self, form: Op, scope: Scope, divided: bool) -> fx.Node:
        """Write the same op, not in place, on other arguments."""
        node = form.node
        new = {
            arg: self._argument(inner, node, scope, divided)
            for arg, inner in form.arguments.items()
            if isinstance(arg, fx.Node)
        }
        numbers = [arg for arg in form.arguments if not isinstance(arg, fx.Node)]
        args: Any = fx.map_arg(node.args, lambda source: new.get(source, source))
        kwargs: Any = fx.map_arg(dict(node.kwargs), lambda source: new.get(source, source))
        if any(arg != 0 for arg in numbers):
            shared = {arg: self._product(node, self._share(Scope.OWN), arg) for arg in numbers}
            args = tuple(shared.get(arg, arg) if _is_number(arg) else arg for arg in args)
            kwargs = {k: shared.get(v, v) if _is_number(v) and k != "alpha" else v for k, v in kwargs.items()}
        target: Any = node.target
        if node.op == "call_method":
            return self._call(node, _not_in_place(str(target)), args, kwargs, method=True)
        return self._call(node, getattr(operator, name_of(node), target) if _in_place(target) else target, args, kwargs)

    def _argument(self, form: Form, user: fx.Node, scope: Scope, divided: bool) -> fx.Node:
        if not isinstance(form, Keep):
            return self.write(form, scope, divided)
        share = Scope.EACH if scope is Scope.WINDOW else Scope.OWN
        key = (form.node, share, user)
        if key not in self._made:
            self._made[key] = self._call(user, torch.mul, (form.node, self._share(share)), like=form.node)
        return self._made[key]

    def _typed(self, value: fx.Node, like: fx.Node) -> fx.Node:
        wanted, has = op_of(like).dtype, op_of(value).dtype
        if wanted == has or op_of(value).is_number:
            return value
        return self._call(like, "to", (value, wanted), {}, method=True)

    def _numerator(self, form: Ratio) -> fx.Node:
        node = form.node
        if node not in self._numerators:
            with self._graph.inserting_before(node):
                made = form.numerator(self._graph)
            self._describe(made, node, [s for s in op_of(node).differentiates if s in made.all_input_nodes])
            for source in made.all_input_nodes:
                if not has_op(source):  # a buffer of a loss module
                    set_op(source, OpMeta())
            if form.per_row is not None:
                made = self._call(node, per_row, (made, form.per_row), differentiates=(made,))
            self._numerators[node] = made
        return self._numerators[node]

    def _times_replicas(self, node: fx.Node, value: fx.Node, scope: Scope) -> fx.Node:
        if scope is Scope.OWN or self._replicas == 1:
            return value
        return self._call(node, torch.mul, (value, self._replicas), after=value is node)

    # ---- numbers

    def announce(self, swap: Swap, scope: Scope) -> None:
        """Add the numbers of a later swap to the inputs."""
        for quantity in swap.elements:
            self.number(quantity, scope)

    def swap(self, swap: Swap, scope: Scope) -> None:
        """Let an op compute with a number of the whole batch instead of one of its arguments."""
        numbers = [self.number(quantity, scope) for quantity in swap.elements]
        number, source = numbers[0], op_of(swap.source)
        if source.shape:
            kind = {"dtype": source.dtype, "device": self._device}
            args = (tuple(source.shape), *numbers)
            number = self._call(swap.user, tensor_of, args, kind, like=swap.source, differentiates=())
        elif not source.is_number:  # types of results may depend on the type of a tensor
            number = self._full(swap.user, number, like=swap.source)
        swap.user.replace_input_with(swap.source, number)

    def _full(self, near: fx.Node, number: fx.Node, like: fx.Node | None = None) -> fx.Node:
        """Write a number as a tensor without dimensions, of the type of `like` (or of `near`)."""
        kind = {"dtype": op_of(like or near).dtype, "device": self._device}
        return self._call(near, torch.full, ((), number), kind, like=like, differentiates=())

    def _share(self, scope: Scope) -> fx.Node:
        return self._input(scope, SAMPLES, "share")

    def number(self, quantity: Quantity, scope: Scope) -> fx.Node:
        """Return the input with a number of the whole batch."""
        return self._input(scope, quantity.name, "whole")

    def _input(self, scope: Scope, key: str, name: str) -> fx.Node:
        number = NumberInput(scope, key)
        if number not in self._numbers:
            last = [node for node in self._graph.nodes if node.op == "placeholder"][-1]
            with self._graph.inserting_after(last):
                made = self._graph.placeholder(f"{name}_{scope.value}_{len(self._numbers)}")
            set_op(made, OpMeta(is_number=True))
            self._numbers[number] = made
        return self._numbers[number]

    def _product(self, near: fx.Node, first: fx.Node, second: Any) -> fx.Node:
        """Write a product of plain numbers."""
        with self._graph.inserting_before(near):
            made = self._graph.call_function(operator.mul, (first, second))
        set_op(made, op_of(near).beside(is_number=True, replicable=True, computes=False))
        self.origins[made.name] = near.name
        return made

    # ---- nodes

    def _call(
        self,
        near: fx.Node,
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        *,
        method: bool = False,
        after: bool = False,
        like: fx.Node | None = None,
        differentiates: Sequence[fx.Node] | None = None,
    ) -> fx.Node:
        """Write an op before `near`, which may be in place; with `after`, write it after `near`, to use the value of `near`."""
        with self._graph.inserting_after(near) if after else self._graph.inserting_before(near):
            make = self._graph.call_method if method else self._graph.call_function
            made: fx.Node = make(target, args, kwargs or {})
        through = made.all_input_nodes if differentiates is None else differentiates
        self._describe(made, near, [source for source in through if op_of(source).requires_grad], like)
        return made

    def _describe(self, made: fx.Node, near: fx.Node, through: Sequence[fx.Node], like: fx.Node | None = None) -> None:
        beside = op_of(near)
        form = op_of(like) if like is not None and like.op != "get_attr" else beside
        requires_grad = bool(through) and beside.requires_grad
        op = beside.beside(
            shape=form.shape,
            dtype=form.dtype,
            output_bytes=form.output_bytes,
            requires_grad=requires_grad,
            grad_mode=beside.grad_mode,
            autocast=beside.autocast,
            rows=beside.rows,
            differentiates=frozenset(through if requires_grad else ()),
        )
        set_op(made, op)
        self.origins[made.name] = near.name

    def finish(self, outputs: Sequence[Any], forms: Sequence[Form]) -> None:
        """Give the graph its new outputs, and drop the ops that nothing uses any more."""
        output: fx.Node = next(reversed(self._graph.nodes))
        output.args = (tuple(outputs),)
        candidates = {form.node for form in forms if isinstance(form.node, fx.Node)}
        self._drop(candidates)
        for form in dict.fromkeys(forms):
            if isinstance(form, Ratio) and form.node in self._numerators and form.node.users:
                # Another op needs the value for the micro-batch: it is computed from the numerator.
                made = self._call(form.node, torch.div, (self._numerators[form.node], form.quantity.node))
                form.node.replace_all_uses_with(made)
        self._drop(candidates)
        self._graph.lint()

    def _drop(self, candidates: set[fx.Node]) -> None:
        """Erase the candidates that nothing uses, unless they change state or memory that outlives the graph."""
        persistent: set[Any] = set()
        for node in self._graph.nodes:
            if node.op in ("get_attr", "placeholder"):
                persistent |= set(op_of(node).writes)
        for node in reversed(list(self._graph.nodes)):
            if node not in candidates or node.users or node.op in ("get_attr", "placeholder"):
                continue
            if not persistent & set(op_of(node).mutates) and not op_of(node).stateful:
                self._graph.erase_node(node)
                candidates.discard(node)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _in_place(target: Any) -> bool:
    return getattr(target, "__module__", "") == "_operator" and str(target.__name__).startswith("i")


def _not_in_place(name: str) -> str:
    if name.startswith("__i") and name.endswith("__"):
        return f"__{name[3:]}"
    return name[:-1] if name.endswith("_") and not name.startswith("_") else name
