"""The mean of gradients over replicas, in buckets that set off as soon as their gradients are final.

While the last backward of a chunk runs, gradients become final one after the other, from the end of the chunk to its
beginning. Buckets are filled in that order and sent in one fixed order (collectives of all replicas must match), so
most of the traffic runs beside the rest of the backward. Earlier micro-batches send nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

__all__ = ["ReplicaMean"]

_MOST_BYTES = 25 * 2**20
_LEAST_BYTES = 2**20  # less is not worth a message of its own
_PARTS = 4  # so that even a small model has something to send before its backward ends


@dataclass
class _Bucket:
    parameters: list[nn.Parameter]
    missing: int = 0
    flat: torch.Tensor | None = None
    work: dist.Work | None = field(default=None, repr=False)


class ReplicaMean:
    """Averages the gradients of one stage over its copies in all replicas."""

    def __init__(
        self, group: dist.ProcessGroup, replicas: int, uses: Mapping[str, Sequence[int]], late: set[str]
    ) -> None:
        """`uses`: the chunks of this stage that use each parameter; `late`: what is summed over stages first (ties)."""
        self._group, self._replicas = group, replicas
        self._chunk = {name: chunks[0] for name, chunks in uses.items() if len(chunks) == 1 and name not in late}
        self._hooked: set[int] = set()
        self._trainable: list[int] = []
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[int, _Bucket] = {}
        self._final: set[int] = set()
        self._chunk_of: dict[int, int] = {}
        self._next = 0
        self._open: int | None = None

    def begin(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """A new step."""
        trainable = [(name, p) for name, p in parameters.items() if p.requires_grad]
        now = [id(p) for _, p in trainable]
        if now != self._trainable:  # the first step, or something was frozen or thawed since the last one
            self._arrange(trainable)
            self._trainable = now
        for bucket in self._buckets:
            bucket.missing, bucket.flat, bucket.work = len(bucket.parameters), None, None
        self._final, self._next, self._open = set(), 0, None

    def _arrange(self, trainable: Sequence[tuple[str, nn.Parameter]]) -> None:
        """The buckets. Parameters that several chunks use, and ties, go last: they are final at the end only."""
        order = [(name, p) for name, p in reversed(trainable) if name in self._chunk]
        order.sort(key=lambda item: -self._chunk[item[0]])  # the backward of later chunks ends first
        order += [(name, p) for name, p in trainable if name not in self._chunk]
        self._chunk_of = {id(p): self._chunk[name] for name, p in order if name in self._chunk}
        self._buckets = list(_buckets([p for _, p in order]))
        self._bucket_of = {id(p): bucket for bucket in self._buckets for p in bucket.parameters}
        for _, parameter in order:
            if id(parameter) not in self._hooked:
                self._hooked.add(id(parameter))
                parameter.register_post_accumulate_grad_hook(self._ready)

    @contextmanager
    def last_backward(self, chunk: int) -> Iterator[None]:
        """Inside, the gradients of this chunk are final as soon as they are there."""
        self._open = chunk
        try:
            yield
        finally:
            self._open = None

    def chunk_is_final(self, chunk: int) -> None:
        """All gradients of this chunk are final, also those that there are none of."""
        for key, home in self._chunk_of.items():
            if home == chunk:
                self._settle(key)
        self._send_full()

    def _ready(self, parameter: torch.Tensor) -> None:
        if self._open is not None and self._chunk_of.get(id(parameter)) == self._open:
            self._settle(id(parameter))
            self._send_full()

    def _settle(self, key: int) -> None:
        if key not in self._final:
            self._final.add(key)
            self._bucket_of[key].missing -= 1

    def _send_full(self) -> None:
        while self._next < len(self._buckets) and self._buckets[self._next].missing == 0:
            self._send(self._buckets[self._next])
            self._next += 1

    def _send(self, bucket: _Bucket) -> None:
        """One vector: the gradients, and for each parameter whether it has one (replicas may take different branches)."""
        first = bucket.parameters[0]
        parts = [torch.zeros_like(p).reshape(-1) if p.grad is None else p.grad.reshape(-1) for p in bucket.parameters]
        have = torch.tensor(
            [float(p.grad is not None) for p in bucket.parameters], dtype=first.dtype, device=first.device
        )
        bucket.flat = torch.cat([*parts, have])
        bucket.work = dist.all_reduce(bucket.flat, group=self._group, async_op=True)

    @torch.no_grad()
    def finish(self) -> None:
        """Send what is left, wait for all, and put the means into `.grad`."""
        for bucket in self._buckets[self._next :]:
            self._send(bucket)
        for bucket in self._buckets:
            assert bucket.flat is not None and bucket.work is not None
            bucket.work.wait()
            count = len(bucket.parameters)
            sizes = [p.numel() for p in bucket.parameters]
            *means, have = torch.split(bucket.flat.div_(self._replicas), [*sizes, count])
            for parameter, mean, some in zip(bucket.parameters, means, have.tolist()):
                if some:
                    parameter.grad = mean.view_as(parameter)
            bucket.flat = bucket.work = None


def _buckets(parameters: Sequence[nn.Parameter]) -> Iterator[_Bucket]:
    """Neighbouring parameters of one dtype, a few buckets of at most `_MOST_BYTES` each."""
    total = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
    most = min(_MOST_BYTES, max(_LEAST_BYTES, total // _PARTS))
    bucket: list[nn.Parameter] = []
    size = 0
    for parameter in parameters:
        full = size + parameter.numel() * parameter.element_size() > most
        if bucket and (full or parameter.dtype != bucket[0].dtype):
            yield _Bucket(bucket)
            bucket, size = [], 0
        bucket.append(parameter)
        size += parameter.numel() * parameter.element_size()
    if bucket:
        yield _Bucket(bucket)
