"""Proof of the chunks of a plan: run one after the other, with detached boundaries, they give the outcome of the whole.

One process does the work of all stages of a pipeline: every value that crosses a cut is a copy without history, and only
edges with gradient targets send a gradient back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
from pipepart.recording.proof.blame import SeenValues
from pipepart.recording.proof.differences import Difference, beyond_rounding, differ, differences, largest_of
from pipepart.recording.proof.outcome import Outcome, backward_roots, compact, gradients_of, outcome_of
from pipepart.recording.proof.replay import Replay
from pipepart.recording.recorded import Recording

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
    """Raise a `CaptureError` if the chunks, run as in a pipeline, do not give the outcome of the whole recording.

    `chunk_of` is the chunk of each op, and forward runs inside `context` (a precision). Without `backward`, and for steps
    of an evaluation, only outputs and buffers are compared. Models on the meta device are not run.
    """
    if len(chunks) < 2 or state.is_abstract(recording.root, recording.device):
        return
    backward = backward and recording.step in (None, "training_step")
    example = _Example(recording, leaves, context, backward)
    nodes = _in_order_of_chunks(recording, chunk_of)
    body = executable(recording, nodes)
    wanted = example.in_one_piece(body)
    if wanted.failure:
        return
    run = example.in_chunks(chunks)
    found = [item for item in differences(run.outcome, wanted) if not _is_nothing(item, run.outcome)]
    found = beyond_rounding(found, wanted, recording.root, lambda: example.in_one_piece(body))
    if not found and not run.outcome.failure:
        return
    seen = example.seen_values(nodes)
    first = str(found[0]) if found else f"the backward fails with {run.outcome.failure}"
    where = _cut_at_fault(recording, chunks, chunk_of, seen, run) or _user(chunks, found)
    raise CaptureError(
        f"{type(recording.root).__name__}: cut into {len(chunks)} chunks, the recorded graph gives other results than in "
        f"one piece: {first}.\n  where: {where}\n"
        "  do: keep the modules around this cut together (keep_together, split_at), and report it as a bug"
    )


def _is_nothing(item: Difference, got: Outcome) -> bool:
    """Return whether zeros replace a missing gradient: a stage that is asked for a gradient sends one."""
    gradient = (got.gradients or {}).get(item.name) if item.kind == "gradient of" else None
    return gradient is not None and item.size == float("inf") and not bool(gradient.any())


def _in_order_of_chunks(recording: Recording, chunk_of: Mapping[str, int]) -> list[fx.Node]:
    """Return the ops in the order in which the chunks run them, which is the order of random draws."""
    nodes = [node for node in recording.graph.nodes if node.op not in ("placeholder", "output", "get_attr")]
    rank: dict[fx.Node, int] = {}
    for node in reversed(nodes):
        rank[node] = chunk_of[node.name]
        if op_of(node).replicable:
            rank[node] = min([rank[user] for user in node.users if user in rank], default=rank[node])
    random = [rank[node] for node in nodes if op_of(node).random]
    return nodes if random == sorted(random) else sorted(nodes, key=rank.__getitem__)


@dataclass
class _Run:
    """The outcome of a run in chunks, the values that crossed cuts, and the sums of the gradients that came back."""

    values: dict[str, Any] = field(default_factory=dict)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    outcome: Outcome = field(default_factory=lambda: Outcome([]))


@dataclass(frozen=True)
class _Stash:
    """A chunk after its forward: its imports that get a gradient, and its results."""

    chunk: Chunk
    leaves: dict[str, torch.Tensor]
    results: Sequence[Any]


@dataclass(frozen=True)
class _Example:
    """A recording and the leaves that it runs on, each time from the same state of the model."""

    recording: Recording
    leaves: Sequence[Any]
    context: Context
    backward: bool

    @contextmanager
    def _given(self) -> Iterator[list[Any]]:
        """Copies of the leaves, without gradients; the state of the model is restored afterwards."""
        with state.preserved(self.recording.root), torch.set_grad_enabled(self.backward):
            yield [leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves]

    def in_one_piece(self, body: RecordedGraph) -> Outcome:
        """Run the whole graph and return its outcome."""
        with self._given() as given:
            with self.context():
                values = body(*given)
            return outcome_of(values, self.recording.loss_index, self.recording.root, {}, self.backward)

    def seen_values(self, nodes: list[fx.Node]) -> SeenValues:
        """Run the whole graph op by op and return all values and their gradients."""
        seen = SeenValues()
        with self._given() as given:
            with self.context():
                values = Replay(executable(self.recording, nodes, depth=None), seen).run(*given)
            if self.backward:
                seen.backward(*backward_roots(values, self.recording.loss_index))
        return seen

    def in_chunks(self, chunks: Sequence[Chunk]) -> _Run:
        """Run the chunks one after the other, and their backwards in reverse order."""
        run, recording = _Run(), self.recording
        totals: dict[str, torch.Tensor] = {}
        failure = ""
        with self._given() as given:
            run.values.update(zip((spec.name for spec in recording.inputs), given))
            tape = [_forward(chunk, run.values, self.context, self.backward) for chunk in chunks]
            try:
                for stash in reversed(tape) if self.backward else ():
                    _backward(recording, stash, stash is tape[-1], run.gradients, totals)
            except RuntimeError as error:
                failure = f"{type(error).__name__}: {error}"
            needed = [name for name, parameter in recording.root.named_parameters() if parameter.requires_grad]
            whole = outcome_of(tape[-1].results, None, recording.root, {}, False)
            gradients = {name: compact(totals[name]) if name in totals else None for name in needed}
            run.outcome = Outcome(whole.values, whole.buffers, gradients if self.backward else None, failure)
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
    """Run backward of one chunk from the gradients of its exports; adds to the gradients of edges and parameters."""
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


def _cut_at_fault(
    recording: Recording, chunks: Sequence[Chunk], chunk_of: Mapping[str, int], seen: SeenValues, run: _Run
) -> str:
    """Return the first edge with another value than in one piece; if there is none, the last edge with another gradient."""
    edges = {edge.name: edge for chunk in chunks for edge in chunk.exports}
    by_name = {node.name: node for node in recording.graph.nodes}
    order = [edges[name] for name in by_name if name in edges]
    largest = largest_of(seen.gradients.values())
    for edge in order:
        value = run.values.get(edge.name)
        if isinstance(value, torch.Tensor) and differ(compact(value), seen.values.get(edge.name)):
            return f"the value of {_edge(edge, by_name[edge.name])} differs from that in one piece"
    for edge in reversed(order):
        got, wanted = run.gradients.get(edge.name), seen.gradients.get(edge.name)
        if got is None and wanted is None:
            continue
        if got is None:
            return f"no gradient comes back for {_edge(edge, by_name[edge.name])}"
        if any(chunk_of.get(u.name) == edge.source and op_of(u).requires_grad for u in by_name[edge.name].users):
            continue  # a part of its gradient comes from its own chunk and does not cross a cut
        if differ(got, wanted if wanted is not None else torch.zeros_like(got), largest):
            return f"the gradient that comes back for {_edge(edge, by_name[edge.name])} differs from that in one piece"
    return ""


def _edge(edge: Edge, node: fx.Node) -> str:
    targets = ", ".join(map(str, edge.targets))
    return f"op {edge.name} ({where_is(node)}), which crosses from chunk {edge.source} to {targets},"


def _user(chunks: Sequence[Chunk], found: Sequence[Difference]) -> str:
    """Return the chunks that use the wrong tensors, if all edges are right."""
    names = {item.name for item in found}
    users = [chunk.index for chunk in chunks if not names.isdisjoint((*chunk.parameters, *chunk.buffers))]
    return f"inside chunk {', '.join(map(str, users or [chunks[-1].index]))}; all edges are right"
