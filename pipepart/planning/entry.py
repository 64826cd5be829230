"""`plan`: plans a model for this machine or for a cluster that need not exist. No process is started."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from torch import nn

from pipepart.cost.cluster import MOST_DEVICES, Cluster, load_cluster
from pipepart.cost.op_costs import given_costs
from pipepart.cost.this_machine import this_machine
from pipepart.errors import PlanError
from pipepart.graph import Captured, OpGraph, capture, op_graph
from pipepart.planning.head_mode import HeadOption
from pipepart.planning.layout import Layout
from pipepart.planning.memory import parameter_sizes
from pipepart.planning.plan import Plan
from pipepart.planning.request import PlanOptions, ScheduleName
from pipepart.planning.search import search
from pipepart.planning.sources import Analytic, Costs, Given, Profiled, batch_of
from pipepart.planning.sync_mode import SyncOption
from pipepart.recording import Recording
from pipepart.schedule import read_csv
from pipepart.values import Positive, Range, check_fields, shortened

__all__ = ["Target", "layout_of", "plan", "plan_for"]


def plan(
    captured_or_module: Captured | Recording | nn.Module | Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    cluster: Cluster | str | Path | None = None,
    devices: int | None = None,
    stages: int | Literal["auto"] = "auto",
    replicas: int | Literal["auto"] = "auto",
    microbatches: int | Literal["auto"] = "auto",
    schedule: ScheduleName | str = "auto",
    chunks: int | Literal["auto"] = "auto",
    slack: int | Literal["auto"] = "auto",
    recompute: bool | Literal["auto"] = "auto",
    cost: Literal["auto", "profile", "analytic"] | str | Path = "auto",
    memory_limit: float | None = None,
    head: HeadOption = "auto",
    batch_size: int | None = None,
    keep_together: Sequence[Sequence[str]] = (),
    split_at: Sequence[str] | None = None,
    sync: SyncOption = "mean",
    optimizer_factor: float = 2.0,
    dtype: str | None = None,
) -> Plan:
    """Plan a model for a cluster. Every option that is ``"auto"`` is chosen for the shortest simulated step.

    - ``captured_or_module``: a module whose forward returns the loss, a bound method of one, or a result of `capture`.
    - ``args`` and ``kwargs``: an example batch (with a captured model they are needed for ``cost="profile"`` only).
    - ``cluster``: a `Cluster`, a name in ``conf/cluster`` or a YAML file. None: this machine.
    - ``devices``: number of devices of the cluster (default: all).
    - ``cost``: ``"profile"`` measures every op here, ``"analytic"`` computes from FLOPs and bytes (the model may be on the
      meta device), a path reads a file; ``"auto"`` profiles on this machine and computes for others.
    - ``memory_limit``: bytes per device.
    - ``batch_size``: samples of one step over all replicas (default: those of the example).
    - ``optimizer_factor``: bytes of optimizer state per parameter byte; ``sync`` says which share of it a rank holds.
    - ``dtype``: the dtype that ``"analytic"`` computes in.

    All other options are those of `PipelineStrategy`.
    """
    options = PlanOptions.among(locals())
    target = Target(cluster, devices, cost, batch_size, optimizer_factor, dtype)
    return plan_for(captured_or_module, args, kwargs, options, target)


@dataclass(frozen=True)
class Target:
    """The devices, costs and batch that a plan is made for."""

    cluster: Cluster | str | Path | None = None
    devices: Annotated[int, Range(1, MOST_DEVICES)] | None = None
    cost: Literal["auto", "profile", "analytic"] | str | Path = "auto"
    batch_size: Positive | None = None
    """Samples of one step, over all replicas."""
    optimizer_factor: Annotated[float, Range(0, 1000)] = 2.0
    dtype: str | None = None
    each_replica: bool = False
    """Whether `batch_size` is that of one replica, as under Lightning, where every replica has its own loader. The plan
    with the most samples per second is then the best."""
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    """The precision in which ops are measured."""
    variant: str = ""
    """The name of the precision in which ops are measured."""

    def __post_init__(self) -> None:
        check_fields(self)
        for name, kinds in (("cluster", (Cluster, str, Path, type(None))), ("cost", (str, Path))):
            if not isinstance(getattr(self, name), kinds):
                raise PlanError(f"{name} must be a name or a path, got {shortened(getattr(self, name))}")


def plan_for(
    captured_or_module: Captured | Recording | nn.Module | Callable[..., Any],
    args: Sequence[Any] | None,
    kwargs: Mapping[str, Any] | None,
    options: PlanOptions,
    target: Target,
) -> Plan:
    """Make the plan that `plan` returns. The command line calls this to plan for one loader per replica."""
    stages, microbatches = options.stages, options.microbatches
    if options.schedule.endswith(".csv"):  # the file fixes the numbers of stages and micro-batches
        written = read_csv(options.schedule)
        stages = written.stages if stages == "auto" else stages
        microbatches = written.microbatches if microbatches == "auto" else microbatches
    recording, graph = _recorded(captured_or_module, args, kwargs)
    where = _cluster(target.cluster, target.devices, stages, options.replicas)
    captured_batch = batch_of(recording)
    source = _source(target, recording, graph, where, captured_batch, args, kwargs)
    request = options.request(
        captured_batch if target.batch_size is None else target.batch_size,
        devices=where.size,
        cluster=where,
        stages=stages,
        microbatches=microbatches,
        each_replica=target.each_replica,
        optimizer_factor=target.optimizer_factor,
    )
    frozen = {name for name, p in recording.root.named_parameters() if not p.requires_grad}
    return search(graph, source, parameter_sizes(recording.root), request, frozen=frozen)


def layout_of(plan: Plan, options: PlanOptions, target: Target) -> Layout:
    """Return the devices and links for which `plan_for` has made a plan."""
    where = _cluster(target.cluster, target.devices, plan.stages, plan.replicas)
    return Layout.on(where, plan.stages, plan.replicas, memory_limit=options.memory_limit)


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
    target: Target,
    recording: Recording,
    graph: OpGraph,
    cluster: Cluster,
    captured_batch: int,
    args: Sequence[Any] | None,
    kwargs: Mapping[str, Any] | None,
) -> Costs:
    meta = any(p.is_meta for p in recording.root.parameters())
    cost, here = target.cost, target.cluster is None or cluster.name == "local"
    if cost == "auto":
        cost = "profile" if here and not meta and (args is not None or kwargs) else "analytic"
    if cost == "analytic":
        return Analytic(graph, cluster, captured_batch, target.dtype)
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
    return Profiled(recording, leaves, cluster.size, target.context, target.variant)
