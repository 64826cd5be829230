"""The cluster file of a self-test: the measured machine, in the format of conf/cluster."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from pipepart.cost.cluster import Cluster, load_cluster
from pipepart.errors import ConfigError
from pipepart.files import write_whole

__all__ = ["CLUSTER", "as_cluster", "write_cluster"]

CLUSTER = "measured"
"""The name of the cluster and of its file."""

_HEAD = """\
# Measured by `pipepart selftest`. The link is the median of all pairs of devices:
{pairs}
# Plan for it with: pipepart plan cluster=FILE   (FILE: this file)
"""


def as_cluster(devices: Sequence[Mapping[str, Any]], pairs: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """Return the contents of the file: measured devices by their names, and the median of the measured pairs."""
    names = [_word(device["name"]) for device in devices]
    kinds = {}
    for name in dict.fromkeys(names):
        same = [device for device, other in zip(devices, names) if other == name]
        dtypes = [dtype for dtype in same[0]["flops"] if all(dtype in device["flops"] for device in same)]
        kinds[name] = {
            "flops": {dtype: _median([device["flops"][dtype] for device in same]) for dtype in dtypes},
            "memory_bandwidth": _median([device["memory_bandwidth"] for device in same]),
            "memory": _rounded(min(device["memory"] for device in same)),
            "efficiency": 1.0,  # the speed of a product was measured
            "launch": _median([device["launch"] for device in same]),
        }
    link = {key: _median([pair[key] for pair in pairs.values()]) for key in ("bandwidth", "latency")}
    return {
        "name": CLUSTER,
        "devices": kinds,
        "links": {"pair": link},
        "nodes": [{"count": 1, "devices": dict(Counter(names)), "link": "pair"}],
        "network": "pair",
    }


def write_cluster(path: Path, data: Mapping[str, Any], pairs: Mapping[str, Mapping[str, float]]) -> Cluster:
    """Write the file, read it with the reader of clusters and return what it has read."""
    lines = [f"#   {name}: {pair['bandwidth']:.3g} B/s, {pair['latency']:.3g} s" for name, pair in pairs.items()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        text = _HEAD.format(pairs="\n".join(lines)) + yaml.safe_dump(dict(data), sort_keys=False)
        write_whole(path, text)
    except OSError as error:
        raise ConfigError(f"the cluster file cannot be written: {error.strerror}. Give another --output.") from error
    read = load_cluster(path)
    wanted = sum(data["nodes"][0]["devices"].values())
    if read.size != wanted or read.link(0, read.size - 1).bandwidth != data["links"]["pair"]["bandwidth"]:
        raise ConfigError(f"the cluster file reads as {read.size} devices; expected {wanted} with the measured link")
    return read


def _median(values: Sequence[float]) -> float:
    return _rounded(statistics.median(values))


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def _word(name: str) -> str:
    """Return the name of a device as a key: small letters, digits and underscores."""
    return re.sub(r"\W+", "_", name.lower()).strip("_") or "device"
