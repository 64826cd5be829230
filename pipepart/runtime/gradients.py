"""Gradients of a stage: sums over tied parameters, means over replicas, weights of accumulated batches, norms.

Means over replicas start while the backward still runs. During the last backward of a chunk, gradients become final one
after the other, from the end of the chunk to its beginning. Buckets are filled in that order and sent in one fixed order,
since collectives of all replicas must match. Earlier micro-batches send nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from pipepart.devices import backend_for
from pipepart.runtime.mesh import Groups, connect, own_group
from pipepart.runtime.parts import Ownership
from pipepart.runtime.strangers import closed_to_strangers
from pipepart.runtime.tracing import Trace
from pipepart.schedule import Action

__all__ = ["Accumulation", "GradientSync", "ReplicaMean", "clip_grad_norm", "gradient_norm"]

_MOST_BYTES = 25 * 2**20
_LEAST_BYTES = 2**20  # smaller messages cost more than they save
_PARTS = 4  # so that a small model, too, sends gradients before its backward ends
_ROUNDING = 1e-12


class GradientSync:
    """The collectives on gradients of one stage. All ranks create it together."""

    def __init__(self, ownership: Ownership, groups: Groups | None) -> None:
        self.mean: ReplicaMean | None = None
        """The mean over replicas; None with one replica."""
        self._tied: dict[str, dist.ProcessGroup] = {}
        self._first_chunk = 0
        if groups is None:
            return
        uses = ownership.uses(groups.stage)
        self._first_chunk = min((chunk for chunks in uses.values() for chunk in chunks), default=0)
        made: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        for name, stages in ownership.tied.items():
            if stages not in made:
                ranks = [[groups.mesh.rank(r, stage) for stage in stages] for r in range(groups.mesh.replicas)]
                with closed_to_strangers():
                    both = backend_for(groups.device)
                    made[stages] = own_group(groups.rank, ranks, timedelta(seconds=groups.timeout), both)
                connect(made[stages], groups.device)
                groups.watch_over(made[stages])
            own = made[stages]
            if own is not None:
                self._tied[name] = own
        if groups.copies is not None:
            self.mean = ReplicaMean(groups.copies, groups.mesh.replicas, uses, set(self._tied))

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """The process groups over tied parameters of this rank."""
        return list(self._tied.values())

    def begin(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Start a step whose gradients are reduced."""
        if self.mean is not None:
            self.mean.begin(parameters)

    def reduce(self, parameters: Mapping[str, nn.Parameter], trace: Trace | None = None) -> None:
        """Make the new gradients in `.grad` final: sum over tied copies, then mean over replicas."""
        if not self._tied and self.mean is None:
            return
        started = trace.now() if trace is not None else None
        for name, group in self._tied.items():
            parameter = parameters[name]
            if parameter.requires_grad:
                if parameter.grad is None:  # no gradient reached this copy, and the other stages wait for its share
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad, group=group)
        if self.mean is not None:
            self.mean.finish()
        if trace is not None:
            trace.add(Action("REDUCE", self._first_chunk, 0), started)


@dataclass
class _Bucket:
    parameters: list[nn.Parameter]
    missing: int = 0
    flat: torch.Tensor | None = None
    absent: list[int] = field(default_factory=list)
    """Parameters without a gradient on this rank."""
    work: dist.Work | None = field(default=None, repr=False)


class ReplicaMean:
    """Averages the gradients of one stage over its copies in all replicas."""

    def __init__(
        self, group: dist.ProcessGroup, replicas: int, uses: Mapping[str, Sequence[int]], late: set[str]
    ) -> None:
        """`uses`: the chunks of this stage that use each parameter; `late`: tied parameters, which are summed first."""
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
        self._buckets = list(_buckets([p for _, p in order]))
        self._bucket_of = {id(p): bucket for bucket in self._buckets for p in bucket.parameters}
        for _, parameter in order:
            if id(parameter) not in self._hooked:
                self._hooked.add(id(parameter))
                parameter.register_post_accumulate_grad_hook(self._ready)

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

    def _send(self, bucket: _Bucket) -> None:
        """Send one vector: the gradients, and for each parameter whether it has one, since replicas may take other branches."""
        first = bucket.parameters[0]
        parts = [torch.zeros_like(p).reshape(-1) if p.grad is None else p.grad.reshape(-1) for p in bucket.parameters]
        have = torch.ones(len(bucket.parameters), dtype=first.dtype, device=first.device)
        bucket.absent = [index for index, p in enumerate(bucket.parameters) if p.grad is None]
        for index in bucket.absent:
            have[index] = 0.0
        bucket.flat = torch.cat([*parts, have])
        bucket.work = dist.all_reduce(bucket.flat, group=self._group, async_op=True)

    @torch.no_grad()
    def finish(self) -> None:
        """Send the remaining buckets, wait for all of them, and put the means into `.grad`."""
        for bucket in self._buckets[self._next :]:
            self._send(bucket)
        for bucket in self._buckets:
            assert bucket.flat is not None and bucket.work is not None
            bucket.work.wait()
            count = len(bucket.parameters)
            sizes = [p.numel() for p in bucket.parameters]
            *means, have = torch.split(bucket.flat.div_(self._replicas), [*sizes, count])
            # Only a parameter without a gradient here must be looked up, which makes the host wait for the device.
            none = {i for i, some in enumerate(have.tolist()) if not some} if bucket.absent else set()
            for index, (parameter, mean) in enumerate(zip(bucket.parameters, means)):
                if index not in none:
                    parameter.grad = mean.view_as(parameter)
            bucket.flat = bucket.work = None


def _buckets(parameters: Sequence[nn.Parameter]) -> Iterator[_Bucket]:
    """Yield buckets of neighbouring parameters of one dtype, of at most `_MOST_BYTES` each."""
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


class Accumulation:
    """The weights of batches whose gradients are added for one step of the optimizer.

    One process on all of these batches at once divides by the sum of their denominators (tokens, samples). That sum is
    unknown while the first batch runs, so earlier gradients are rescaled when the next batch comes.
    """

    def __init__(self) -> None:
        self._count = 0
        self._total = 0.0
        self._equal = False

    def add(self, denominator: float | None, continues: bool, batches: int | None = None) -> tuple[float, float]:
        """Return the factors of the earlier gradients and of those of the next batch.

        After k batches with denominators D, batch i has the weight ``k D_i / sum(D)``, which is 1 if all are equal. A
        `denominator` of None: the loss has several, and all batches of the step have equal weights. `batches`: the loss is
        divided by the denominators of so many batches together already, and is multiplied by their number.
        """
        if not continues:
            self._count, self._total, self._equal = 0, 0.0, False
        if batches is not None:
            self._equal = True
            return 1.0, float(batches)
        count, total = self._count, self._total
        self._count += 1
        self._equal = self._equal or denominator is None
        if self._equal or denominator is None:
            return 1.0, 1.0
        self._total = total + denominator
        if not count or not self._total:
            return 1.0, 1.0
        kept = (
            self._count / count * total / self._total if total else 1.0
        )  # without targets, earlier gradients are zero
        return _rounded(kept), _rounded(self._count * denominator / self._total)


def _rounded(factor: float) -> float:
    return 1.0 if abs(factor - 1.0) < _ROUNDING else factor


@torch.no_grad()
def gradient_norm(counted: Sequence[nn.Parameter], groups: Groups | None, device: torch.device) -> torch.Tensor:
    """Return the 2-norm of all gradients of the model, in float64.

    `counted`: the parameters that this stage contributes, each of them on one stage only; it may be empty.
    """
    gradients = [_countable(p.grad) for p in counted if p.grad is not None]
    if gradients:
        norm = nn.utils.get_total_norm(gradients).to(device, torch.float64)
    else:
        norm = torch.zeros((), device=device, dtype=torch.float64)
    if groups is None or groups.mesh.stages == 1:
        return norm
    square = norm.square()
    dist.all_reduce(square, group=groups.pipeline)
    return square.sqrt()


def _countable(gradient: torch.Tensor) -> torch.Tensor:
    """Return a dense tensor of the same norm, in a dtype in which `get_total_norm` is exact."""
    if gradient.is_sparse:
        gradient = gradient.coalesce().values()
    if gradient.dtype in (torch.float16, torch.bfloat16):  # their own norms would be rounded to 16 bits
        return torch.linalg.vector_norm(gradient, dtype=torch.float32)
    return gradient


def clip_grad_norm(
    counted: Sequence[nn.Parameter],
    clipped: Sequence[nn.Parameter],
    max_norm: float,
    groups: Groups | None,
    device: torch.device,
) -> torch.Tensor:
    """Clip gradients by the 2-norm of all gradients of the model, and return that norm.

    `counted`: as for `gradient_norm`; `clipped`: the parameters of this stage to clip; both may be empty.
    """
    if groups is None or groups.mesh.stages == 1:
        return nn.utils.clip_grad_norm_(clipped, max_norm)
    norm = gradient_norm(counted, groups, device)
    # In float64 on every stage, so that copies of a tied parameter get the same factor.
    nn.utils.clip_grads_with_norm_(clipped, max_norm, norm)
    return norm
