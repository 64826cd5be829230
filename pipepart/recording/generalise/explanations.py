"""Constants that follow the size of the batch: found by comparing runs, and turned back into computations.

The source of a number such as ``float(len(x))`` or ``2.0 * x.shape[0]`` cannot be recorded. Two runs at different sizes
show that the constant changes. It is replaced by a simple formula that holds for both, and for a third run.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.fx as fx

from pipepart.recording.generalise.variants import Dimension
from pipepart.recording.trace.facts import Fact
from pipepart.recording.trace.recorder import Recorder

__all__ = ["Explanation", "explain", "put_back"]


@dataclass(frozen=True)
class Formula:
    """A family of functions of a size with one free constant."""

    solve: Callable[[Any, int], Any]
    apply: Callable[[Any, int], Any]
    emit: Callable[[fx.Graph, Any, fx.Node], fx.Node]


def _whole(a: Any, n: int) -> Any:
    if isinstance(a, int):
        return a // n if a % n == 0 else None
    return a / n


FORMULAS: dict[str, Formula] = {
    "k * n": Formula(_whole, lambda k, n: k * n, lambda g, k, n: g.call_function(operator.mul, (k, n))),
    "n + k": Formula(lambda a, n: a - n, lambda k, n: n + k, lambda g, k, n: g.call_function(operator.add, (n, k))),
    "k / n": Formula(
        lambda a, n: a * n if isinstance(a, float) else None,
        lambda k, n: k / n,
        lambda g, k, n: g.call_function(operator.truediv, (k, n)),
    ),
    "k * sqrt(n)": Formula(
        lambda a, n: a / math.sqrt(n) if isinstance(a, float) else None,
        lambda k, n: k * math.sqrt(n),
        lambda g, k, n: g.call_function(operator.mul, (k, g.call_function(math.sqrt, (n,)))),
    ),
    "k / sqrt(n)": Formula(
        lambda a, n: a * math.sqrt(n) if isinstance(a, float) else None,
        lambda k, n: k / math.sqrt(n),
        lambda g, k, n: g.call_function(operator.truediv, (k, g.call_function(math.sqrt, (n,)))),
    ),
}


@dataclass(frozen=True)
class Explanation:
    """A constant that is a function of the size of one dimension."""

    formula: str
    constant: Any
    dimension: Dimension

    def value(self, size: int) -> Any:
        """The value of the constant at this size."""
        return FORMULAS[self.formula].apply(self.constant, size)

    def holds(self, size: int, value: Any) -> bool:
        """Whether `value` is the value of the formula at this size."""
        expected = self.value(size)
        return type(expected) is type(value) and math.isclose(expected, value, rel_tol=1e-9)


def explain(dimension: Dimension, value: Any, size: int, other: Any) -> list[Explanation]:
    """The formulas by which a constant is `value` in the example and `other` at `size`, the simplest first."""
    found = []
    for name, formula in FORMULAS.items():
        constant = formula.solve(value, dimension.size)
        if constant is None:
            continue
        explanation = Explanation(name, constant, dimension)
        if explanation.holds(dimension.size, value) and explanation.holds(size, other):
            found.append(explanation)
    return found


def put_back(recorder: Recorder, node: fx.Node, position: int, explanation: Explanation) -> None:
    """Replace the constant at `position` among the arguments of `node` by the computation that explains it."""
    leaf, dim = explanation.dimension.places[0]
    source = recorder.graph.find_nodes(op="placeholder")[leaf]
    fact = recorder.facts[node]
    known = set(recorder.graph.nodes)
    with recorder.graph.inserting_before(node):
        size = recorder.graph.call_method("size", (source, dim))
        value = FORMULAS[explanation.formula].emit(recorder.graph, explanation.constant, size)
    for made in recorder.graph.nodes:
        if made not in known:
            recorder.facts[made] = Fact(
                fact.module, fact.module_class, fact.source, number=0, varies=True, checkpoint=fact.checkpoint
            )
    recorder.facts[size].number = explanation.dimension.size
    recorder.facts[value].number = explanation.value(explanation.dimension.size)
    count = -1

    def swap(leaf_value: Any) -> Any:
        nonlocal count
        count += 1
        return value if count == position else leaf_value

    args, kwargs = fx.node.map_aggregate((node.args, dict(node.kwargs)), swap)
    node.args, node.kwargs = args, kwargs
