"""Agreement on a plan: all ranks measure costs, rank 0 plans and proves the chunks, the others check that the plan fits.

If the number of micro-batches is free, several numbers are measured: more micro-batches leave a smaller bubble, larger
micro-batches use a device better, and the best number depends on the model. The search for a plan (`planning/search.py`)
chooses the number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from pipepart.build.job import Job
from pipepart.build.job_devices import JobDevices, devices_of_job
from pipepart.cost import OpCosts, profiled, whole_step
from pipepart.cost.analytic import analytic
from pipepart.cost.device_memory import stays_on_host
from pipepart.cost.this_machine import this_machine
from pipepart.devices import computes_on_host
from pipepart.errors import PlanError
from pipepart.graph import OpGraph, op_graph
from pipepart.options import Options
from pipepart.planning import MicrobatchCount, Plan, neighbouring_counts, search, transfer
from pipepart.planning.memory import parameter_sizes
from pipepart.planning.sources import resized
from pipepart.recording import Recording, prove_chunks, split
from pipepart.runtime import Groups, Mesh
from pipepart.runtime.failure import guarded
from pipepart.runtime.meeting import all_reduce, broadcast_object
from pipepart.runtime.microbatch import MicrobatchSizes
from pipepart.runtime.rendezvous import processes_on_this_host

__all__ = ["MeasuredCount", "MeasuredCounts", "agree_on_plan", "measured_counts", "prove_step"]

Context = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class MeasuredCount:
    """A number of micro-batches, with the costs of one of them."""

    microbatches: int
    size: int
    """Samples of the largest micro-batch."""
    costs: OpCosts


@dataclass(frozen=True)
class MeasuredCounts:
    """The measured numbers of micro-batches, the usual one first: candidates of the search and its source of costs."""

    counts: tuple[MeasuredCount, ...]

    @property
    def candidates(self) -> tuple[MicrobatchCount, ...]:
        """The numbers among which the search chooses."""
        return tuple(MicrobatchCount(count.microbatches, count.size) for count in self.counts)

    def at(self, microbatch_size: int, kind: str) -> OpCosts:
        """Return the costs for micro-batches of this size."""
        return next(count.costs for count in self.counts if count.size == microbatch_size)


def agree_on_plan(
    job: Job, recording: Recording, leaves: Sequence[Any], options: Options, usual: MicrobatchSizes
) -> tuple[Plan, OpGraph, OpCosts | None]:
    """Return the plan, which is the same on every rank, its graph, and its costs if they are known here.

    Rank 0 makes the plan (or takes the given one) and proves its chunks; the others check that it fits. `usual`: the split
    of the batch unless the number of micro-batches is free and another number is clearly faster.
    """
    graph, mesh, groups = op_graph(recording), job.mesh, job.groups
    measured: MeasuredCounts | None = None
    with guarded(groups):
        plan, costs = options.given_plan, None
        devices = devices_of_job(job) if plan is None else None
        if plan is None and any(parameter.is_meta for parameter in recording.root.parameters()):
            costs = _computed(graph) if job.decides() else None
            measured = (
                MeasuredCounts((MeasuredCount(len(usual), usual.sizes[0], costs),)) if costs is not None else None
            )
        elif plan is None:
            measured = _measured_plan_counts(job, recording, leaves, options, usual)
            costs = measured.counts[0].costs
        if measured is not None and devices is not None and job.decides():
            plan = _searched(recording, graph, measured, options, mesh, usual.batch_size, devices)
            costs = measured.at(plan.microbatch_size, "")
        if groups is not None:
            plan = Plan.from_json(broadcast_object(plan.to_json() if plan is not None else "", 0, groups))
        assert plan is not None
        _check_fits(plan, graph, mesh)
        if job.decides():  # one rank runs the proof for all: they have the same graph
            cut = dict(zip(plan.ops, plan.chunk_of))
            prove_chunks(recording, split(recording, cut, len(plan.placement)), cut, leaves, job.context)
    return plan, graph, costs


def prove_step(
    job: Job,
    recording: Recording,
    leaves: Sequence[Any],
    plan: Plan,
    planned: OpGraph,
    backward: bool = True,
    inside_replica: bool = False,
) -> None:
    """Prove the chunks of a recording under a plan that was made for another recording, with the graph `planned`.

    The model must be whole. Only rank 0, or with `inside_replica` the first rank of this replica, runs the proof; on other
    ranks the call does nothing.
    """
    if not job.decides(inside_replica):
        return
    count = len(plan.placement)
    with guarded(job.groups):
        cut = transfer(planned, plan.chunk_of, op_graph(recording), count)
        prove_chunks(recording, split(recording, cut, count), cut, leaves, job.context, backward)


def _measured_plan_counts(
    job: Job, recording: Recording, leaves: Sequence[Any], options: Options, usual: MicrobatchSizes
) -> MeasuredCounts:
    """Measure the costs of the usual number of micro-batches and, if it is free, of its neighbours."""
    agree = partial(_all, groups=job.groups)
    # All ranks measure at the same time, so costs include contention between the processes of a host.
    variant = f"{job.precision} x{processes_on_this_host()}"
    costs = profiled(recording, leaves, job.context, variant, agree=agree)
    first = MeasuredCount(len(usual), usual.sizes[0], costs)
    in_pieces = recording.batching is not None and recording.batching.in_pieces
    if not computes_on_host(job.device) and not agree(not stays_on_host(recording.root, job.device)):
        return MeasuredCounts((first,))  # other numbers are measured by whole steps
    if options.microbatches != "auto" or options.schedule.endswith(".csv") or in_pieces:
        return MeasuredCounts((first,))
    found = measured_counts(first, recording, leaves, usual.batch_size, job.mesh.stages, job.context, agree)
    return MeasuredCounts(tuple(found))


def measured_counts(
    usual: MeasuredCount,
    recording: Recording,
    leaves: Sequence[Any],
    batch_size: int,
    stages: int,
    context: Context,
    agree: Callable[[bool], bool],
) -> list[MeasuredCount]:
    """Return the usual number of micro-batches first, then others with their costs. All ranks measure together."""
    found = [usual]
    # With BatchNorm, the size of micro-batches changes the results: a measurement must not choose it.
    norms = torch.nn.modules.batchnorm._BatchNorm
    if stages == 1 or any(isinstance(module, norms) for module in recording.root.modules()):
        return found
    for other in neighbouring_counts(stages, batch_size, usual.size):
        count = None
        part = resized(leaves, other.size, recording.batching)
        if recording.stale(part) is None:  # models may treat a single sample differently
            count = _measured(usual, recording, part, other, context)
        if agree(count is not None) and count is not None:
            found.append(count)
    return found


def _measured(
    usual: MeasuredCount, recording: Recording, leaves: Sequence[Any], other: MicrobatchCount, context: Context
) -> MeasuredCount | None:
    """Measure the whole step with another size of micro-batches; the shares of its ops stay those of the usual size."""
    try:
        forward, backward = whole_step(recording, leaves, context)
    except torch.OutOfMemoryError:
        return None
    then = sum(usual.costs.forward), sum(usual.costs.backward)
    if not all((forward, backward, *then)):
        return None
    costs = usual.costs.scaled(other.size / usual.size, forward / then[0], backward / then[1])
    return MeasuredCount(other.microbatches, other.size, costs)


def _all(ok: bool, groups: Groups | None) -> bool:
    """Return whether `ok` is true on every rank."""
    if groups is None:
        return ok
    votes = torch.tensor([int(ok)])
    all_reduce(votes, groups, dist.ReduceOp.MIN)
    return bool(votes.item())


def _computed(graph: OpGraph) -> OpCosts:
    """Return costs from FLOPs and bytes, for a model on the meta device, which cannot be run."""
    (kind,) = this_machine().kinds.values()
    return analytic(graph, kind)


def _searched(
    recording: Recording,
    graph: OpGraph,
    measured: MeasuredCounts,
    options: Options,
    mesh: Mesh,
    batch_size: int,
    devices: JobDevices,
) -> Plan:
    """Return the best plan for the mesh of this job."""
    request = options.request(
        batch_size,
        each_replica=True,
        stages=mesh.stages,
        replicas=mesh.replicas,
        microbatches="auto",
        counts=measured.candidates,
        **devices.request(),
    )
    return search(graph, measured, parameter_sizes(recording.root), request)


def _check_fits(plan: Plan, graph: OpGraph, mesh: Mesh) -> None:
    if (plan.replicas, plan.stages) != (mesh.replicas, mesh.stages):
        raise PlanError(
            f"the plan is for {plan.replicas} replica(s) x {plan.stages} stage(s), but this job has {mesh.world_size} "
            f"device(s) as {mesh.replicas} replica(s) x {mesh.stages} stage(s). Start {plan.replicas * plan.stages} "
            "processes with this number of stages, or make the plan again for this job."
        )
    if plan.graph_hash != graph.hash or plan.ops != tuple(op.name for op in graph.ops):
        raise PlanError(
            f"the plan is for another model: its graph is {plan.graph_hash[:12]} with {len(plan.ops)} ops, but this rank has "
            f"recorded {graph.hash[:12]} with {len(graph.ops)} ops. If the plan came from a file, make it again; otherwise "
            "the model differs between ranks: build it in the same way, from the same configuration, on every rank."
        )
