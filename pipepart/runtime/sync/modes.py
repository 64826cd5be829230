"""The mode that the option `sync` names, for one stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from pipepart.planning.sync_mode import SyncMode
from pipepart.runtime.mesh import Groups
from pipepart.runtime.parts import Ownership
from pipepart.runtime.sync.buckets import BucketedSync
from pipepart.runtime.sync.nested_mean import Levels, NestedMean
from pipepart.runtime.sync.replica_mean import ReplicaMean
from pipepart.runtime.sync.replica_owners import ReplicaOwners, balanced_owners

__all__ = ["replica_sync"]

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_MASTER = 0


def replica_sync(
    mode: SyncMode,
    ownership: Ownership,
    groups: Groups,
    tied: set[str],
    named: Callable[[], Mapping[str, nn.Parameter]],
) -> BucketedSync | None:
    """Return the sync of the stage of this rank with its copies; None with one replica. All ranks must call it together.

    `tied`: the parameters that are summed over stages first; `named` returns those of this stage by name: a model that
    is built on the meta device gets others after set-up.
    """
    if groups.copies is None:
        return None
    replicas, uses = groups.mesh.replicas, ownership.uses(groups.stage)
    compress = _DTYPES[mode.compress] if mode.compress is not None else None
    mode.check_replicas(replicas)
    if mode.inside is not None:
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
    return ReplicaOwners(groups.copies, replicas, uses, tied, compress, owners=owners, named=named)
