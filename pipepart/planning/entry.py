"""`plan`: from a model to a plan, for this machine or for a cluster that need not exist; no process is started."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pipepart.cost.cluster import Cluster, load_cluster, this_machine
from pipepart.cost.given import given_costs
from pipepart.errors import PlanError
from pipepart.graph import Captured, OpGraph, capture, op_graph
from pipepart.planning.parameter_uses import parameter_sizes
from pipepart.planning.plan import Plan
from pipepart.planning.request import PlanRequest, check_request
from pipepart.planning.search import search
from pipepart.planning.sources import Analytic, Costs, Given, Profiled, batch_of
from pipepart.recording import Recording
from pipepart.schedule import read_csv

__all__ = ["plan"]


def plan(
    captured_or_module: Captured | Recording | nn.Module | Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    cluster: Cluster | str | Path | None = None,
    devices: int | None = None,
    stages: int | str = "auto",
    replicas: int | str = "auto",
    microbatches: int | str = "auto",
    schedule: str = "auto",
    chunks: int | str = "auto",
    slack: int | str = "auto",
    recompute: bool | str = "auto",
    cost: str | Path = "auto",
    memory_limit: float | None = None,
    batch_size: int | None = None,
    each_replica: bool = False,
    keep_together: Sequence[Sequence[str]] = (),
    split_at: Sequence[str] | None = None,
    optimizer_factor: float = 2.0,
    dtype: str | None = None,
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    variant: str = "",
) -> Plan:
    """Plan a model for a cluster: everything that is ``"auto"`` is chosen for the shortest simulated step.

    ``captured_or_module``: a module whose forward returns the loss, a bound method of one, or what `capture` returned;
    ``args`` and ``kwargs``: an example batch (with a captured model they are needed for ``cost="profile"`` only).
    ``cluster``: a `Cluster`, a name in ``conf/cluster`` or a YAML file; None: this machine. ``devices``: how many of
    it (default: all). ``cost``: ``"profile"`` measures every op here, ``"analytic"`` computes from FLOPs and bytes
    (the model may be on the meta device), a path reads a file; ``"auto"`` profiles on this machine and computes for
    others. ``memory_limit``: bytes per device. ``batch_size``: samples of one step over all replicas (default: those
    of the example); with ``each_replica`` they are those of one, as under Lightning, where every replica has a loader
    of its own, and the most samples per second win. ``optimizer_factor``: bytes of optimizer state per parameter byte.
    ``dtype``: the dtype that ``"analytic"`` computes in. ``context`` and ``variant``: the precision that ``"profile"``
    runs under, and its name.
    """
    check_request(schedule, microbatches, stages, recompute)
    if schedule.endswith(".csv"):  # it says for how many stages and micro-batches it is
        written = read_csv(schedule)
        stages = written.stages if stages == "auto" else stages
        microbatches = written.microbatches if microbatches == "auto" else microbatches
    recording, graph = _recorded(captured_or_module, args, kwargs)
    where = _cluster(cluster, devices, stages, replicas)
    captured_batch = batch_of(recording)
    source = _source(cost, recording, graph, where, captured_batch, args, kwargs, cluster, dtype, context, variant)
    request = PlanRequest(
        batch_size=captured_batch if batch_size is None else batch_size,
        devices=where.size,
        cluster=where,
        stages=stages,
        replicas=replicas,
        microbatches=microbatches,
        each_replica=each_replica,
        schedule=schedule,
        chunks=chunks,
        slack=slack,
        keep_together=tuple(tuple(group) for group in keep_together),
        split_at=None if split_at is None else tuple(split_at),
        recompute=recompute,
        memory_limit=memory_limit,
        optimizer_factor=optimizer_factor,
    )
    frozen = {name for name, p in recording.root.named_parameters() if not p.requires_grad}
    return search(graph, source, parameter_sizes(recording.root), request, frozen=frozen)


def _recorded(
    what: Captured | Recording | nn.Module | Callable[..., Any],
    args: Sequence[Any] | None,
    kwargs: Mapping[str, Any] | None,
) -> tuple[Recording, OpGraph]:
    if isinstance(what, Captured):
        return what.train, what.graph
    if isinstance(what, Recording):
        return what, op_graph(what)
    if args is None and not kwargs:
        raise PlanError("plan(module): expected an example batch as well: plan(module, (inputs, targets))")
    captured = capture(what, tuple(args or ()), kwargs)
    return captured.train, captured.graph


def _cluster(
    cluster: Cluster | str | Path | None, devices: int | None, stages: int | str, replicas: int | str
) -> Cluster:
    found = this_machine() if cluster is None else cluster if isinstance(cluster, Cluster) else load_cluster(cluster)
    if devices is None and stages != "auto" and replicas != "auto":
        devices = int(stages) * int(replicas)
    if devices is None and stages != "auto" and found.size % int(stages):
        devices = max(int(stages), found.size // int(stages) * int(stages))
    return found if devices is None else found.with_devices(devices)


def _source(
    cost: str | Path,
    recording: Recording,
    graph: OpGraph,
    cluster: Cluster,
    captured_batch: int,
    args: Sequence[Any] | None,
    kwargs: Mapping[str, Any] | None,
    asked: Cluster | str | Path | None,
    dtype: str | None,
    context: Callable[[], AbstractContextManager[Any]],
    variant: str,
) -> Costs:
    meta = any(p.is_meta for p in recording.root.parameters())
    here = asked is None or cluster.name == "local"
    if cost == "auto":
        cost = "profile" if here and not meta and (args is not None or kwargs) else "analytic"
    if cost == "analytic":
        return Analytic(graph, cluster, captured_batch, dtype)
    if cost != "profile":
        return Given(given_costs(cost, [op.name for op in graph.ops]), captured_batch)
    if not here:
        raise PlanError(
            f"cost='profile' measures this machine, but the plan is for cluster {cluster.name!r}: use cost='analytic', "
            "or a file of costs that were measured there"
        )
    if meta:
        raise PlanError("cost='profile' runs the model, but its parameters are on the meta device: use cost='analytic'")
    if args is None and not kwargs:
        raise PlanError("cost='profile' runs the model: give the example batch as well, or use cost='analytic'")
    leaves = recording.flatten(tuple(args or ()), kwargs)
    if any(isinstance(leaf, torch.Tensor) and leaf.is_meta for leaf in leaves):
        raise PlanError("cost='profile' runs the model, but the example is on the meta device: use cost='analytic'")
    return Profiled(recording, leaves, cluster.size, context, variant)
