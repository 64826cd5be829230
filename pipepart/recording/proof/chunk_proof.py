"""Prove the chunks of a plan: run one after the other, with detached boundaries, they give what the whole gives.

This is what the stages of a pipeline do, in one process: every value that crosses a cut is a copy without history, and
only the edges that say so send a gradient back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx

from pipepart.errors import CaptureError
from pipepart.recording.execution.emit import executable
from pipepart.recording.execution.ops_run import RecordedGraph, resolve
from pipepart.recording.execution.split import Chunk, Edge
from pipepart.recording.model_state import state
from pipepart.recording.op import op_of, where_is
from pipepart.recording.proof.blame import Trace
from pipepart.recording.proof.outcome import (
    Difference,
    Outcome,
    backward_roots,
    compact,
    differences,
    distance,
    gradients_of,
    largest_of,
    noise_of,
    outcome_of,
    tolerance_of,
)
from pipepart.recording.proof.rounding import beyond_rounding
from pipepart.recording.recording import Recording
from pipepart.recording.trace.runs import copy_leaf

__all__ = ["prove_chunks"]

Context = Callable[[], AbstractContextManager[Any]]


def prove_chunks(
    recording: Recording,
    chunks: Sequence[Chunk],
    chunk_of: Mapping[str, int],
    leaves: Sequence[Any],
    context: Context = nullcontext,
    backward: bool = True,
) -> None:
    """Raise a `CaptureError` if the chunks, run as a pipeline runs them, do not give what the recording gives.

    `chunk_of` is what the recording was cut by, and `context` what forward runs in (a precision). Without `backward`, and
    for steps that are not trained on, outputs and buffers alone are compared. Models on the meta device have nothing to
    compare.
    """
    if len(chunks) < 2 or state.is_abstract(recording.root):
        return
    backward = backward and recording.step in (None, "training_step")
    nodes = _in_order_of_chunks(recording, chunk_of)
    body = executable(recording, nodes)
    wanted = _whole(recording, body, leaves, context, backward)
    if wanted.failure:
        return
    run = _detached(recording, chunks, leaves, context, backward)
    found = [item for item in differences(run.outcome, wanted) if not _is_nothing(item, run.outcome)]
    found = beyond_rounding(found, wanted, recording.root, lambda: _whole(recording, body, leaves, context, backward))
    if not found and not run.outcome.failure:
        return
    trace = _trace(recording, nodes, leaves, context, backward)
    first = str(found[0]) if found else f"backward fails, {run.outcome.failure}"
    where = _cut_at_fault(recording, chunks, chunk_of, trace, run) or _user(chunks, found)
    raise CaptureError(
        f"{type(recording.root).__name__}: cut into {len(chunks)} chunks, the recorded graph does not give what it gives "
        f"in one piece: {first}.\n  where: {where}\n"
        "  do: keep the modules around this cut together (keep_together, split_at), and report it as a bug"
    )


def _is_nothing(item: Difference, got: Outcome) -> bool:
    """A gradient of zeros in the place of none: a stage that is asked for a gradient sends one."""
    gradient = (got.gradients or {}).get(item.name) if item.kind == "gradient of" else None
    return gradient is not None and item.size == float("inf") and not bool(gradient.any())


def _in_order_of_chunks(recording: Recording, chunk_of: Mapping[str, int]) -> list[fx.Node]:
    """The ops in the order in which the chunks run them: random numbers are drawn in that order."""
    nodes = [node for node in recording.graph.nodes if node.op not in ("placeholder", "output", "get_attr")]
    rank: dict[fx.Node, int] = {}
    for node in reversed(nodes):
        rank[node] = chunk_of[node.name]
        if op_of(node).replicable:
            rank[node] = min([rank[user] for user in node.users if user in rank], default=rank[node])
    random = [rank[node] for node in nodes if op_of(node).random]
    return nodes if random == sorted(random) else sorted(nodes, key=rank.__getitem__)


def _whole(
    recording: Recording, body: RecordedGraph, leaves: Sequence[Any], context: Context, backward: bool
) -> Outcome:
    with state.preserved(recording.root), torch.set_grad_enabled(backward):
        with context():
            values = body(*(_without_gradient(leaf) for leaf in leaves))
        return outcome_of(values, recording.loss_index, recording.root, {}, backward)


def _without_gradient(leaf: Any) -> Any:
    copy = copy_leaf(leaf)
    return copy.detach() if isinstance(copy, torch.Tensor) else copy


@dataclass
class _Run:
    """What a run in chunks gave, and what crossed the cuts: values, and the sum of the gradients that came back."""

    values: dict[str, Any] = field(default_factory=dict)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    outcome: Outcome = field(default_factory=lambda: Outcome([]))


@dataclass(frozen=True)
class _Stash:
    chunk: Chunk
    leaves: dict[str, torch.Tensor]
    results: Sequence[Any]


def _detached(
    recording: Recording, chunks: Sequence[Chunk], leaves: Sequence[Any], context: Context, backward: bool
) -> _Run:
    run = _Run()
    names = [spec.name for spec in recording.inputs]
    with state.preserved(recording.root), torch.set_grad_enabled(backward):
        run.values.update(zip(names, (_without_gradient(leaf) for leaf in leaves)))
        tape = [_forward(chunk, run.values, context, backward) for chunk in chunks]
        totals: dict[str, torch.Tensor] = {}
        failure = ""
        try:
            for stash in reversed(tape) if backward else ():
                _backward(recording, stash, stash is tape[-1], run.gradients, totals)
        except RuntimeError as error:
            failure = f"{type(error).__name__}: {error}"
        needed = {name for name, parameter in recording.root.named_parameters() if parameter.requires_grad}
        whole = outcome_of(tape[-1].results, None, recording.root, {}, False)
        given = {name: compact(totals[name]) if name in totals else None for name in needed}
        run.outcome = Outcome(whole.values, whole.buffers, given if backward else None, failure)
    return run


def _forward(chunk: Chunk, values: dict[str, Any], context: Context, backward: bool) -> _Stash:
    arguments, leaves = [], {}
    for edge in chunk.imports:
        value = values[edge.name]
        if isinstance(value, torch.Tensor):
            value = value.detach().clone()
            if backward and chunk.index in edge.grad_targets:
                leaves[edge.name] = value.requires_grad_()
        arguments.append(value)
    with context():
        results = chunk.module(*arguments)
    exported = zip((edge.name for edge in chunk.exports), results)
    values.update((name, value.detach() if isinstance(value, torch.Tensor) else value) for name, value in exported)
    return _Stash(chunk, leaves, results)


def _backward(
    recording: Recording,
    stash: _Stash,
    is_last: bool,
    gradients: dict[str, torch.Tensor],
    totals: dict[str, torch.Tensor],
) -> None:
    """Backward of one chunk from what came back for its exports; adds to the gradients of edges and of parameters."""
    if is_last:
        roots, cotangents = backward_roots(stash.results, recording.loss_index)
    else:
        pairs = [
            (value, gradients[edge.name])
            for edge, value in zip(stash.chunk.exports, stash.results)
            if edge.grad_targets and edge.name in gradients and value.requires_grad
        ]
        roots, cotangents = [value for value, _ in pairs], [gradient for _, gradient in pairs]
    wanted = {f"edge {name}": leaf for name, leaf in stash.leaves.items()}
    for name in stash.chunk.parameters:
        parameter = resolve(recording.root, name)
        if parameter.requires_grad:
            wanted[name] = parameter
    found = gradients_of(roots, cotangents, wanted) if roots else {}
    for name, leaf in stash.leaves.items():
        gradient = found.get(f"edge {name}")
        gradient = torch.zeros_like(leaf) if gradient is None else gradient
        gradients[name] = gradients[name] + gradient if name in gradients else gradient
    for name in stash.chunk.parameters:
        gradient = found.get(name)
        if gradient is not None:
            totals[name] = totals[name] + gradient if name in totals else gradient


# -------------------------------------------------------------------- which cut is at fault


class _Traced(fx.Interpreter):
    def __init__(self, module: fx.GraphModule, trace: Trace):
        super().__init__(module)
        self.trace = trace

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if isinstance(value, torch.Tensor) and "origin" in n.meta:
            self.trace.see(n.meta["origin"], value)
        return value


def _trace(
    recording: Recording, nodes: list[fx.Node], leaves: Sequence[Any], context: Context, backward: bool
) -> Trace:
    """The values of all ops, and their gradients, in one piece."""
    trace = Trace()
    with state.preserved(recording.root), torch.set_grad_enabled(backward):
        with context():
            body = executable(recording, nodes, depth=None)
            values = _Traced(body, trace).run(*(_without_gradient(leaf) for leaf in leaves))
        if backward:
            trace.backward(*backward_roots(values, recording.loss_index))
    return trace


def _cut_at_fault(
    recording: Recording, chunks: Sequence[Chunk], chunk_of: Mapping[str, int], trace: Trace, run: _Run
) -> str:
    """The first edge whose value is another than in one piece; else, from the loss back, whose gradient is."""
    edges = {edge.name: edge for chunk in chunks for edge in chunk.exports}
    by_name = {node.name: node for node in recording.graph.nodes}
    order = [edges[name] for name in by_name if name in edges]
    largest = largest_of(trace.gradients.values())
    for edge in order:
        value = run.values.get(edge.name)
        if isinstance(value, torch.Tensor) and _differ(compact(value), trace.values.get(edge.name)):
            return f"the value of {_edge(edge, by_name[edge.name])} is another than in one piece"
    for edge in reversed(order):
        got, wanted = run.gradients.get(edge.name), trace.gradients.get(edge.name)
        if got is None and wanted is None:
            continue
        if got is None:
            return f"no gradient comes back for {_edge(edge, by_name[edge.name])}"
        if any(chunk_of.get(u.name) == edge.source and op_of(u).requires_grad for u in by_name[edge.name].users):
            continue  # a part of its gradient comes from its own chunk and crosses nothing
        if _differ(got, wanted if wanted is not None else torch.zeros_like(got), largest):
            return f"the gradient that comes back for {_edge(edge, by_name[edge.name])} is another than in one piece"
    return ""


def _differ(got: torch.Tensor, wanted: torch.Tensor | None, largest: float = 0.0) -> bool:
    """`largest` is the largest of all gradients: what cancels to rounding errors of it does not differ."""
    if wanted is None or got.shape != wanted.shape or got.dtype != wanted.dtype:
        return True
    worst, scale = distance(got, wanted)
    return worst > tolerance_of(wanted.dtype) * scale and worst > noise_of(wanted.dtype) * largest


def _edge(edge: Edge, node: fx.Node) -> str:
    targets = ", ".join(map(str, edge.targets))
    return f"op {edge.name} ({where_is(node)}), which crosses from chunk {edge.source} to {targets},"


def _user(chunks: Sequence[Chunk], found: Sequence[Difference]) -> str:
    """All that crosses is right: the chunks that use what is wrong."""
    names = {item.name for item in found}
    users = [chunk.index for chunk in chunks if not names.isdisjoint((*chunk.parameters, *chunk.buffers))]
    return f"inside of chunk {', '.join(map(str, users or [chunks[-1].index]))}; all that crosses a cut is right"
