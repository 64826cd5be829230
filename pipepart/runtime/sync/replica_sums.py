"""Sums of tensors over the replicas of a stage, in vectors of which several travel at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence

import torch
import torch.distributed as dist

from pipepart.runtime.sync.buckets import MOST_BYTES, as_real

__all__ = ["summed", "vectors"]

_UNDER_WAY = 4
"""Vectors that travel at once."""


def summed(
    tensors: Sequence[torch.Tensor], group: dist.ProcessGroup, alone: Collection[int] = ()
) -> Iterator[tuple[int, torch.Tensor]]:
    """Return the index of each tensor with its sum over a group, in one order. All members must iterate to the end.

    The tensors stay as they are; no more than a few vectors are held at once. The order in which three or more numbers are
    added depends on their place in a vector. The tensors with the indices `alone` travel alone: other groups that add up the
    same values get the same sums.
    """
    waiting: deque[tuple[list[int], torch.Tensor, dist.Work | None]] = deque()
    for places in vectors(tensors, alone):
        flat = torch.cat([tensors[place].detach().reshape(-1) for place in places])
        waiting.append((places, flat, dist.all_reduce(as_real(flat), group=group, async_op=True)))
        if len(waiting) == _UNDER_WAY:
            yield from _arrived(tensors, *waiting.popleft())
    while waiting:
        yield from _arrived(tensors, *waiting.popleft())


def _arrived(
    tensors: Sequence[torch.Tensor], places: list[int], flat: torch.Tensor, work: dist.Work | None
) -> Iterator[tuple[int, torch.Tensor]]:
    assert work is not None
    work.wait()
    for place, part in zip(places, flat.split([tensors[place].numel() for place in places])):
        yield place, part.view(tensors[place].shape)


def vectors(tensors: Sequence[torch.Tensor], alone: Collection[int] = ()) -> Iterator[list[int]]:
    """Divide tensors into vectors of one dtype, by their places; those `alone` are vectors of their own."""
    filling: dict[torch.dtype, tuple[list[int], int]] = {}
    for place, tensor in enumerate(tensors):
        if place in alone:
            yield [place]
            continue
        size = tensor.numel() * tensor.element_size()
        places, filled = filling.get(tensor.dtype, ([], 0))
        if places and filled + size > MOST_BYTES:
            yield places
            places, filled = [], 0
        places.append(place)
        filling[tensor.dtype] = places, filled + size
    yield from (places for places, _ in filling.values())
