"""The mode that the option `sync` names, for one stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from pipepart.devices import backend_for
from pipepart.planning.sync_mode import SyncMode
from pipepart.runtime.mesh import Groups, connect, own_group
from pipepart.runtime.parts import Ownership
from pipepart.runtime.strangers import closed_to_strangers
from pipepart.runtime.sync.buckets import BucketedSync
from pipepart.runtime.sync.loose import LooseReplicas
from pipepart.runtime.sync.nested_mean import Levels, NestedMean
from pipepart.runtime.sync.replica_average import ReplicaAverage
from pipepart.runtime.sync.replica_mean import ReplicaMean
from pipepart.runtime.sync.replica_owners import ReplicaOwners, balanced_owners
from pipepart.runtime.sync.replica_ring import ReplicaRing
from pipepart.runtime.sync.replica_shares import ReplicaShares

__all__ = ["loose_replicas", "neighbours", "replica_sync"]

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_MASTER = 0


def replica_sync(
    mode: SyncMode,
    ownership: Ownership,
    groups: Groups,
    tied: set[str],
    named: Callable[[], Mapping[str, nn.Parameter]],
) -> BucketedSync | None:
    """Return the exchange of gradients of the stage of this rank with its copies. All ranks must call it together.

    None: gradients are not exchanged, since there is one replica, or each makes updates of its own. If groups of replicas do,
    gradients are exchanged in the group of this rank.

    `tied`: the parameters that are summed over stages first; `named` returns those of this stage by name: a model that
    is built on the meta device gets others after set-up.
    """
    if groups.copies is None or (mode.apart and mode.size is None):
        return None
    replicas, uses = groups.mesh.replicas, ownership.uses(groups.stage)
    compress = _DTYPES[mode.compress] if mode.compress is not None else None
    mode.check_replicas(replicas)
    if mode.size is not None:
        group = neighbours(groups, mode.size, backend_for(groups.device))
        connect(group, groups.device)
        groups.watch_over(group)
        made = ReplicaMean(group, mode.size, uses, tied, compress)
        made.own_groups.append(group)
        return made
    if mode.inside is not None:
        assert isinstance(mode.inside, int)
        levels = Levels.create(groups, mode.inside)
        return NestedMean(groups.copies, replicas, uses, tied, compress, levels=levels)
    if mode.mode == "mean":
        return ReplicaMean(groups.copies, replicas, uses, tied, compress)
    parameters = named()
    if mode.mode == "master":
        owners = dict.fromkeys(parameters, _MASTER)
    else:
        sizes = {name: p.numel() * p.element_size() for name, p in parameters.items()}
        owners = balanced_owners(sizes, replicas, {name for name, p in parameters.items() if p.requires_grad})
    if mode.mode == "fsdp":
        once = mode.gather != "microbatch"
        in_order = {name: owners[name] for name in parameters}
        return ReplicaShares(groups, uses, tied, compress, owners=in_order, named=named, once=once)
    return ReplicaOwners(groups.copies, replicas, uses, tied, compress, owners=owners, named=named)


def neighbours(groups: Groups, size: int, backend: str) -> dist.ProcessGroup:
    """Return the group of the copies of a stage in `size` neighbouring replicas. All ranks must call it together."""
    mesh, limit = groups.mesh, timedelta(seconds=groups.timeout)
    ranks = [
        mesh.copies(stage)[begin : begin + size]
        for stage in range(mesh.stages)
        for begin in range(0, mesh.replicas, size)
    ]
    with closed_to_strangers():
        found = own_group(groups.rank, ranks, limit, backend)
    assert found is not None
    return found


def loose_replicas(
    mode: SyncMode, groups: Groups, tied: set[str], named: Callable[..., Mapping[str, nn.Parameter]]
) -> LooseReplicas | None:
    """Return the exchange of parameters between replicas that make updates of their own; None in other modes.

    All ranks must call it together.
    """
    if groups.copies is None or not mode.apart:
        return None
    if mode.mode == "ring":
        return ReplicaRing(groups, named, mode.staleness, tied)
    return ReplicaAverage(groups.copies, groups.mesh.replicas, named, mode, tied)
