"""Clusters from conf and from files, their topology, and the machine that runs this."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipepart.cost.cluster import Cluster, DeviceKind, cluster_from, cluster_names, load_cluster
from pipepart.cost.this_machine import MeasuredMachine, _kept, this_machine
from pipepart.errors import ConfigError

SMALL = {
    "name": "small",
    "devices": {"card": {"flops": {"float32": 1e12}, "memory_bandwidth": 1e11, "memory": 8e9}},
    "links": {"bus": {"bandwidth": 1e10, "latency": 1e-6}, "wire": {"bandwidth": 1e9, "latency": 1e-5}},
    "nodes": [{"count": 2, "devices": {"card": 2}, "link": "bus"}],
    "network": "wire",
}


def test_every_cluster_in_conf_can_be_read() -> None:
    names = cluster_names()
    assert {"local", "v100", "a100_40", "a100_80", "h100", "rtx_4090", "l4", "mixed_a100_v100"} <= set(names)
    for name in names:
        if name != "local":
            cluster = load_cluster(name)
            assert cluster.name == name
            assert cluster.size >= 2
            assert cluster.link(0, 1).bandwidth > 0


def test_devices_of_a_node_use_its_link_and_others_the_network() -> None:
    cluster = cluster_from(SMALL)
    assert cluster.size == 4
    assert [cluster.node_of(device) for device in range(4)] == [0, 0, 1, 1]
    assert cluster.link(0, 1).name == "bus"
    assert cluster.link(1, 2).name == "wire"
    with pytest.raises(ConfigError, match="no device 4"):
        cluster.link(0, 4)


def test_a_pattern_of_nodes_repeats() -> None:
    mixed = load_cluster("mixed_a100_v100", devices=14)
    assert [device.name for device in mixed.devices] == ["a100_80"] * 4 + ["v100"] * 4 + ["a100_80"] * 4 + ["v100"] * 2
    assert load_cluster("h100", devices=1024).size == 1024
    assert load_cluster("h100", devices=3).size == 3
    with pytest.raises(ConfigError, match="0 devices"):
        load_cluster("h100", devices=0)


def test_roofline() -> None:
    card = DeviceKind("card", {"float32": 1e12, "bfloat16": 4e12}, 1e11, 8e9, efficiency=0.6, launch=1e-6)
    assert card.seconds(6e11, 0.0, "float32") == pytest.approx(1.0 + 1e-6)
    assert card.seconds(6e11, 0.0, "bfloat16") == pytest.approx(0.25 + 1e-6)
    assert card.seconds(6e11, 0.0, "float64") == card.seconds(6e11, 0.0, "float32")
    assert card.seconds(1.0, 8e10, "float32") == pytest.approx(1.0 + 1e-6)
    assert card.seconds(0.0, 0.0, "float32") == 0.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nodes": [{"devices": {"cart": 2}, "link": "bus"}]}, "did you mean 'card'"),
        ({"nodes": [{"devices": {"card": 2}, "link": "buss"}]}, "did you mean 'bus'"),
        ({"network": "wires"}, "did you mean 'wire'"),
        ({"nodes": []}, "no devices"),
        ({"nodes": [{"link": "bus"}]}, r"no field 'nodes\[0\]\.devices'"),
        ({"devices": {}}, "devices is"),
        ({"devices": {"card": {"memory": 1}}}, r"no field 'devices\.card\.flops'"),
        (
            {"devices": {"card": {"flops": {"float32": 1e12}, "memory_bandwidth": -1, "memory": 1}}},
            "memory_bandwidth is -1",
        ),
        ({"links": {"bus": {"bandwidth": "fast", "latency": 0}}}, r"links\.bus\.bandwidth is 'fast'"),
        ({"color": "red"}, "unknown field 'color'"),
        ({"devices": {"card": {"flops": {}, "memory_bandwidth": 1, "memory": 1}}}, "flops is empty"),
        ({"devices": {"card": {"flops": {"float32": float("nan")}, "memory_bandwidth": 1, "memory": 1}}}, "is nan"),
        ({"links": {"bus": {"bandwidth": 0, "latency": 0}}}, "above 0"),
        ({"nodes": [{"count": 10**9, "devices": {"card": 10**9}, "link": "bus"}]}, "expected at most"),
        ({"nodes": [{"count": -1, "devices": {"card": 1}, "link": "bus"}]}, r"nodes\[0\]\.count is -1"),
    ],
)
def test_wrong_clusters_are_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        cluster_from({**SMALL, **change})


def test_unknown_names_and_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'a100_80'"):
        load_cluster("a100_8")
    with pytest.raises(ConfigError, match="cannot read"):
        load_cluster(tmp_path / "none.yaml")
    (tmp_path / "bad.yaml").write_text("nodes: [")
    with pytest.raises(ConfigError, match="not usable YAML"):
        load_cluster(tmp_path / "bad.yaml")
    (tmp_path / "list.yaml").write_text("- 1\n")
    with pytest.raises(ConfigError, match="expected an object with named fields"):
        load_cluster(tmp_path / "list.yaml")
    (tmp_path / "own.yaml").write_text(
        "name: own\ndevices: {x: {flops: {float32: 1e12}, memory_bandwidth: 1e11, memory: 1e9}}\n"
        "links: {l: {bandwidth: 1e9, latency: 1e-6}}\nnodes: [{devices: {x: 3}, link: l}]\n"
    )
    assert load_cluster(tmp_path / "own.yaml").size == 3


def test_this_machine_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPEPART_CACHE", str(tmp_path))
    first = this_machine()
    assert isinstance(first, Cluster)
    assert (tmp_path / "machine.json").is_file()
    device = first.devices[0]
    assert device.flops["float32"] > 1e8
    assert device.memory_bandwidth > 1e8
    assert 0 < first.links[first.network].latency < 0.1
    # Two measurements are never equal to the last digit: the second one was read.
    assert load_cluster("local") == first
    kept = json.loads((tmp_path / "machine.json").read_text())
    device = kept["device"]
    for damaged in (
        {},
        [],
        {**kept, "count": 10**12},
        {**kept, "device": {**device, "memory": -1.0}},
        {**kept, "link": 1},
    ):
        assert _kept_after(tmp_path / "machine.json", json.dumps(damaged)) is None
    assert _kept_after(tmp_path / "machine.json", "[" * 100_000) is None
    assert _kept_after(tmp_path / "machine.json", json.dumps(kept)) is not None


def _kept_after(path: Path, text: str) -> MeasuredMachine | None:
    path.write_text(text)
    return _kept(path)


def test_an_unwritable_cache_only_costs_a_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PIPEPART_CACHE", str(tmp_path / "file"))
    assert this_machine().size >= 1
