"""The problem as whole numbers over classes: what the search really works on.

Times become integers (``ticks``), chosen so fine that the whole model is about 2**52 of them. Sums of integers do not
depend on their order or on the processor, so every machine finds the same answer, and differences of prefix sums are
exact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipepart.partition.problem import Link, Problem
from pipepart.partition.quotient import Quotient

__all__ = ["NEVER", "UNBOUNDED", "Instance", "Position", "Wire", "device_kinds", "make_instance", "make_position"]

Ints = NDArray[np.int64]

NEVER = 1 << 60
"""The load of a chunk that is not allowed."""

UNBOUNDED = 1 << 61
"""A memory limit that nothing reaches."""


@dataclass(frozen=True)
class Wire:
    """The tensors of an instance over one link: what each costs a chunk, in ticks."""

    ticks: Ints


@dataclass(frozen=True)
class Position:
    """One place in the pipeline: what differs from one chunk to the next."""

    chunk: int
    device: int
    kind: int
    """Which row of the compute times holds for it."""
    held: int
    limit: int
    """Bytes for parameters and saved tensors."""
    wire_in: int
    wire_out: int
    """Indices of wires; -1: pays nothing."""

    @property
    def terms(self) -> tuple[int, int, int, int, int]:
        """All that the load of a chunk depends on: positions with equal terms share their loads."""
        return self.kind, self.held, self.limit, self.wire_in, self.wire_out


@dataclass(frozen=True, eq=False)
class Instance:
    """Classes 0..n-1 in a topological order with integer costs, and the tensors between them."""

    successors: tuple[tuple[int, ...], ...]
    predecessors: tuple[tuple[int, ...], ...]
    side: Ints
    compute: Ints
    """(kind, class): ticks, forward and backward."""
    extra: Ints
    """(kind, class): ticks that recomputation adds."""
    forbidden: Ints
    """(kind, class): how many ops of the class the device cannot run."""
    least: Ints
    """Ticks on the fastest device."""
    counts: Ints
    """What a chunk needs at least one of: classes with work (or classes, if there are too few with work)."""
    state: Ints
    saved: Ints
    pins: tuple[tuple[int, ...], ...]
    """Tensor -> the classes that share it, in order."""
    wires: tuple[Wire, ...]
    received: Ints
    """Tensor -> bytes that its receiver keeps if it recomputes."""
    moved: Ints
    """Tensor -> bytes forward and back: the traffic."""
    overlap: bool
    keeps: bool
    """Chunks may keep what they save."""
    recomputes: bool
    """Chunks may recompute."""
    scale: float
    """Ticks per second."""
    ratio: tuple[float, ...]
    """Kind -> time of the kindest op on it relative to the fastest device: no device of the kind does better."""

    @property
    def classes(self) -> int:
        """How many classes there are."""
        return len(self.successors)

    @property
    def limited(self) -> bool:
        """Memory or recomputation can matter at all."""
        return bool(self.state.any() or self.saved.any() or not self.keeps)


def make_instance(problem: Problem, graph: Quotient, chunks: int, *, require_work: bool = True) -> Instance:
    """Integer costs per class of the quotient."""
    n = len(graph.members)
    of_device = device_kinds(problem)
    kinds = max(of_device) + 1
    compute, extra, forbidden = (np.zeros((kinds, n)) for _ in range(3))
    class_of = np.array(graph.class_of)
    for kind in range(kinds):
        forward, backward = problem.seconds(of_device.index(kind))
        unable = ~(np.isfinite(forward) & np.isfinite(backward))
        forward, backward = np.where(unable, 0.0, forward), np.where(unable, 0.0, backward)
        np.add.at(compute[kind], class_of, forward + backward)
        np.add.at(extra[kind], class_of, forward)
        np.add.at(forbidden[kind], class_of, unable)
    links = _links(problem, chunks)
    tensors = []
    for tensor in problem.traffic():
        pins = tuple(sorted({graph.class_of[op] for op in tensor.ops}))
        if len(pins) > 1 and tensor.size + tensor.gradient > 0:
            tensors.append((pins, tensor))
    seconds = np.array(
        [[link.seconds(tensor.size) + link.seconds(tensor.gradient) for _, tensor in tensors] for link in links]
    ).reshape(len(links), len(tensors))
    total = math.fsum(compute.max(axis=0)) + math.fsum(extra.max(axis=0))
    total += math.fsum(seconds.max(axis=0)) if tensors else 0.0
    scale = math.ldexp(1.0, 51 - max(math.frexp(total)[1], -900))
    ticks = _round(compute * scale)
    allowed = forbidden == 0
    least = np.where(allowed, ticks, NEVER).min(axis=0)
    least = np.where(least >= NEVER, 0, least)
    work = np.where(allowed & (ticks > 0), 1, 0).max(axis=0)
    ratio = []
    for kind in range(kinds):
        usable = allowed[kind] & (least > 0)
        fastest = float((ticks[kind][usable] / least[usable]).min()) if usable.any() else 1.0
        ratio.append(fastest * (1 - 1e-9))
    state = np.zeros(n)
    saved = np.zeros(n)
    np.add.at(state, class_of, problem.parameter_bytes * problem.state_factor)
    np.add.at(saved, class_of, problem.saved_bytes)
    return Instance(
        successors=graph.successors,
        predecessors=graph.predecessors,
        side=np.array(graph.side, dtype=np.int64),
        compute=ticks,
        extra=_round(extra * scale),
        forbidden=forbidden.astype(np.int64),
        least=least.astype(np.int64),
        counts=(work if require_work else np.ones(n)).astype(np.int64),
        state=_round(state),
        saved=_round(saved),
        pins=tuple(pins for pins, _ in tensors),
        wires=tuple(Wire(_round(row * scale)) for row in seconds),
        received=_round(np.array([tensor.size for _, tensor in tensors])),
        moved=_round(np.array([tensor.size + tensor.gradient for _, tensor in tensors])),
        overlap=problem.overlap,
        keeps="none" in problem.recompute,
        recomputes="full" in problem.recompute,
        scale=scale,
        ratio=tuple(ratio),
    )


def device_kinds(problem: Problem) -> list[int]:
    """Device -> its kind: devices with the same times share one row of compute times."""
    seen: dict[tuple[float, int, int], int] = {}
    return [seen.setdefault((d.speed, id(d.forward), id(d.backward)), len(seen)) for d in problem.devices]


def make_position(problem: Problem, chunk: int, device: int, chunks: int, microbatches: int, share: float) -> Position:
    """The place of a chunk on a device; ``share`` is its part of the memory of the stage."""
    links = _links(problem, chunks)
    room = (problem.devices[device].memory - problem.reserved_bytes) * share
    pays = problem.devices[device].communicates
    return Position(
        chunk=chunk,
        device=device,
        kind=device_kinds(problem)[device],
        held=problem.held(chunk, chunks, microbatches),
        limit=UNBOUNDED if math.isinf(room) else math.floor(room),
        # The first chunk receives nothing and the last one sends nothing, whatever their wires are.
        wire_in=links.index(problem.link(max(chunk - 1, 0))) if pays else -1,
        wire_out=links.index(problem.link(min(chunk, max(chunks - 2, 0)))) if pays else -1,
    )


def _links(problem: Problem, chunks: int) -> list[Link]:
    """The different links in use."""
    return list(dict.fromkeys(problem.link(cut) for cut in range(max(chunks - 1, 1))))


def _round(values: NDArray[np.float64]) -> Ints:
    return np.rint(values).astype(np.int64)
