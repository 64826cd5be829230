"""How the replicas of a stage are kept in step: one class for each mode.

A mode owns what happens when a gradient is final, which replica makes an update, and when parameters are whole again. The
executor only tells it when gradients are final. Modes of replicas that make updates of their own (`loose`) are told of each
update instead. `modes` makes the one that the option `sync` names.
"""

from pipepart.runtime.sync.borrowed_parameters import BorrowedParameters
from pipepart.runtime.sync.buckets import BucketedSync
from pipepart.runtime.sync.loose import LooseReplicas
from pipepart.runtime.sync.modes import loose_replicas, neighbours, replica_sync
from pipepart.runtime.sync.replica_mean import ReplicaMean
from pipepart.runtime.sync.replica_owners import ReplicaOwners, balanced_owners
from pipepart.runtime.sync.replica_shares import ReplicaShares

__all__ = [
    "BorrowedParameters",
    "BucketedSync",
    "LooseReplicas",
    "ReplicaMean",
    "ReplicaOwners",
    "ReplicaShares",
    "balanced_owners",
    "loose_replicas",
    "neighbours",
    "replica_sync",
]
