"""The mode `fsdp`: parameters, gradients and optimizer states of a stage are divided among the replicas (ZeRO-3).

```
step         owner --broadcast--> all replicas, for the visits to a chunk     the others give it back
backward     gradients of a bucket are final --reduce--> owner                the others let go of them
update       owner: optimizer.step()                                          the others skip it; nothing is sent
```

Owners have whole parameters, as with `sharded`: leaves of recorded chunks are the modules of the user's model, which read plain
parameters, and an optimizer may look at the shape of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import nn

from pipepart.runtime.mesh import Groups
from pipepart.runtime.sync.borrowed_parameters import BorrowedParameters
from pipepart.runtime.sync.buckets import Bucket
from pipepart.runtime.sync.replica_owners import ReplicaOwners

__all__ = ["ReplicaShares"]


class ReplicaShares(ReplicaOwners):
    """Brings gradients to the owners of their parameters, and parameters to all replicas while these work."""

    def __init__(
        self,
        groups: Groups,
        uses: Mapping[str, Sequence[int]],
        late: set[str],
        compress: torch.dtype | None,
        *,
        owners: Mapping[str, int],
        named: Callable[[], Mapping[str, nn.Parameter]],
        once: bool,
    ) -> None:
        """See `ReplicaOwners` and `BorrowedParameters`."""
        assert groups.copies is not None
        super().__init__(groups.copies, groups.mesh.replicas, uses, late, compress, owners=owners, named=named)
        self.borrowed = BorrowedParameters(groups, owners, named, once)

    def flags(self, bucket: Bucket) -> list[torch.Tensor]:
        """Tell nothing: values come from the owner, whoever has changed them there."""
        return []

    @torch.no_grad()
    def send_parameters(self, parameters: Iterable[torch.Tensor]) -> None:
        """Send nothing: parameters come when a replica works with them."""

    def show_gradients(self) -> None:
        """Give every replica the gradients, and the parameters that they belong to. All replicas must call it."""
        self.borrowed.show("gradients")
        super().show_gradients()

    def hide_gradients(self) -> None:
        super().hide_gradients()
        self.borrowed.hide("gradients")
