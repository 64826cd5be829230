"""Gradients of one stage that are final one after the other, in buckets that are sent to the other replicas.

Exchanges between replicas start while the backward still runs. During the last backward of a chunk, gradients become final
from the end of the chunk to its beginning. Buckets are filled in that order and sent in one fixed order, since collectives of
all replicas must match. Earlier micro-batches send nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

__all__ = ["MOST_BYTES", "Bucket", "BucketedSync", "as_real", "buckets_of"]

MOST_BYTES = 25 * 2**20
"""Bytes of a bucket, at most, unless a single parameter is larger."""
_LEAST_BYTES = 2**20  # smaller messages cost more than they save
_PARTS = 4  # so that a small model, too, sends gradients before its backward ends


@dataclass(eq=False)
class Bucket:
    """Parameters whose gradients travel together."""

    parameters: list[nn.Parameter]
    owner: int = -1
    """The replica that updates them; -1: every replica."""
    missing: int = 0
    flat: torch.Tensor | None = None
    absent: list[int] = field(default_factory=list)
    """Parameters without a gradient on this rank."""
    work: dist.Work | None = field(default=None, repr=False)
    before: dist.Work | None = field(default=None, repr=False)
    """An earlier part of the exchange, which must end, too."""
    result: torch.Tensor | None = None
    """The vector that comes back, if it is not the one that was sent."""


class BucketedSync:
    """The exchange of the gradients of one stage with its copies in all replicas. A mode says how a bucket is sent."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        replicas: int,
        uses: Mapping[str, Sequence[int]],
        late: set[str],
        compress: torch.dtype | None = None,
    ) -> None:
        """`uses`: the chunks of this stage that use each parameter; `late`: tied parameters, which are summed first.

        `compress`: the dtype in which gradients travel, if it is not their own.
        """
        self.group, self.replicas, self._compress = group, replicas, compress
        self.own_groups: list[dist.ProcessGroup] = []
        """The process groups that this mode has made."""
        self._chunk = {name: chunks[0] for name, chunks in uses.items() if len(chunks) == 1 and name not in late}
        self._hooked: set[int] = set()
        self._trainable: list[int] = []
        self._buckets: list[Bucket] = []
        self._bucket_of: dict[int, Bucket] = {}
        self._final: set[int] = set()
        self._chunk_of: dict[int, int] = {}
        self._next = 0
        self._open: int | None = None

    def begin(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Start a step."""
        trainable = [(name, p) for name, p in parameters.items() if p.requires_grad]
        now = [id(p) for _, p in trainable]
        if now != self._trainable:  # the first step, or parameters were frozen or unfrozen
            self._arrange(trainable)
            self._trainable = now
        for bucket in self._buckets:
            bucket.missing, bucket.flat, bucket.work = len(bucket.parameters), None, None
        self._final, self._next, self._open = set(), 0, None

    def _arrange(self, trainable: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Make the buckets. Parameters of several chunks and tied parameters come last, since they are final at the end."""
        order = [(name, p) for name, p in reversed(trainable) if name in self._chunk]
        order.sort(key=lambda item: -self._chunk[item[0]])  # the backward of later chunks ends first
        order += [(name, p) for name, p in trainable if name not in self._chunk]
        self._chunk_of = {id(p): self._chunk[name] for name, p in order if name in self._chunk}
        self._buckets = self.divided(order)
        self._bucket_of = {id(p): bucket for bucket in self._buckets for p in bucket.parameters}
        for _, parameter in order:
            if id(parameter) not in self._hooked:
                self._hooked.add(id(parameter))
                parameter.register_post_accumulate_grad_hook(self._ready)

    def divided(self, order: Sequence[tuple[str, nn.Parameter]]) -> list[Bucket]:
        """Divide parameters, in the order in which their gradients become final, into buckets."""
        return buckets_of([(p, -1) for _, p in order])

    def weigh(self, denominator: float | None) -> None:
        """Note the denominator of the loss over the batches of this step; None if it has none, or several.

        Most modes need none: weights of replicas are in the loss already.
        """

    @contextmanager
    def last_backward(self, chunk: int) -> Iterator[None]:
        """Treat gradients of this chunk as final as soon as they are accumulated."""
        self._open = chunk
        try:
            yield
        finally:
            self._open = None

    def chunk_is_final(self, chunk: int) -> None:
        """Mark all gradients of this chunk as final, including parameters without a gradient."""
        for key, home in self._chunk_of.items():
            if home == chunk:
                self._mark_final(key)
        self._send_full()

    def _ready(self, parameter: torch.Tensor) -> None:
        if self._open is not None and self._chunk_of.get(id(parameter)) == self._open:
            self._mark_final(id(parameter))
            self._send_full()

    def _mark_final(self, key: int) -> None:
        if key not in self._final:
            self._final.add(key)
            self._bucket_of[key].missing -= 1

    def _send_full(self) -> None:
        while self._next < len(self._buckets) and self._buckets[self._next].missing == 0:
            self._send(self._buckets[self._next])
            self._next += 1

    def _send(self, bucket: Bucket) -> None:
        """Send one vector: the gradients, and for each parameter whether it has one, since replicas may take other branches."""
        bucket.flat = self._compressed(self.packed(bucket))
        bucket.work = self.start(bucket)

    def packed(self, bucket: Bucket) -> torch.Tensor:
        """Return the vector of a bucket."""
        first = bucket.parameters[0]
        parts = [torch.zeros_like(p).reshape(-1) if p.grad is None else p.grad.reshape(-1) for p in bucket.parameters]
        have = torch.ones(len(bucket.parameters), dtype=first.dtype, device=first.device)
        bucket.absent = [index for index, p in enumerate(bucket.parameters) if p.grad is None]
        for index in bucket.absent:
            have[index] = 0.0
        return torch.cat([*parts, have, *self.flags(bucket)])

    def _compressed(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the mean's share of a vector in the dtype in which it travels."""
        if self._compress is None or flat.is_complex() or flat.element_size() <= self._compress.itemsize:
            return flat
        return flat.div_(self.replicas).to(self._compress)

    def _to_mean(self, bucket: Bucket) -> None:
        """Make the sum that has come the mean over replicas."""
        assert bucket.flat is not None
        own = bucket.parameters[0].dtype
        bucket.flat = bucket.flat.div_(self.replicas) if bucket.flat.dtype == own else bucket.flat.to(own)

    @torch.no_grad()
    def finish(self) -> None:
        """Send the remaining buckets, wait for all of them, and put the means into `.grad`."""
        for bucket in self._buckets[self._next :]:
            self._send(bucket)
        self._next = len(self._buckets)
        for bucket in self._buckets:
            self.wait(bucket)
            self._to_mean(bucket)
            self.end(bucket)
            bucket.flat = bucket.work = None

    def unpack(self, bucket: Bucket) -> None:
        """Put the means of a bucket into `.grad`."""
        sizes = [p.numel() for p in bucket.parameters]
        assert bucket.flat is not None
        *means, have = torch.split(bucket.flat[: sum(sizes) + len(sizes)], [*sizes, len(sizes)])
        # Only a parameter without a gradient here must be looked up, which makes the host wait for the device.
        none = {i for i, some in enumerate(have.tolist()) if not some} if bucket.absent else set()
        for index, (parameter, mean) in enumerate(zip(bucket.parameters, means)):
            if index not in none:
                parameter.grad = mean.view_as(parameter)

    # ---- what a mode decides

    def flags(self, bucket: Bucket) -> list[torch.Tensor]:
        """Return what a vector holds besides gradients and their presence."""
        return []

    def start(self, bucket: Bucket) -> dist.Work | None:
        """Start the exchange of a vector whose gradients are final on this rank."""
        raise NotImplementedError

    def wait(self, bucket: Bucket) -> None:
        """Wait for the end of an exchange."""
        assert bucket.work is not None
        bucket.work.wait()

    def end(self, bucket: Bucket) -> None:
        """Take the mean of an exchange that has ended."""
        raise NotImplementedError


def buckets_of(parameters: Sequence[tuple[nn.Parameter, int]], parts: int = _PARTS) -> list[Bucket]:
    """Divide parameters, each with its owner, into buckets of one dtype and one owner, of at most `MOST_BYTES` each.

    Neighbours of one owner share a bucket. The buckets are in the order of their last parameters.
    """
    total = sum(parameter.numel() * parameter.element_size() for parameter, _ in parameters)
    most = min(MOST_BYTES, max(_LEAST_BYTES, total // parts))
    full: list[Bucket] = []
    filling: dict[int, tuple[Bucket, int, int]] = {}
    for place, (parameter, owner) in enumerate(parameters):
        size = parameter.numel() * parameter.element_size()
        bucket, filled, _ = filling.get(owner, (None, 0, 0))
        if bucket is not None and (filled + size > most or parameter.dtype != bucket.parameters[0].dtype):
            full.append(bucket)
            bucket, filled = None, 0
        if bucket is None:
            bucket = Bucket([], owner)
        bucket.parameters.append(parameter)
        filling[owner] = bucket, filled + size, place
    rest = sorted(filling.values(), key=lambda item: item[2])
    return [*full, *(bucket for bucket, _, _ in rest)]


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """Return the view of a tensor that every collective takes."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
