"""Sources of costs: computed, read from a file or measured, for any size of a micro-batch and any kind of device."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch

from pipepart.cost import OpCosts, profiled
from pipepart.cost.analytic import analytic
from pipepart.cost.cluster import Cluster
from pipepart.devices import accelerator
from pipepart.errors import PlanError
from pipepart.graph import OpGraph
from pipepart.machine import shared_cores
from pipepart.recording import Recording
from pipepart.recording.inputs.batching import Batching, batching_of

__all__ = ["Analytic", "Costs", "Given", "Profiled", "batch_of", "resized"]


class Costs(Protocol):
    """A source of the costs of the ops of one graph for one micro-batch."""

    def at(self, microbatch_size: int, kind: str) -> OpCosts: ...


class _Kept:
    """A source that keeps the costs of each size and kind."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, str], OpCosts] = {}

    def at(self, microbatch_size: int, kind: str) -> OpCosts:
        key = (microbatch_size, kind)
        if key not in self._found:
            self._found[key] = self._make(microbatch_size, kind)
        return self._found[key]

    def _make(self, microbatch_size: int, kind: str) -> OpCosts:
        raise NotImplementedError


class Analytic(_Kept):
    """Costs computed from FLOPs and bytes on the roofline of a kind of device."""

    def __init__(self, graph: OpGraph, cluster: Cluster, captured_batch: int, dtype: str | None = None) -> None:
        super().__init__()
        self._graph, self._cluster, self._batch, self._dtype = graph, cluster, captured_batch, dtype

    def _make(self, microbatch_size: int, kind: str) -> OpCosts:
        scale = microbatch_size / self._batch
        return analytic(self._graph, self._cluster.kinds[kind], batch_scale=scale, dtype=self._dtype)


class Given(_Kept):
    """Costs from a file, for the batch that the graph was captured with; other sizes in proportion."""

    def __init__(self, costs: OpCosts, captured_batch: int) -> None:
        super().__init__()
        self._costs, self._batch = costs, captured_batch

    def _make(self, microbatch_size: int, kind: str) -> OpCosts:
        return self._costs.scaled(microbatch_size / self._batch)


class Profiled(_Kept):
    """Costs measured here at every size that is requested, since small micro-batches use a device less well."""

    def __init__(
        self,
        recording: Recording,
        leaves: Sequence[Any],
        processes_here: int = 1,
        context: Callable[[], AbstractContextManager[Any]] = nullcontext,
        variant: str = "",
    ) -> None:
        super().__init__()
        self._recording, self._leaves, self._processes = recording, list(leaves), processes_here
        self._context, self._variant = context, variant

    def _make(self, microbatch_size: int, kind: str) -> OpCosts:
        leaves = resized(self._leaves, microbatch_size, self._recording.batching)
        with _threads_of_a_rank(self._processes):
            return profiled(self._recording, leaves, self._context, self._variant, agree=bool)


def batch_of(recording: Recording) -> int:
    """Return the samples of the batch of a recording: as given, or dim 0 of its first tensor that has one."""
    if recording.batching is not None:
        return recording.batching.samples
    for spec in recording.inputs:
        if spec.kind == "tensor" and spec.shape:
            return int(spec.shape[0])
    raise PlanError(
        "the model takes no tensor with a batch dimension, so it cannot be split into micro-batches: expected at least one "
        f"tensor argument with dim 0 = samples, got {[spec.path for spec in recording.inputs]}"
    )


def resized(leaves: Sequence[Any], size: int, batching: Batching | None = None) -> list[Any]:
    """Return the leaves of a batch with another number of samples: fewer, or repeated ones.

    Leaves without samples stay as they are, and so does a batch that is split as a container.
    """
    dims = (batching or batching_of(leaves, [f"leaf {i}" for i in range(len(leaves))])).dims
    held = [dim is not None for dim in (*dims, *[None] * (len(leaves) - len(dims)))]

    def one(leaf: Any, samples: bool) -> Any:
        if not samples:
            return leaf
        times = -(-size // leaf.shape[0])
        return leaf.repeat(times, *[1] * (leaf.dim() - 1))[:size] if times > 1 else leaf[:size]

    return [one(leaf, samples) for leaf, samples in zip(leaves, held)]


@contextmanager
def _threads_of_a_rank(processes: int) -> Iterator[None]:
    """Use as many threads as one of so many processes has on this host."""
    before = torch.get_num_threads()
    if "OMP_NUM_THREADS" not in os.environ and accelerator() is None:
        torch.set_num_threads(shared_cores(processes))
    try:
        yield
    finally:
        torch.set_num_threads(before)
