"""Simplification of a recorded graph: sizes are read from inputs, fixed numbers become constants, unused reads are removed.

Runs of one model at several example sizes give each number a row of values. A number with a constant row is a constant; a
number with the row of an input dimension is the size of that input. Of the checks on comparisons of numbers, only those
remain that can fail.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch.fx as fx

from pipepart.recording.generalise.study import FORMULAS, Explanation
from pipepart.recording.recorded_run import intrinsics
from pipepart.recording.recorded_run.facts import Fact
from pipepart.recording.recorded_run.recorder import Recorder

__all__ = ["put_back", "simplify"]

_SIZES = ("size", "numel", "stride")


def simplify(runs: Sequence[Recorder]) -> None:
    """Simplify the graph of ``runs[0]`` in place; the other runs have the same ops, node by node, at other sizes."""
    base = runs[0]
    if len(runs) > 1:
        _fold_sizes(base, _rows(runs), _input_rows(runs))
    _drop_checks(base)
    _drop_dead(base)


def _rows(runs: Sequence[Recorder]) -> dict[fx.Node, tuple[Any, ...]]:
    """Return the row of each number of the first run. The rows of tensor dimensions are stored in the facts of that run."""
    found = {}
    for nodes in zip(*(run.graph.nodes for run in runs)):
        facts = [run.facts[node] for run, node in zip(runs, nodes) if node in run.facts]
        if len(facts) != len(runs):
            continue
        if facts[0].number is not None:
            found[nodes[0]] = tuple(fact.number for fact in facts)
        shapes = [fact.shape for fact in facts]
        if shapes[0] is not None and not facts[0].dynamic_shape and len({len(shape or ()) for shape in shapes}) == 1:
            facts[0].rows = tuple(zip(*(shape for shape in shapes if shape is not None)))
        elif nodes[0].target == "size" and isinstance(facts[0].number, int) and not facts[0].from_data:
            facts[0].rows = (found[nodes[0]],)
    return found


def _input_rows(runs: Sequence[Recorder]) -> dict[tuple[int, ...], tuple[fx.Node, int]]:
    """Return the input dimension that has each row of sizes; if several have it, the one of the smallest tensor."""
    found: dict[tuple[int, ...], tuple[fx.Node, int]] = {}
    inputs = zip(*(run.graph.find_nodes(op="placeholder") for run in runs))
    order = sorted(inputs, key=lambda nodes: runs[0].facts[nodes[0]].output_bytes)
    for nodes in order:
        shapes = [run.facts[node].shape for run, node in zip(runs, nodes)]
        if shapes[0] is None:
            continue
        for dim in range(len(shapes[0])):
            row = tuple(shape[dim] for shape in shapes if shape is not None)
            if len(set(row)) > 1:
                found.setdefault(row, (nodes[0], dim))
    return found


def _fold_sizes(base: Recorder, rows: dict[fx.Node, tuple[Any, ...]], inputs: dict[Any, tuple[fx.Node, int]]) -> None:
    last = base.graph.find_nodes(op="placeholder")[-1]
    sizes: set[fx.Node] = set()
    made: dict[Any, fx.Node] = {}
    for node in list(base.graph.nodes):
        fact = base.facts.get(node)
        if fact is None or fact.number is None or fact.from_data or isinstance(fact.number, bool):
            continue
        from_size = node.op == "call_method" and node.target in _SIZES
        if node.op == "placeholder" or (not from_size and any(source not in sizes for source in node.all_input_nodes)):
            continue
        sizes.add(node)
        row = rows[node]
        if len(set(row)) == 1:
            _replace(node, row[0])
        elif row in inputs and not (node.op == "call_method" and node.args[0] is inputs[row][0]):
            if row not in made:
                source, dim = inputs[row]
                with base.graph.inserting_after(last):
                    made[row] = base.graph.call_method("size", (source, dim))
                base.facts[made[row]] = Fact(
                    fact.module, fact.module_class, fact.source, number=row[0], varies=True, rows=(row,)
                )
                sizes.add(made[row])
                last = made[row]
            node.replace_all_uses_with(made[row])


def _replace(node: fx.Node, value: Any) -> None:
    for user in list(node.users):
        user.args = fx.map_arg(user.args, lambda n: value if n is node else n)
        user.kwargs = fx.map_arg(user.kwargs, lambda n: value if n is node else n)


def _drop_checks(base: Recorder) -> None:
    """Remove checks that cannot fail, and repeated ones."""
    seen = set()
    for node in list(base.graph.nodes):
        if node.target is not intrinsics.check:
            continue
        value = node.args[0]
        if not isinstance(value, fx.Node):
            base.graph.erase_node(node)
            continue
        if base.facts[value].number is not None and value.op == "call_function":
            key = (value.target, tuple(value.args), node.args[1])
            a, b = (*value.args, None, None)[:2]
            never = not value.all_input_nodes or (a is b and value.target in (operator.eq, operator.le, operator.ge))
            if never or key in seen:
                base.graph.erase_node(node)
            seen.add(key)


def _drop_dead(base: Recorder) -> None:
    """Remove numbers, unpacked results and reads that nothing uses."""
    for node in reversed(list(base.graph.nodes)):
        if node.users or node.op in ("output", "placeholder"):
            continue
        fact = base.facts[node]
        unpacked = node.target in (operator.getitem, getattr) and not fact.mutates
        if (
            node.op == "get_attr"
            or (fact.number is not None and not fact.from_data)
            or unpacked
            or (fact.number is not None and node.target == "item")
        ):
            base.graph.erase_node(node)


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
