"""Where the costs of a micro-batch come from, for any size of it and any kind of device."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Protocol

import torch

from pipepart.cost import OpCosts, profiled
from pipepart.cost.analytic import analytic
from pipepart.cost.cluster import Cluster
from pipepart.errors import PlanError
from pipepart.graph import OpGraph
from pipepart.recording import Recording
from pipepart.recording.inputs.batching import Batching, batching_of

__all__ = ["Analytic", "Costs", "Given", "Profiled", "batch_of", "resized", "scaled"]


class Costs(Protocol):
    """Costs of the ops of one graph for one micro-batch."""

    def at(self, microbatch_size: int, kind: str) -> OpCosts: ...


class _Kept:
    """Remembers what was asked before."""

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
    """FLOPs and bytes on the roofline of a kind of device."""

    def __init__(self, graph: OpGraph, cluster: Cluster, captured_batch: int, dtype: str | None = None) -> None:
        super().__init__()
        self._graph, self._cluster, self._batch, self._dtype = graph, cluster, captured_batch, dtype

    def _make(self, microbatch_size: int, kind: str) -> OpCosts:
        scale = microbatch_size / self._batch
        return analytic(self._graph, self._cluster.kinds[kind], batch_scale=scale, dtype=self._dtype)


class Given(_Kept):
    """Costs that were read, for the batch that the graph was captured with; other sizes in proportion."""

    def __init__(self, costs: OpCosts, captured_batch: int) -> None:
        super().__init__()
        self._costs, self._batch = costs, captured_batch

    def _make(self, microbatch_size: int, kind: str) -> OpCosts:
        return scaled(self._costs, microbatch_size / self._batch)


class Profiled(_Kept):
    """Measured here at every size that is asked for, since small micro-batches use a device less well."""

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
    """Samples of the batch that a recording was made with: as it was told, or dim 0 of its first tensor that has one."""
    if recording.batching is not None:
        return recording.batching.samples
    for spec in recording.inputs:
        if spec.kind == "tensor" and spec.shape:
            return int(spec.shape[0])
    raise PlanError(
        "the model takes no tensor with a batch dimension, so it cannot be cut into micro-batches: expected at least one "
        f"tensor argument with dim 0 = samples, got {[spec.path for spec in recording.inputs]}"
    )


def resized(leaves: Sequence[Any], size: int, batching: Batching | None = None) -> list[Any]:
    """The leaves of a batch cut (or repeated) to another number of samples; leaves without the batch stay as they are.

    A batch that is cut as a container stays as it is: its rows cannot be left out or repeated.
    """
    dims = (batching or batching_of(leaves, [f"leaf {i}" for i in range(len(leaves))])).dims
    held = [dim is not None for dim in (*dims, *[None] * (len(leaves) - len(dims)))]

    def one(leaf: Any, samples: bool) -> Any:
        if not samples:
            return leaf
        times = -(-size // leaf.shape[0])
        return leaf.repeat(times, *[1] * (leaf.dim() - 1))[:size] if times > 1 else leaf[:size]

    return [one(leaf, samples) for leaf, samples in zip(leaves, held)]


def scaled(costs: OpCosts, factor: float, forward: float | None = None, backward: float | None = None) -> OpCosts:
    """The costs of a micro-batch of another size, in proportion: times and activations grow, parameters do not.

    ``forward`` and ``backward``: factors of the times, where they were measured.
    """
    ahead, back = factor if forward is None else forward, factor if backward is None else backward
    return replace(
        costs,
        forward=tuple(t * ahead for t in costs.forward),
        backward_input=tuple(t * back for t in costs.backward_input),
        backward_weight=tuple(t * back for t in costs.backward_weight),
        split_extra=tuple(t * back for t in costs.split_extra),
        saved_bytes=tuple(round(size * factor) for size in costs.saved_bytes),
        output_bytes=tuple(round(size * factor) for size in costs.output_bytes),
    )


@contextmanager
def _threads_of_a_rank(processes: int) -> Iterator[None]:
    """As many threads as a process will have when so many share the cores of this host."""
    before = torch.get_num_threads()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if "OMP_NUM_THREADS" not in os.environ and not torch.cuda.is_available():
        torch.set_num_threads(max(1, cores // max(1, processes)))
    try:
        yield
    finally:
        torch.set_num_threads(before)
