"""Tensors that travel from the replica that owns them to all others, some of them together."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

from pipepart.runtime.sync.buckets import MOST_BYTES, as_real

__all__ = ["Parcel", "parcels_of"]


class Parcel:
    """Tensors of one dtype that travel from one owner as one vector."""

    def __init__(self, owner: int) -> None:
        self.owner = owner
        self.tensors: list[torch.Tensor] = []
        self.bytes = 0
        self._flat: torch.Tensor | None = None
        self._work: dist.Work | None = None
        self._copies = False

    def send(self, source: int, group: dist.ProcessGroup, own: bool) -> None:
        """Start the transfer. A large tensor travels from its own memory."""
        direct = len(self.tensors) == 1 and self.tensors[0].is_contiguous()
        if direct:
            self._flat = self.tensors[0]
        elif own:
            self._flat = torch.cat([tensor.reshape(-1) for tensor in self.tensors])
        else:
            count = sum(tensor.numel() for tensor in self.tensors)
            self._flat = self.tensors[0].new_empty(count)
        self._copies = not own and not direct
        self._work = dist.broadcast(as_real(self._flat), source, group=group, async_op=True)

    def arrive(self) -> None:
        """Wait for the transfer, and copy what has come."""
        assert self._flat is not None and self._work is not None
        self._work.wait()
        if self._copies:
            parts = self._flat.split([tensor.numel() for tensor in self.tensors])
            for tensor, part in zip(self.tensors, parts):
                tensor.copy_(part.view(tensor.shape))
        self._flat = self._work = None


def parcels_of(tensors: Iterable[tuple[torch.Tensor, int]], most: int = MOST_BYTES) -> list[Parcel]:
    """Divide tensors, each with its owner, into parcels of at most `most` bytes; a larger tensor travels alone."""
    found: list[Parcel] = []
    filling: dict[tuple[int, torch.dtype], Parcel] = {}
    for tensor, owner in tensors:
        if not tensor.numel():
            continue
        size = tensor.numel() * tensor.element_size()
        parcel = filling.get((owner, tensor.dtype))
        if parcel is None or parcel.bytes + size > most:
            parcel = filling[owner, tensor.dtype] = Parcel(owner)
            found.append(parcel)
        parcel.tensors.append(tensor)
        parcel.bytes += size
    return found
