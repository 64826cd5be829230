"""Putting a pipeline together: record on every rank, plan on rank 0, check that all agree, keep the own stage only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree

from pipepart.capture import Recording
from pipepart.cost import OpCosts, profiled
from pipepart.cost.analytic import analytic
from pipepart.cost.cluster import this_machine
from pipepart.errors import PlanError
from pipepart.graph import OpGraph, op_graph
from pipepart.planning import Plan, Request, auto_microbatches, make_plan
from pipepart.planning.layout import BETWEEN_GPUS, BY_PROCESSOR, LOCAL_LINK, Handling
from pipepart.runtime.counts import Cut, best_cut, measured_cuts
from pipepart.runtime.failure import guarded
from pipepart.runtime.launch import processes_on_this_host
from pipepart.runtime.mesh import Groups, Mesh
from pipepart.runtime.microbatch import MicrobatchSizes, batch_size_of, microbatch_sizes, slice_leaves
from pipepart.schedule import read_csv

__all__ = ["Options", "agree_on_plan", "example_microbatch"]


@dataclass(frozen=True)
class Options:
    """How the user wants it planned. Everything is ``"auto"`` by default; a plan that was saved can be given instead."""

    stages: int | str = "auto"
    replicas: int | str = "auto"
    microbatches: int | str = "auto"
    schedule: str = "auto"
    chunks: int | str = "auto"
    slack: int | str = "auto"
    keep_together: Sequence[Sequence[str]] = field(default=())
    split_at: Sequence[str] | None = None
    plan: Plan | None = None
    timeout: float = 300.0
    """Seconds after which a transfer or collective that does not finish is an error."""
    transport: str = "auto"
    """How tensors travel between stages: ``auto``, ``group`` (gloo, NCCL) or ``shared_memory``."""
    recompute: bool | str = "auto"
    """True: every chunk runs its forward again before its backward; False: none; ``auto``: where memory is short."""
    memory_limit: float | None = None
    """Bytes that one device may use."""
    batch_norm: str = "microbatch"
    """When running statistics change: with every ``microbatch``, or once per ``batch``."""


def example_microbatch(example: Any, options: Options, mesh: Mesh) -> tuple[Any, MicrobatchSizes]:
    """The first micro-batch of an example (any nesting of tensors), and how the example is usually cut."""
    leaves, tree = pytree.tree_flatten(example)
    batch_size = batch_size_of(leaves)
    if options.plan is not None:
        count = options.plan.microbatches
    elif options.microbatches == "auto" and options.schedule.endswith(".csv"):
        count = read_csv(options.schedule).microbatches
    elif options.microbatches == "auto":
        count = auto_microbatches(mesh.stages, batch_size)
    else:
        count = int(options.microbatches)
    sizes = microbatch_sizes(batch_size, count)
    return pytree.tree_unflatten(slice_leaves(leaves, sizes)[0], tree), sizes


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
    """The plan, the same on every rank. Rank 0 makes it (or takes the given one); the others check that it fits.

    `usual`: how the batch is cut unless it is free and another way is clearly faster. Also returns the graph, and the
    costs that were measured here, unless the plan was given.
    """
    graph = op_graph(recording)
    costs: OpCosts | None = None
    cuts: list[Cut] = []
    agree = partial(_all, groups=groups)
    with guarded(groups):
        plan = options.plan
        if plan is None and any(parameter.is_meta for parameter in recording.root.parameters()):
            costs = _computed(graph, groups)
        elif plan is None:
            # All ranks measure at the same time, so that what they take from each other when they run is in the costs.
            costs = profiled(recording, leaves, context, f"{variant} x{processes_on_this_host()}", agree=agree)
            cuts = [Cut(len(usual), usual.sizes[0], costs)]
            if options.microbatches == "auto" and not options.schedule.endswith(".csv"):
                cuts = measured_cuts(cuts[0], recording, leaves, usual.batch_size, mesh.stages, context, agree)
        if costs is not None and (groups is None or groups.rank == 0):
            cuts = cuts or [Cut(len(usual), usual.sizes[0], costs)]
            plan, chosen = best_cut(cuts, lambda cut: _make(recording, graph, cut, options, mesh))
            costs = chosen.costs
        if groups is not None:
            box = [plan.to_json() if plan is not None else None]
            dist.broadcast_object_list(box, 0)
            plan = Plan.from_json(str(box[0]))
        assert plan is not None
        _check_fits(plan, graph, mesh)
    return plan, graph, costs


def _all(ok: bool, groups: Groups | None) -> bool:
    """Whether it is so on every rank."""
    if groups is None:
        return ok
    votes = torch.tensor([int(ok)])
    dist.all_reduce(votes, dist.ReduceOp.MIN)
    return bool(votes.item())


def _computed(graph: OpGraph, groups: Groups | None) -> OpCosts | None:
    """Costs of a model without memory (on the meta device), which cannot be run: from FLOPs and bytes, on rank 0."""
    if groups is not None and groups.rank != 0:
        return None
    (kind,) = this_machine().kinds.values()
    return analytic(graph, kind)


def _make(
    recording: Recording,
    graph: OpGraph,
    cut: Cut,
    options: Options,
    mesh: Mesh,
) -> Plan:
    device = next((parameter.device.type for parameter in recording.root.parameters()), "cpu")
    request = Request(
        stages=mesh.stages,
        replicas=mesh.replicas,
        microbatches=cut.microbatches,
        schedule=options.schedule,
        chunks=options.chunks,
        slack=options.slack,
        keep_together=tuple(tuple(group) for group in options.keep_together),
        split_at=None if options.split_at is None else tuple(options.split_at),
        recompute=options.recompute,
        memory_limit=options.memory_limit,
        link=BETWEEN_GPUS if device == "cuda" else LOCAL_LINK,
        handling=Handling() if device == "cuda" else BY_PROCESSOR,
    )
    sizes = {name: (p.numel(), p.numel() * p.element_size()) for name, p in recording.root.named_parameters()}
    return make_plan(graph, cut.costs, request, cut.size, sizes)


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
