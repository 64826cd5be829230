"""The problem of the partitioner: ops with their costs, devices in pipeline order, links and memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pipepart.cost.given import GivenDevice, GivenGraph
from pipepart.errors import PartitionError

__all__ = ["RECOMPUTE", "Device", "Link", "Problem", "Tensor", "given_problem"]

Floats = NDArray[np.float64]

RECOMPUTE = ("none", "full")
"""A chunk keeps the tensors that it saves for backward, or keeps its inputs and runs its forward again."""


@dataclass(frozen=True, eq=False)
class Device:
    """One device of the pipeline. ``speed`` divides the times of the problem; ``forward`` and ``backward`` replace them."""

    name: str = "device"
    speed: float = 1.0
    memory: float = math.inf
    """Bytes that a stage on this device may use."""
    forward: Floats | None = None
    """Seconds per op on this device, if a speed is not enough; infinite for an op that the device cannot run."""
    backward: Floats | None = None
    communicates: bool = True
    """Whether this device pays for tensors that it receives and sends; False for a host that owns the memory."""


@dataclass(frozen=True)
class Link:
    """A link over a cut: a tensor takes ``latency + bytes / bandwidth`` seconds, each way."""

    bandwidth: float = math.inf
    latency: float = 0.0

    def seconds(self, size: float) -> float:
        """Time of one message; an empty message takes no time."""
        return self.latency + size / self.bandwidth if size > 0 else 0.0


@dataclass(frozen=True)
class Tensor:
    """The ops that make or use one tensor (a hyperedge). Every chunk that shares it with another chunk pays once."""

    ops: tuple[int, ...]
    size: float
    """Bytes on the way forward."""
    gradient: float = 0.0
    """Bytes on the way back."""


@dataclass(frozen=True, eq=False)
class Problem:
    """A model as arrays over its ops in program order (a topological order), and the devices that it runs on."""

    forward: Floats
    """Seconds per op and micro-batch."""
    backward: Floats
    """Seconds per op and micro-batch: input and weight part together."""
    parameter_bytes: Floats
    saved_bytes: Floats
    """Bytes that an op keeps for its backward, per micro-batch."""
    output_bytes: Floats
    """Bytes of an op's output tensor: sent once to each later chunk that uses it."""
    edges: tuple[tuple[int, int], ...]
    colocated: tuple[tuple[int, ...], ...] = ()
    """Groups of ops that stay in one chunk."""
    split_at: tuple[int, ...] = ()
    """Ops before which a cut must lie: all earlier ops in program order are in earlier chunks."""
    gradient_bytes: Floats | None = None
    """Bytes of the gradient of an op's output; ``None``: as large as the output, if the problem has any backward."""
    tensors: tuple[Tensor, ...] | None = None
    """Tensors that can cross cuts, for published graphs; ``None``: one tensor per op that has users."""
    devices: tuple[Device, ...] = (Device(),)
    """One device for all stages, or one per stage in pipeline order."""
    placement: tuple[int, ...] | None = None
    """Stage of each chunk; ``None``: chunk c is on stage c."""
    any_order: bool = False
    """Whether the devices are a pool, whose order in the pipeline the search chooses."""
    fewer: bool = False
    """Whether chunks (and devices) may stay unused."""
    links: tuple[Link, ...] = (Link(),)
    """One link for all cuts, or one per cut between neighbouring chunks.

    A chunk receives over the link before it and sends over the link after it.
    """
    overlap: bool = False
    """Whether communication runs beside the compute (load = the larger one) instead of adding to the load."""
    state_factor: float = 1.0
    """Bytes held per parameter byte: weights, gradients and optimizer state (4 for fp32 with Adam)."""
    in_flight: str | tuple[int, ...] = "none"
    """Micro-batches whose saved bytes a chunk holds at once: a number per chunk, or a rule.

    Rules are ``none`` (0), ``one``, ``gpipe`` (all) and ``1f1b`` (the number of chunks from here to the end).
    """
    reserved_bytes: float = 0.0
    """Bytes of every stage that are not for the model: buffers, workspaces, the runtime."""
    recompute: tuple[str, ...] = ("none",)
    """Allowed values of `RECOMPUTE`; each chunk takes the cheapest one that fits."""
    reduce_seconds: float = 0.0
    """Seconds per parameter byte for the sum of gradients over replicas, spread over the micro-batches."""
    names: tuple[str, ...] = field(default=(), repr=False)
    """Names of the ops for errors."""

    def __post_init__(self) -> None:
        sizes = {}
        for name in ("forward", "backward", "parameter_bytes", "saved_bytes", "output_bytes", "gradient_bytes"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, _array(name, value))
                sizes[name] = len(getattr(self, name))
        n = sizes["forward"]
        if n == 0:
            raise PartitionError("partition: the graph has no ops; expected at least one")
        for name, size in sizes.items():
            if size != n:
                raise PartitionError(f"partition: {name} has {size} entries; expected {n}, as in forward")
        for a, b in self.edges:
            if not 0 <= a < b < n:
                raise PartitionError(
                    f"partition: edge {self.name(a)} -> {self.name(b)} does not go forward in program order; "
                    f"expected 0 <= source < target < {n}"
                )
        for group in self.colocated:
            if any(not 0 <= op < n for op in group):
                raise PartitionError(f"partition: the colocated group {group} names an op outside 0..{n - 1}")
        object.__setattr__(self, "split_at", tuple(sorted(set(self.split_at))))
        for op in self.split_at:
            if not 0 < op < n:
                raise PartitionError(f"partition: split_at {op} is not a place for a cut; expected an op in 1..{n - 1}")
        if not self.devices or not self.links:
            raise PartitionError("partition: expected at least one device and one link")
        for device in self.devices:
            if not device.speed > 0:
                raise PartitionError(f"partition: device {device.name!r} has speed {device.speed}; expected > 0")
        for link in self.links:
            if not link.bandwidth > 0 or not link.latency >= 0:
                raise PartitionError(f"partition: {link}; expected bandwidth > 0 and latency >= 0")
        unknown = [word for word in self.recompute if word not in RECOMPUTE]
        if unknown or not self.recompute:
            raise PartitionError(f"partition: recompute {self.recompute!r}; expected some of {RECOMPUTE}")
        if isinstance(self.in_flight, str) and self.in_flight not in ("none", "one", "gpipe", "1f1b"):
            raise PartitionError(
                f"partition: in_flight {self.in_flight!r}; expected numbers per chunk, or none, one, gpipe, 1f1b"
            )

    @property
    def ops(self) -> int:
        """Number of ops."""
        return len(self.forward)

    def name(self, op: int) -> str:
        """The name of an op in errors."""
        return repr(self.names[op]) if 0 <= op < len(self.names) else f"op {op}"

    @cached_property
    def traffic(self) -> tuple[Tensor, ...]:
        """All tensors that can cross a cut: one per op with users, unless they were given."""
        if self.tensors is not None:
            return self.tensors
        gradients = self.gradient_bytes
        if gradients is None:
            gradients = self.output_bytes if float(self.backward.sum()) > 0 else np.zeros(self.ops)
        users: dict[int, set[int]] = {}
        for a, b in self.edges:
            users.setdefault(a, set()).add(b)
        return tuple(
            Tensor((op, *sorted(users[op])), float(self.output_bytes[op]), float(gradients[op]))
            for op in sorted(users)
            if self.output_bytes[op] > 0
        )

    def stage(self, chunk: int) -> int:
        """The stage of a chunk."""
        return self.placement[chunk] if self.placement is not None else chunk

    def device(self, chunk: int) -> int:
        """Index of the device of a chunk, if the order of the devices is fixed."""
        return self.stage(chunk) if len(self.devices) > 1 else 0

    @cached_property
    def device_kinds(self) -> list[int]:
        """Kind of each device: devices with the same times have the same kind."""
        seen: dict[tuple[float, int, int], int] = {}
        return [seen.setdefault((d.speed, id(d.forward), id(d.backward)), len(seen)) for d in self.devices]

    def room(self, device: int) -> float:
        """Bytes of a device that the model may use."""
        return self.devices[device].memory - self.reserved_bytes

    def link(self, cut: int) -> Link:
        """The link between chunk ``cut`` and the next one."""
        return self.links[cut] if len(self.links) > 1 else self.links[0]

    def different_links(self, chunks: int) -> list[Link]:
        """The different links between this many chunks."""
        return list(dict.fromkeys(self.link(cut) for cut in range(max(chunks - 1, 1))))

    def held(self, chunk: int, chunks: int, microbatches: int) -> int:
        """Micro-batches whose saved bytes the chunk holds at once."""
        if not isinstance(self.in_flight, str):
            return int(self.in_flight[chunk])
        rule = {"none": 0, "one": 1, "gpipe": microbatches, "1f1b": min(microbatches, chunks - chunk)}
        return rule[self.in_flight]

    def seconds(self, device: int) -> tuple[Floats, Floats]:
        """Forward and backward seconds per op on a device, with the share of the gradient reduction."""
        kind = self.devices[device]
        forward = self.forward / kind.speed if kind.forward is None else kind.forward
        backward = self.backward / kind.speed if kind.backward is None else kind.backward
        return forward, backward + self.parameter_bytes * self.reduce_seconds

    def fits_chunks(self, chunks: int) -> None:
        """Raise an error if devices, links or in-flight numbers are for another number of chunks."""
        placement = self.placement if self.placement is not None else tuple(range(chunks))
        if len(placement) != chunks:
            raise PartitionError(f"partition: placement names {len(placement)} chunks; expected {chunks}")
        stages = max(placement) + 1
        if len(self.devices) not in (1, stages) and not self.any_order:
            raise PartitionError(f"partition: {len(self.devices)} devices for {stages} stages; expected 1 or {stages}")
        if self.any_order and (self.placement is not None or len(self.devices) < chunks):
            raise PartitionError(
                f"partition: a pool of {len(self.devices)} devices for {chunks} chunks; expected at least as many "
                "devices as chunks, and no placement"
            )
        if len(self.links) not in (1, chunks - 1) and chunks > 1:
            raise PartitionError(f"partition: {len(self.links)} links for {chunks} chunks; expected 1 or {chunks - 1}")
        if not isinstance(self.in_flight, str) and len(self.in_flight) != chunks:
            raise PartitionError(f"partition: in_flight has {len(self.in_flight)} numbers; expected {chunks}")


def _array(name: str, value: ArrayLike | Sequence[float]) -> Floats:
    """A read-only float array of non-negative numbers."""
    array = np.array(value, dtype=np.float64)
    if array.ndim != 1 or not bool(np.all(array >= 0)) or not bool(np.all(np.isfinite(array))):
        raise PartitionError(f"partition: {name} must be a list of finite numbers >= 0")
    array.setflags(write=False)
    return array


def given_problem(graph: GivenGraph, *, host: bool = True, link: Link | None = None) -> Problem:
    """The problem of a published graph, on the devices of its file, or on equal ones without a limit.

    ``host`` also offers the device that is not an accelerator. If the file gives the cost of tensors, each chunk pays
    it; else ``link`` determines the cost (by default none).
    """
    costs = graph.costs
    backward = np.array(costs.backward)
    devices: tuple[Device, ...] = (Device(),)
    if graph.devices:
        offered = [d for d in graph.devices if host or d.communicates]
        devices = tuple(device for d in offered for device in [_device(d, backward > 0)] * d.count)
    if not host and devices[0].forward is not None:
        devices = devices[:1]
    return Problem(
        forward=np.array(costs.forward),
        backward=backward,
        parameter_bytes=np.array(costs.parameter_bytes),
        saved_bytes=np.array(costs.saved_bytes),
        output_bytes=np.array(costs.output_bytes),
        edges=graph.edges,
        colocated=graph.colocated,
        tensors=None if graph.tensors is None else tuple(Tensor(t.ops, t.size) for t in graph.tensors),
        links=(link or Link(math.inf if graph.tensors is None else 1.0),),
        devices=devices,
        any_order=len(devices) > 1,
        fewer=bool(graph.devices),
        names=costs.names,
    )


def _device(given: GivenDevice, backward: np.ndarray) -> Device:
    seconds = np.array(given.seconds)
    return Device(
        name=given.name,
        memory=given.memory,
        forward=np.where(backward, 0.0, seconds),
        backward=np.where(backward, seconds, 0.0),
        communicates=given.communicates,
    )
