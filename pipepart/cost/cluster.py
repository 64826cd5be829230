"""Clusters: kinds of devices, links between them, their topology, and the files that describe them.

A file may describe a cluster that does not exist. This machine is a cluster, too (`pipepart.cost.this_machine`).
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipepart.errors import ConfigError, did_you_mean
from pipepart.files import Field, load_yaml
from pipepart.values import shortened

__all__ = ["MOST_DEVICES", "Cluster", "DeviceKind", "LinkKind", "Node", "cluster_from", "cluster_names", "load_cluster"]

MOST_DEVICES = 100_000
"""The largest number of devices of a cluster."""


@dataclass(frozen=True)
class DeviceKind:
    """A kind of device: its peak speed, and the part of it that real ops reach."""

    name: str
    flops: Mapping[str, float]
    """Peak FLOP/s by dtype, as torch names it (``float32``, ``bfloat16``, ...)."""
    memory_bandwidth: float
    """Bytes per second."""
    memory: float
    """Bytes."""
    efficiency: float = 0.6
    """Part of the peak FLOP/s that large matrix products reach. Memory traffic is assumed to reach a third more of its
    own peak, at most 0.9 of it."""
    launch: float = 5e-6
    """Seconds to start an op."""

    def __post_init__(self) -> None:
        speeds = {f"flops of {dtype}": value for dtype, value in self.flops.items()}
        sizes = {"memory_bandwidth": self.memory_bandwidth, "memory": self.memory, "efficiency": self.efficiency}
        for name, value in {**speeds, **sizes}.items():
            if not 0 < value < math.inf:
                raise ConfigError(f"device {self.name!r}: {name} is {value}; expected a finite number above 0")
        if not self.flops:
            raise ConfigError(f"device {self.name!r}: flops is empty; expected FLOP/s by dtype, such as float32: 1e12")
        if self.efficiency > 1 or not 0 <= self.launch < math.inf:
            raise ConfigError(
                f"device {self.name!r}: efficiency is {self.efficiency} and launch {self.launch}; expected an efficiency "
                "of at most 1 and a launch of at least 0 seconds"
            )

    def flops_for(self, dtype: str) -> float:
        """Return the peak FLOP/s for a dtype; a dtype that `flops` does not name has the speed of float32."""
        if dtype in self.flops:
            return float(self.flops[dtype])
        return float(self.flops.get("float32", max(self.flops.values())))

    def seconds(self, flops: float, moved: float, dtype: str) -> float:
        """Return the time of an op by the roofline: the longer of the times to compute and to move bytes, plus the launch."""
        if flops <= 0 and moved <= 0:
            return 0.0
        compute = flops / (self.flops_for(dtype) * self.efficiency)
        memory = moved / (self.memory_bandwidth * min(0.9, self.efficiency * 4 / 3))
        return max(compute, memory) + self.launch


@dataclass(frozen=True)
class LinkKind:
    """A kind of link between devices."""

    name: str
    bandwidth: float
    """Bytes per second in one direction."""
    latency: float
    """Seconds per message."""

    def __post_init__(self) -> None:
        if not 0 < self.bandwidth < math.inf or not 0 <= self.latency < math.inf:
            raise ConfigError(
                f"link {self.name!r}: bandwidth is {self.bandwidth} and latency {self.latency}; expected bytes per second "
                "above 0 and seconds of at least 0"
            )


@dataclass(frozen=True)
class Node:
    """One host: its devices in order, and the link between them."""

    devices: tuple[str, ...]
    link: str


@dataclass(frozen=True)
class Cluster:
    """Nodes with their devices. Two devices of one node use its link, others the network.

    Devices are numbered from 0, node by node.
    """

    name: str
    kinds: Mapping[str, DeviceKind]
    links: Mapping[str, LinkKind]
    nodes: tuple[Node, ...]
    network: str

    def __post_init__(self) -> None:
        if not self.size:
            raise ConfigError(f"cluster {self.name!r}: it has no devices; expected at least one")
        for node in self.nodes:
            for kind in node.devices:
                if kind not in self.kinds:
                    raise ConfigError(
                        f"cluster {self.name!r}: no device kind {kind!r}: {did_you_mean(kind, self.kinds)}"
                    )
            if node.link not in self.links:
                raise ConfigError(
                    f"cluster {self.name!r}: no link {node.link!r}: {did_you_mean(node.link, self.links)}"
                )
        if self.network not in self.links:
            raise ConfigError(
                f"cluster {self.name!r}: no link {self.network!r} for its network: {did_you_mean(self.network, self.links)}"
            )

    @property
    def size(self) -> int:
        """Number of devices."""
        return sum(len(node.devices) for node in self.nodes)

    @property
    def devices(self) -> tuple[DeviceKind, ...]:
        """The kind of every device."""
        return tuple(self.kinds[kind] for node in self.nodes for kind in node.devices)

    def node_of(self, device: int) -> int:
        """Return the node of a device."""
        first = 0
        for index, node in enumerate(self.nodes):
            first += len(node.devices)
            if device < first:
                return index
        raise ConfigError(f"cluster {self.name!r}: there is no device {device}; expected 0..{self.size - 1}")

    def link(self, a: int, b: int) -> LinkKind:
        """Return the link between two devices."""
        node = self.node_of(a)
        return self.links[self.nodes[node].link if node == self.node_of(b) else self.network]

    def with_devices(self, count: int) -> Cluster:
        """Return the same pattern of nodes, repeated or shortened to a number of devices."""
        if not 1 <= count <= MOST_DEVICES:
            raise ConfigError(f"cluster {self.name!r}: {count} devices; expected 1 to {MOST_DEVICES}")
        nodes: list[Node] = []
        left = count
        while left:
            node = self.nodes[len(nodes) % len(self.nodes)]
            nodes.append(dataclasses.replace(node, devices=node.devices[:left]))
            left -= len(nodes[-1].devices)
        return dataclasses.replace(self, nodes=tuple(nodes))


def cluster_names() -> list[str]:
    """Return the names of the clusters in ``conf/cluster``."""
    return sorted(path.stem for path in _folder().glob("*.yaml"))


def load_cluster(name: str | Path, *, devices: int | None = None) -> Cluster:
    """Read a cluster by its name in ``conf/cluster`` or from a YAML file.

    ``devices``: a number of devices, to which the nodes are repeated or shortened.
    """
    path = Path(name)
    if path.suffix not in (".yaml", ".yml"):
        path = _folder() / f"{name}.yaml"
        if not os.path.isfile(path):
            raise ConfigError(f"cluster {shortened(name)} is not known: {did_you_mean(str(name), cluster_names())}")
    cluster = _cluster(load_yaml(path, ConfigError))
    return cluster if devices is None else cluster.with_devices(devices)


def cluster_from(data: Mapping[str, Any]) -> Cluster:
    """Make a cluster from a mapping as in ``conf/cluster``; ``measured: true`` stands for this machine."""
    return _cluster(Field(data, "the configuration of the cluster", error=ConfigError))


@dataclass(frozen=True)
class _Device:
    """The entry of a device kind in a file; its name is the key."""

    flops: Mapping[str, float]
    memory_bandwidth: float
    memory: float
    efficiency: float = DeviceKind.efficiency
    launch: float = DeviceKind.launch


@dataclass(frozen=True)
class _Link:
    """The entry of a link in a file; its name is the key."""

    bandwidth: float
    latency: float


@dataclass(frozen=True)
class _Nodes:
    """The entry of equal nodes in a file."""

    devices: Mapping[str, int]
    link: str
    count: int = 1


@dataclass(frozen=True)
class _File:
    """The fields of a file that describes a cluster."""

    devices: Mapping[str, _Device]
    links: Mapping[str, _Link]
    nodes: tuple[_Nodes, ...]
    name: str = "cluster"
    network: str | None = None
    measured: bool = False


def _cluster(file: Field) -> Cluster:
    if file.entries().get("measured") is True:
        from pipepart.cost.this_machine import this_machine

        return this_machine()
    data = file.read(_File)
    for name in ("devices", "links"):
        if not file.value[name]:
            raise file.at(name).refused("a mapping from names to their numbers")
    size = sum(entry.count * sum(entry.devices.values()) for entry in data.nodes)
    if size > MOST_DEVICES:
        raise ConfigError(f"{file.path}: nodes hold {size} devices; expected at most {MOST_DEVICES}")
    nodes = [
        Node(tuple(kind for kind, count in entry.devices.items() for _ in range(count)), entry.link)
        for entry in data.nodes
        for _ in range(entry.count if any(entry.devices.values()) else 0)
    ]
    network = nodes[0].link if data.network is None and nodes else data.network or ""
    try:
        kinds = {name: DeviceKind(name, **vars(kind)) for name, kind in data.devices.items()}
        links = {name: LinkKind(name, **vars(link)) for name, link in data.links.items()}
        return Cluster(data.name, kinds, links, tuple(nodes), network)
    except ConfigError as error:
        raise ConfigError(f"{file.path}: {error}") from error


def _folder() -> Path:
    """Return ``conf/cluster`` of the source tree or of the installed package."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "conf" / "cluster", package.parent / "conf" / "cluster"):
        if folder.is_dir():
            return folder
    raise ConfigError(
        f"cluster: there is no folder conf/cluster in {package} or {package.parent}; install pipepart again"
    )
