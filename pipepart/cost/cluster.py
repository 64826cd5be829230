"""Clusters: kinds of devices, links between them, and how they are put together.

A cluster need not exist here; the machine that runs this is one too, measured on first use.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from pipepart.errors import ConfigError, did_you_mean
from pipepart.machine import cache_folder, usable, usable_cores

__all__ = [
    "Cluster",
    "DeviceKind",
    "LinkKind",
    "Node",
    "cluster_from",
    "cluster_names",
    "load_cluster",
    "measure_machine",
    "this_machine",
]

_VERSION = 3


@dataclass(frozen=True)
class DeviceKind:
    """One kind of device: what it can do at most, and what part of that real ops reach."""

    name: str
    flops: Mapping[str, float]
    """Peak FLOP/s by dtype, as torch names it (``float32``, ``bfloat16``, ...)."""
    memory_bandwidth: float
    """Bytes per second."""
    memory: float
    """Bytes."""
    efficiency: float = 0.6
    """Part of the peak FLOP/s that large matrix products reach; memory traffic is taken to reach a third more of its
    own peak (at most 0.9 of it)."""
    launch: float = 5e-6
    """Seconds per op, whatever it computes."""

    def flops_for(self, dtype: str) -> float:
        """Peak FLOP/s for a dtype; a dtype that the device has no units for runs as float32."""
        if dtype in self.flops:
            return float(self.flops[dtype])
        return float(self.flops.get("float32", max(self.flops.values())))

    def seconds(self, flops: float, moved: float, dtype: str) -> float:
        """Roofline: the slower of computing and moving, and the time to start."""
        if flops <= 0 and moved <= 0:
            return 0.0
        compute = flops / (self.flops_for(dtype) * self.efficiency)
        memory = moved / (self.memory_bandwidth * min(0.9, self.efficiency * 4 / 3))
        return max(compute, memory) + self.launch


@dataclass(frozen=True)
class LinkKind:
    """A way for tensors from device to device."""

    name: str
    bandwidth: float
    """Bytes per second in one direction."""
    latency: float
    """Seconds per message."""


@dataclass(frozen=True)
class Node:
    """One host: its devices in order, and the link between them."""

    devices: tuple[str, ...]
    link: str


@dataclass(frozen=True)
class Cluster:
    """Devices numbered through the nodes in order; two devices of one node talk over its link, others by network."""

    name: str
    kinds: Mapping[str, DeviceKind]
    links: Mapping[str, LinkKind]
    nodes: tuple[Node, ...]
    network: str

    def __post_init__(self) -> None:
        if not self.nodes or not any(node.devices for node in self.nodes):
            raise ConfigError(f"cluster {self.name!r}: it has no devices; expected at least one")
        for node in self.nodes:
            for kind in node.devices:
                if kind not in self.kinds:
                    raise ConfigError(f"cluster {self.name!r}: device kind {kind!r}: {did_you_mean(kind, self.kinds)}")
            if node.link not in self.links:
                raise ConfigError(f"cluster {self.name!r}: link {node.link!r}: {did_you_mean(node.link, self.links)}")
        if self.network not in self.links:
            raise ConfigError(
                f"cluster {self.name!r}: network {self.network!r}: {did_you_mean(self.network, self.links)}"
            )

    @property
    def size(self) -> int:
        """How many devices there are."""
        return sum(len(node.devices) for node in self.nodes)

    @property
    def devices(self) -> tuple[DeviceKind, ...]:
        """The kind of every device."""
        return tuple(self.kinds[kind] for node in self.nodes for kind in node.devices)

    def node_of(self, device: int) -> int:
        """The node that a device is in."""
        first = 0
        for index, node in enumerate(self.nodes):
            first += len(node.devices)
            if device < first:
                return index
        raise ConfigError(f"cluster {self.name!r}: there is no device {device}; expected 0..{self.size - 1}")

    def link(self, a: int, b: int) -> LinkKind:
        """The link between two devices."""
        node = self.node_of(a)
        return self.links[self.nodes[node].link if node == self.node_of(b) else self.network]

    def with_devices(self, count: int) -> Cluster:
        """The same pattern of nodes, repeated or cut to a number of devices."""
        if count < 1:
            raise ConfigError(f"cluster {self.name!r}: {count} devices; expected at least 1")
        nodes: list[Node] = []
        left = count
        while left:
            node = self.nodes[len(nodes) % len(self.nodes)]
            nodes.append(dataclasses.replace(node, devices=node.devices[:left]))
            left -= len(nodes[-1].devices)
        return dataclasses.replace(self, nodes=tuple(nodes))


def cluster_names() -> list[str]:
    """The clusters in ``conf/cluster``."""
    return sorted(path.stem for path in _folder().glob("*.yaml"))


def load_cluster(name: str | Path, *, devices: int | None = None) -> Cluster:
    """A cluster by its name in ``conf/cluster`` or from a YAML file; ``devices`` repeats or cuts it to that many."""
    path = Path(name)
    if path.suffix not in (".yaml", ".yml"):
        path = _folder() / f"{name}.yaml"
        if not path.is_file():
            raise ConfigError(f"cluster {str(name)!r} is not known: {did_you_mean(str(name), cluster_names())}")
    try:
        data = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except OSError as error:
        raise ConfigError(f"cluster: cannot read {path}: {error.strerror}") from error
    except (YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"cluster: {path} is not usable YAML: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"cluster: {path} holds a {type(data).__name__}; expected a mapping")
    cluster = cluster_from({str(key): value for key, value in data.items()})
    return cluster if devices is None else cluster.with_devices(devices)


def cluster_from(data: Mapping[str, Any]) -> Cluster:
    """A cluster from a mapping as in ``conf/cluster``; ``measured: true`` stands for the machine that runs this."""
    if data.get("measured"):
        return this_machine()
    name = str(data.get("name", "cluster"))
    unknown = sorted(set(data) - {"name", "devices", "links", "nodes", "network"})
    if unknown:
        raise ConfigError(f"cluster {name!r}: unknown key {unknown[0]!r}; expected devices, links, nodes, network")
    kinds = {key: _kind(name, key, value) for key, value in _mapping(data, "devices", name).items()}
    links = {key: _link(name, key, value) for key, value in _mapping(data, "links", name).items()}
    nodes: list[Node] = []
    for entry in data.get("nodes") or ():
        try:
            devices = tuple(kind for kind, count in entry["devices"].items() for _ in range(int(count)))
            nodes.extend([Node(devices, str(entry["link"]))] * int(entry.get("count", 1)))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(
                f"cluster {name!r}: node {entry!r}; expected {{count: 2, devices: {{kind: 8}}, link: name}}"
            ) from error
    return Cluster(name, kinds, links, tuple(nodes), str(data.get("network", nodes[0].link if nodes else "")))


def _folder() -> Path:
    """``conf/cluster`` of the source tree or of the installed package."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "conf" / "cluster", package.parent / "conf" / "cluster"):
        if folder.is_dir():
            return folder
    raise ConfigError(f"cluster: there is no conf/cluster in {package} or {package.parent}; is the package complete?")


def _mapping(data: Mapping[str, Any], key: str, name: str) -> Mapping[str, Any]:
    value = data.get(key)
    if not isinstance(value, Mapping) or not value:
        raise ConfigError(f"cluster {name!r}: {key} is {value!r}; expected a mapping from names to their numbers")
    return value


def _kind(cluster: str, name: str, value: Mapping[str, Any]) -> DeviceKind:
    try:
        kind = DeviceKind(
            name=name,
            flops={str(dtype): float(flops) for dtype, flops in value["flops"].items()},
            memory_bandwidth=float(value["memory_bandwidth"]),
            memory=float(value["memory"]),
            efficiency=float(value.get("efficiency", DeviceKind.efficiency)),
            launch=float(value.get("launch", DeviceKind.launch)),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"cluster {cluster!r}: device {name!r} is {value!r}; expected flops by dtype, memory_bandwidth and memory"
        ) from error
    positive = [*kind.flops.values(), kind.memory_bandwidth, kind.memory, kind.efficiency]
    if not kind.flops or min(positive) <= 0 or kind.efficiency > 1 or kind.launch < 0:
        raise ConfigError(f"cluster {cluster!r}: device {name!r} has a number that cannot be: {value!r}")
    return kind


def _link(cluster: str, name: str, value: Mapping[str, Any]) -> LinkKind:
    try:
        link = LinkKind(name, float(value["bandwidth"]), float(value["latency"]))
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"cluster {cluster!r}: link {name!r} is {value!r}; expected bandwidth (bytes/s) and latency (s)"
        ) from error
    if link.bandwidth <= 0 or link.latency < 0:
        raise ConfigError(f"cluster {cluster!r}: link {name!r} has a number that cannot be: {value!r}")
    return link


def this_machine(*, use_cache: bool = True) -> Cluster:
    """This machine: its GPUs, or its cores (one device per core, since ranks run one thread each)."""
    path = cache_folder() / "machine.json"
    key = _key()
    if use_cache:
        try:
            data = json.loads(path.read_text())
            if data["key"] == key:
                return _cluster(DeviceKind(**data["device"]), LinkKind(**data["link"]), int(data["count"]))
        except (OSError, ValueError, KeyError, TypeError):
            pass  # nothing there yet, or from another version: measure
    device, link, count = measure_machine()
    if use_cache:
        text = json.dumps({"key": key, "device": asdict(device), "link": asdict(link), "count": count}, indent=1)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text(text + "\n")
        temporary.replace(path)
    return _cluster(device, link, count)


def measure_machine() -> tuple[DeviceKind, LinkKind, int]:
    """Measure one device, the way between two of them, and count them (about a second)."""
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        memory = float(torch.cuda.get_device_properties(0).total_memory)
        where, other = torch.device("cuda", 0), torch.device("cuda", count - 1)
        name = torch.cuda.get_device_name(0).lower().replace(" ", "_")
    else:
        count = usable_cores()
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / count
        where = other = torch.device("cpu")
        name = "core"
    threads = torch.get_num_threads()
    try:
        if where.type == "cpu":
            torch.set_num_threads(1)
        # A bfloat16 product would end this process on a CPU that announces units which it may not use.
        half = where.type == "cuda" or usable("bfloat16")
        dtypes = ("float32", "bfloat16") if half else ("float32",)
        flops = {dtype: _flops(where, getattr(torch, dtype)) for dtype in dtypes}
        bandwidth, launch = _bandwidth(where), _launch(where)
        link = _measured_link(where, other)
    finally:
        torch.set_num_threads(threads)
    # The measured product is what ops reach, so nothing is taken off it.
    return DeviceKind(name, flops, bandwidth, memory, efficiency=1.0, launch=launch), link, count


def _cluster(device: DeviceKind, link: LinkKind, count: int) -> Cluster:
    return Cluster(
        "local", {device.name: device}, {link.name: link}, (Node((device.name,) * count, link.name),), link.name
    )


def _key() -> str:
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
    except OSError:
        model = platform.processor()
    return json.dumps([_VERSION, model, os.cpu_count(), gpus, torch.__version__])


def _timed(run: Callable[[], object], where: torch.device, repeats: int = 7) -> float:
    """Median seconds of a call, after one to warm up."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        run()
        if where.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def _flops(where: torch.device, dtype: torch.dtype) -> float:
    size = 4096 if where.type == "cuda" else 512
    a, b = (torch.randn(size, size, device=where).to(dtype) for _ in range(2))
    return 2.0 * size**3 / _timed(lambda: a @ b, where)


def _bandwidth(where: torch.device) -> float:
    size = 1 << (28 if where.type == "cuda" else 25)
    a = torch.zeros(size, dtype=torch.uint8, device=where)
    b = torch.empty_like(a)
    return 2.0 * size / _timed(lambda: b.copy_(a), where)


def _launch(where: torch.device) -> float:
    a = torch.ones(8, device=where)

    def many() -> None:
        for _ in range(100):
            a.add_(1.0)

    return _timed(many, where) / 100


def _measured_link(where: torch.device, other: torch.device) -> LinkKind:
    """GPUs: a copy from the first to the last. Cores: into a shared buffer, out of it, and a pipe to call the peer."""
    size = 1 << 22
    a = torch.zeros(size, dtype=torch.uint8, device=where)
    if where.type == "cuda":
        b = torch.zeros(size, dtype=torch.uint8, device=other)
        tiny = a[:8], b[:8]
        latency = _timed(lambda: tiny[1].copy_(tiny[0]), where)
        return LinkKind("peer", size / max(_timed(lambda: b.copy_(a), where) - latency, 1e-9), latency)
    shared = torch.zeros(size, dtype=torch.uint8)
    shared.share_memory_()  # type: ignore[no-untyped-call]
    back = torch.empty_like(a)

    def through() -> None:
        shared.copy_(a)
        back.copy_(shared)

    seconds = _timed(through, where)
    return LinkKind("shared_memory", size / seconds, _pipe_latency())


def _pipe_latency(rounds: int = 300) -> float:
    """Half of a round trip to another process over pipes: what it takes to wake the other side."""
    echo = "import os\nwhile b := os.read(0, 1): os.write(1, b)"
    with subprocess.Popen([sys.executable, "-S", "-c", echo], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as peer:
        assert peer.stdin is not None
        assert peer.stdout is not None
        there, back = peer.stdin.fileno(), peer.stdout.fileno()
        times = []
        for _ in range(rounds):
            start = time.perf_counter()
            os.write(there, b"x")
            os.read(back, 1)
            times.append(time.perf_counter() - start)
        peer.stdin.close()
    return statistics.median(times[rounds // 3 :]) / 2
