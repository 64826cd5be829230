"""The layout of a mesh of replicas x stages: the device of each stage, and the links between stages and replicas."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from pipepart.cost.cluster import Cluster, DeviceKind, LinkKind
from pipepart.errors import PlanError
from pipepart.partition import Link

__all__ = [
    "BETWEEN_GPUS",
    "BY_PROCESSOR",
    "GROUP_LINK",
    "LOCAL_LINK",
    "Handling",
    "Layout",
    "MeasuredLinks",
    "ring_seconds",
]


@dataclass(frozen=True)
class Handling:
    """Host overhead of actions and messages: time in which a device does no other work."""

    action: float = 0.0
    """Seconds for each action: finding its values, starting autograd, storing results."""
    message: float = 0.0
    """Seconds for each message, at its sender and at its receiver."""
    bandwidth: float = math.inf
    """Bytes per second at which either end copies a message."""

    def seconds(self, messages: int, size: float) -> float:
        return self.action + messages * self.message + size / self.bandwidth


BY_PROCESSOR = Handling(action=45e-6, message=45e-6, bandwidth=6e9)
"""Host overhead if the processor that computes also handles messages, as measured. A GPU continues to compute."""

LOCAL_LINK = Link(bandwidth=8e9, latency=50e-6)
"""Shared memory between processes of one host, in addition to the handling, as measured on two busy cores."""

BETWEEN_GPUS = Link(bandwidth=20e9, latency=20e-6)
"""PCIe between GPUs of one host, if nothing else is known."""

GROUP_LINK = Link(bandwidth=1.0e9, latency=150e-6)
"""Collectives by gloo between processes of one host, as measured on two cores."""


@dataclass(frozen=True)
class MeasuredLinks:
    """The links between the ranks of a job, as measured when it started. None: the job has no such ranks."""

    hosts: tuple[int, ...]
    """The number of the host of each rank."""
    inside: Link | None = None
    """Messages between two ranks of one host."""
    between: Link | None = None
    """Messages between two ranks of different hosts."""
    sums_inside: Link | None = None
    """Sums over replicas of a stage on one host, as a ring."""
    sums_between: Link | None = None
    """Sums over replicas of a stage on several hosts, as a ring."""

    def message(self, a: int, b: int) -> Link | None:
        """Return the link between two ranks."""
        if self.hosts[a] == self.hosts[b]:
            return self.inside or self.between
        return self.between or self.inside

    def sums(self, ranks: Sequence[int]) -> Link | None:
        """Return the link of a ring of ranks."""
        if len({self.hosts[rank] for rank in ranks}) == 1:
            return self.sums_inside or self.sums_between
        return self.sums_between or self.sums_inside

    @property
    def named(self) -> tuple[tuple[str, float, float], ...]:
        """The name, the bandwidth and the latency of each link."""
        found = {
            "messages inside a host": self.inside,
            "messages between hosts": self.between,
            "sums inside a host": self.sums_inside,
            "sums between hosts": self.sums_between,
        }
        return tuple((name, link.bandwidth, link.latency) for name, link in found.items() if link is not None)


@dataclass(frozen=True)
class Layout:
    """The devices of a mesh, ``rank = replica * stages + stage``. A stage is as slow as the slowest of its replicas."""

    stages: int
    replicas: int
    memory: tuple[float, ...]
    """Bytes that a stage may use."""
    kinds: tuple[str, ...] = ()
    """The kind of device of each stage (the slowest over the replicas). Empty: not known."""
    cluster: Cluster | None = None
    within: Link = LOCAL_LINK
    """The link between stages, if there is no cluster."""
    across: Link = GROUP_LINK
    """The link between replicas, if there is no cluster or if its devices sum by other means than they send."""
    handling: Handling = BY_PROCESSOR
    links: MeasuredLinks | None = None
    """The measured links of the job that will run the plan. They are used instead of `within` and `across`."""

    @staticmethod
    def uniform(
        stages: int,
        replicas: int,
        *,
        memory: float | Sequence[float] = math.inf,
        link: Link = LOCAL_LINK,
        across: Link = GROUP_LINK,
        handling: Handling = BY_PROCESSOR,
        links: MeasuredLinks | None = None,
    ) -> Layout:
        """Return a layout of equal devices; `memory` may differ between stages."""
        limits = tuple(memory) if isinstance(memory, Sequence) else (memory,) * stages
        return Layout(stages, replicas, limits, within=link, across=across, handling=handling, links=links)

    @staticmethod
    def on(cluster: Cluster, stages: int, replicas: int, *, memory_limit: float | None = None) -> Layout:
        """Return a layout of the first ``stages * replicas`` devices of a cluster."""
        if stages * replicas > cluster.size:
            raise PlanError(
                f"{replicas} replica(s) x {stages} stage(s) need {replicas * stages} devices, but cluster {cluster.name!r} "
                f"has {cluster.size}. Use devices={replicas * stages} to plan for more of them, or fewer stages."
            )
        devices = cluster.devices
        of_stage = [[devices[replica * stages + stage] for replica in range(replicas)] for stage in range(stages)]
        limit = math.inf if memory_limit is None else memory_limit
        names = tuple(_slowest(kinds).name for kinds in of_stage)
        return Layout(
            stages,
            replicas,
            tuple(min(limit, *(kind.memory for kind in kinds), math.inf) for kinds in of_stage),
            names,
            cluster,
            handling=BY_PROCESSOR if set(names) == {"core"} else Handling(),
        )

    @cached_property
    def _node_of(self) -> list[int]:
        assert self.cluster is not None
        return [index for index, node in enumerate(self.cluster.nodes) for _ in node.devices]

    def link(self, a: int, b: int) -> Link:
        """Return the slowest link between two stages over all replicas."""
        if self.cluster is None:
            measured = [self.links.message(*pair) for pair in self._pairs(a, b)] if self.links is not None else []
            return _slowest_link([link for link in measured if link is not None] or [self.within])
        link = self._worst({self._link_name(*pair) for pair in self._pairs(a, b)})
        if self._cores(a):  # a message between processes takes longer than the pipe: notices, copies, waking up
            return Link(link.bandwidth, max(link.latency, LOCAL_LINK.latency))
        return link

    def between_replicas(self, stage: int) -> Link:
        """Return the slowest link on the ring of the replicas of a stage."""
        ranks = [replica * self.stages + stage for replica in range(self.replicas)]
        if self.cluster is None and self.links is not None:
            return self.links.sums(ranks) or self.across
        if self.cluster is None or self._cores(stage):  # collectives of CPU processes do not share memory
            return self.across
        return self._worst({self._link_name(a, b) for a, b in zip(ranks, ranks[1:] + ranks[:1]) if a != b})

    def levels(self, stage: int) -> tuple[int, Link, Link] | None:
        """Return the replicas of a stage on each host, and the slowest links inside and between hosts.

        None: all are on one host, or hosts have different numbers of them, or one each.
        """
        ranks = [replica * self.stages + stage for replica in range(self.replicas)]
        if self.cluster is not None:
            hosts = [self._node_of[rank] for rank in ranks]
        elif self.links is not None:
            hosts = [self.links.hosts[rank] for rank in ranks]
        else:
            return None
        groups = [[rank for rank, host in zip(ranks, hosts) if host == one] for one in dict.fromkeys(hosts)]
        size = len(groups[0])
        if len(groups) < 2 or size < 2 or any(len(group) != size for group in groups) or hosts != sorted(hosts):
            return None
        if self.cluster is None:
            assert self.links is not None
            return size, self.links.sums_inside or self.across, self.links.sums_between or self.across
        inside = (
            self.across
            if self._cores(stage)
            else self._worst({self._link_name(*pair) for g in groups for pair in pairwise(g)})
        )
        return size, inside, self._worst({self._link_name(a[0], b[0]) for a, b in pairwise(groups)})

    def reduce_seconds(self, stage: int, size: float) -> float:
        """Return the seconds to sum gradients of so many bytes over the replicas of a stage by a ring."""
        if self.replicas == 1 or size <= 0:
            return 0.0
        return ring_seconds(self.between_replicas(stage), self.replicas, size)

    def tie_seconds(self, stages: Sequence[int], size: float) -> float:
        """Return the seconds to sum gradients of so many bytes over stages that use the same parameters."""
        if len(stages) < 2 or size <= 0:
            return 0.0
        if (self.cluster is None and self.links is None) or self._cores(stages[0]):
            return ring_seconds(self.across, len(stages), size)
        return ring_seconds(_slowest_link([self.link(a, b) for a, b in pairwise(stages)]), len(stages), size)

    def _pairs(self, a: int, b: int) -> list[tuple[int, int]]:
        """Return the ranks of two stages in each replica."""
        return [(replica * self.stages + a, replica * self.stages + b) for replica in range(self.replicas)]

    def _cores(self, stage: int) -> bool:
        return bool(self.kinds) and self.kinds[stage] == "core"

    def _link_name(self, a: int, b: int) -> str:
        assert self.cluster is not None
        node, other = self._node_of[a], self._node_of[b]
        return self.cluster.nodes[node].link if node == other else self.cluster.network

    def _worst(self, names: set[str]) -> Link:
        assert self.cluster is not None
        return _slowest_link([self.cluster.links[name] for name in names])


def _slowest_link(links: Sequence[Link | LinkKind]) -> Link:
    """Return a link with the least bandwidth and the longest latency of several."""
    return Link(min(link.bandwidth for link in links), max(link.latency for link in links))


def ring_seconds(link: Link, members: int, size: float) -> float:
    """Return the seconds of an all-reduce of so many bytes by a ring of so many members."""
    return 2 * (members - 1) * (link.latency + size / members / link.bandwidth)


def _slowest(kinds: Sequence[DeviceKind]) -> DeviceKind:
    return min(kinds, key=lambda kind: (max(kind.flops.values()) * kind.efficiency, kind.name))
