"""Clean a recorded graph: sizes become functions of the inputs, fixed numbers become constants, dead reads go away.

Runs of one model at several example sizes give each number a row of values. A number whose row is constant is a
constant; a number whose row is that of an input dimension is that input's size. What is left of Python's comparisons of
numbers are checks that really can fail.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch.fx as fx

from pipepart.recording.trace import intrinsics
from pipepart.recording.trace.facts import Fact
from pipepart.recording.trace.recorder import Recorder

__all__ = ["simplify"]

_SIZES = ("size", "numel", "stride")


def simplify(runs: Sequence[Recorder]) -> None:
    """Simplify the graph of ``runs[0]`` in place, knowing the other runs at other sizes (same ops, node by node)."""
    base = runs[0]
    if len(runs) > 1:
        _shape_rows(runs)
        _fold_sizes(base, _rows(runs), _input_rows(runs))
    _drop_checks(base)
    _drop_dead(base)


def _shape_rows(runs: Sequence[Recorder]) -> None:
    """Note for each dimension of each tensor its sizes in all runs, and for each size which row it is."""
    for nodes in zip(*(list(run.graph.nodes) for run in runs)):
        facts = [run.facts[node] for run, node in zip(runs, nodes) if node in run.facts]
        if len(facts) != len(runs):
            continue
        shapes = [fact.shape for fact in facts]
        if shapes[0] is not None and not facts[0].dynamic_shape and len({len(shape or ()) for shape in shapes}) == 1:
            facts[0].rows = tuple(zip(*(shape for shape in shapes if shape is not None)))
        elif nodes[0].target == "size" and isinstance(facts[0].number, int) and not facts[0].from_data:
            facts[0].rows = (tuple(fact.number for fact in facts),)


def _rows(runs: Sequence[Recorder]) -> dict[fx.Node, tuple[Any, ...]]:
    return {
        nodes[0]: tuple(run.facts[node].number for run, node in zip(runs, nodes))
        for nodes in zip(*(list(run.graph.nodes) for run in runs))
        if nodes[0] in runs[0].facts and runs[0].facts[nodes[0]].number is not None
    }


def _input_rows(runs: Sequence[Recorder]) -> dict[tuple[int, ...], tuple[fx.Node, int]]:
    """Which input dimension has which row of sizes; of several the one of the smallest tensor."""
    found: dict[tuple[int, ...], tuple[fx.Node, int]] = {}
    inputs = [[node for node in run.graph.nodes if node.op == "placeholder"] for run in runs]
    order = sorted(zip(*inputs), key=lambda nodes: runs[0].facts[nodes[0]].output_bytes)
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
    last = [node for node in base.graph.nodes if node.op == "placeholder"][-1]
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
    """Remove checks that cannot fail, or that are there already."""
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
