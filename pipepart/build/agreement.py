"""Putting a pipeline together: record on every rank, plan on rank 0, check that all agree, keep the own stage only."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pipepart.build.counts import MeasuredCount, MeasuredCounts, measured_counts
from pipepart.cost import OpCosts, profiled
from pipepart.cost.analytic import analytic
from pipepart.cost.this_machine import this_machine
from pipepart.errors import PlanError
from pipepart.graph import OpGraph, op_graph
from pipepart.options import Options
from pipepart.planning import Plan, auto_microbatches, search, transfer
from pipepart.planning.layout import BETWEEN_GPUS, BY_PROCESSOR, LOCAL_LINK, Handling
from pipepart.planning.memory import parameter_sizes
from pipepart.recording import Recording, prove_chunks, split
from pipepart.recording.inputs import trees
from pipepart.recording.inputs.batching import Batching, batching_of
from pipepart.runtime.failure import guarded
from pipepart.runtime.launch import processes_on_this_host
from pipepart.runtime.meeting import all_reduce, broadcast_object
from pipepart.runtime.mesh import Groups, Mesh
from pipepart.runtime.microbatch import MicrobatchSizes, microbatch_sizes, slice_leaves
from pipepart.samples.pieces import Pieces, pieces_of
from pipepart.schedule import read_csv

__all__ = ["Example", "agree_on_plan", "example_microbatch", "prove_laid"]


@dataclass(frozen=True)
class Example:
    """The first micro-batch of an example, and how the example is usually cut."""

    batch: Any
    sizes: MicrobatchSizes
    batching: Batching
    others: tuple[Any, ...] = ()
    """Further batches to record on, where the batch is cut as a container."""
    pieces: Pieces | None = None
    """How it is cut then."""


def example_microbatch(
    example: Any, options: Options, mesh: Mesh, root: nn.Module | None = None, call: bool = False, fewer: bool = False
) -> Example:
    """The first micro-batch of an example (any nesting of containers).

    `root` may have a method ``split(batch, n)`` of its own; `call`: the example is a pair of positional and named
    arguments; `fewer`: a batch with fewer samples than micro-batches is cut into fewer.
    """
    leaves, tree = trees.flatten(example)
    fixed = _fixed_count(options)
    pieces = pieces_of(example, root, options.batch_dim, call, 2 if fixed is None else fixed)
    if pieces is not None:
        total = pieces.samples(example)
        found = pieces.cut(example, min(total, fixed or auto_microbatches(mesh.stages, total)))
        first, sizes = found[0], MicrobatchSizes(tuple(piece.samples for piece in found))
        others = [example] if len(found) > 1 else [piece.batch for piece in pieces.cut(example, 2)[1:]]
        return Example(first.batch, sizes, Batching((None,) * len(leaves), first.samples), tuple(others), pieces)
    paths = [path[3:] if call else path for path in trees.leaf_paths(tree)]
    batching = batching_of(leaves, paths, options.batch_dim)
    count = fixed or auto_microbatches(mesh.stages, batching.samples)
    sizes = microbatch_sizes(batching.samples, min(count, batching.samples) if fewer else count)
    part = slice_leaves(batching.first(leaves), sizes, batching.places)[0]
    return Example(
        trees.unflatten(batching.back(part), tree), sizes, dataclasses.replace(batching, samples=sizes.sizes[0])
    )


def _fixed_count(options: Options) -> int | None:
    """The number of micro-batches, if it is not free."""
    if options.given_plan is not None:
        return options.given_plan.microbatches
    if options.microbatches == "auto" and options.schedule.endswith(".csv"):
        return read_csv(options.schedule).microbatches
    return None if options.microbatches == "auto" else int(options.microbatches)


def agree_on_plan(
    recording: Recording,
    leaves: Sequence[Any],
    options: Options,
    mesh: Mesh,
    usual: MicrobatchSizes,
    groups: Groups | None,
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    variant: str = "",
) -> tuple[Plan, OpGraph, OpCosts | None]:
    """The plan, the same on every rank. Rank 0 makes it (or takes the given one) and proves its chunks; the others check
    that it fits.

    `usual`: how the batch is cut unless it is free and another way is clearly faster. Also returns the graph, and the
    costs that were measured here, unless the plan was given.
    """
    graph = op_graph(recording)
    costs: OpCosts | None = None
    counts: list[MeasuredCount] = []
    agree = partial(_all, groups=groups)
    with guarded(groups):
        plan = options.given_plan
        if plan is None and any(parameter.is_meta for parameter in recording.root.parameters()):
            costs = _computed(graph, groups)
        elif plan is None:
            # All ranks measure at the same time, so that what they take from each other when they run is in the costs.
            costs = profiled(recording, leaves, context, f"{variant} x{processes_on_this_host()}", agree=agree)
            counts = [MeasuredCount(len(usual), usual.sizes[0], costs)]
            in_pieces = recording.batching is not None and recording.batching.in_pieces
            if options.microbatches == "auto" and not options.schedule.endswith(".csv") and not in_pieces:
                counts = measured_counts(counts[0], recording, leaves, usual.batch_size, mesh.stages, context, agree)
        if costs is not None and (groups is None or groups.rank == 0):
            measured = MeasuredCounts(tuple(counts or [MeasuredCount(len(usual), usual.sizes[0], costs)]))
            plan = _searched(recording, graph, measured, options, mesh, usual.batch_size)
            costs = measured.at(plan.microbatch_size, "")
        if groups is not None:
            plan = Plan.from_json(broadcast_object(plan.to_json() if plan is not None else "", 0, groups))
        assert plan is not None
        _check_fits(plan, graph, mesh)
        if groups is None or groups.rank == 0:  # the same everywhere, as the graph is
            cut = dict(zip(plan.ops, plan.chunk_of))
            prove_chunks(recording, split(recording, cut, len(plan.placement)), cut, leaves, context)
    return plan, graph, costs


def prove_laid(
    recording: Recording,
    leaves: Sequence[Any],
    plan: Plan,
    planned: OpGraph,
    groups: Groups | None,
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    backward: bool = True,
    inside_replica: bool = False,
) -> None:
    """Prove the chunks of a recording that is laid over a plan which was made for another one (evaluation).

    The model must be whole. The first rank of the job does it, or that of this replica; all may call it.
    """
    source = groups.rank_of_stage(0) if groups is not None and inside_replica else 0
    if groups is not None and groups.rank != source:
        return
    count = len(plan.placement)
    with guarded(groups):
        cut = transfer(planned, plan.chunk_of, op_graph(recording), count)
        prove_chunks(recording, split(recording, cut, count), cut, leaves, context, backward)


def _all(ok: bool, groups: Groups | None) -> bool:
    """Whether it is so on every rank."""
    if groups is None:
        return ok
    votes = torch.tensor([int(ok)])
    all_reduce(votes, groups, dist.ReduceOp.MIN)
    return bool(votes.item())


def _computed(graph: OpGraph, groups: Groups | None) -> OpCosts | None:
    """Costs of a model without memory (on the meta device), which cannot be run: from FLOPs and bytes, on rank 0."""
    if groups is not None and groups.rank != 0:
        return None
    (kind,) = this_machine().kinds.values()
    return analytic(graph, kind)


def _searched(
    recording: Recording, graph: OpGraph, measured: MeasuredCounts, options: Options, mesh: Mesh, batch_size: int
) -> Plan:
    """The best plan for the mesh that was started."""
    device = next((parameter.device.type for parameter in recording.root.parameters()), "cpu")
    request = options.request(
        batch_size,
        each_replica=True,
        stages=mesh.stages,
        replicas=mesh.replicas,
        microbatches="auto",
        counts=measured.candidates,
        link=BETWEEN_GPUS if device == "cuda" else LOCAL_LINK,
        handling=Handling() if device == "cuda" else BY_PROCESSOR,
    )
    return search(graph, measured, parameter_sizes(recording.root), request)


def _check_fits(plan: Plan, graph: OpGraph, mesh: Mesh) -> None:
    if (plan.replicas, plan.stages) != (mesh.replicas, mesh.stages):
        raise PlanError(
            f"the plan is for {plan.replicas} replica(s) x {plan.stages} stage(s), but there are {mesh.world_size} device(s) "
            f"as {mesh.replicas} x {mesh.stages}. Start {plan.replicas * plan.stages} processes, or plan again."
        )
    if plan.graph_hash != graph.hash or plan.ops != tuple(op.name for op in graph.ops):
        raise PlanError(
            f"the plan is for another model: its graph is {plan.graph_hash[:12]} with {len(plan.ops)} ops, this rank has "
            f"recorded {graph.hash[:12]} with {len(graph.ops)} ops. If the plan came from a file, plan again; else the model "
            f"differs between ranks: build it the same way, from the same configuration, on every rank."
        )
