"""Costs and graphs from files: our own format, and the published ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipepart.cost.given import read_graph
from pipepart.cost.op_costs import OpCosts, given_costs, read_costs, write_costs
from pipepart.errors import PlanError

COSTS = OpCosts(("a", "b"), (1.0, 2.0), (0.5, 0.25), (0.0, 1.0), (4, 8), (1, 2), (3, 5), "profile")

PROFILE = """\
node2 -- Linear(in_features=2, out_features=2, bias=True) -- forward_compute_time=2.000, backward_compute_time=4.000, \
activation_size=[16.0; 4.0], parameter_size=24.000
node1 -- Input0 -- forward_compute_time=9.000, backward_compute_time=0.000, activation_size=8.0, parameter_size=0.000
\tnode1 -- node2
"""

OPERATORS = {
    "maxSizePerFPGA": 100.0,
    "maxFPGAs": 2,
    "maxCPUs": 1,
    "nodes": [
        {
            "id": 5,
            "supportedOnFpga": 1,
            "cpuLatency": 10,
            "fpgaLatency": 1,
            "isBackwardNode": 0,
            "colorClass": 1,
            "size": 7,
        },
        {"id": 3, "supportedOnFpga": 0, "cpuLatency": 20, "fpgaLatency": 2, "isBackwardNode": 0, "size": 8},
        {
            "id": 4,
            "supportedOnFpga": 1,
            "cpuLatency": 30,
            "fpgaLatency": 3,
            "isBackwardNode": 1,
            "colorClass": 1,
            "size": 9,
        },
        {"id": 6, "supportedOnFpga": 1, "cpuLatency": 30, "fpgaLatency": 4, "isBackwardNode": 1, "size": 9},
    ],
    "edges": [
        {"sourceId": 5, "destId": 3, "cost": 0.5},
        {"sourceId": 3, "destId": 4, "cost": 0.25},
        {"sourceId": 6, "destId": 4, "cost": 0.125},
    ],
}


def test_our_own_file_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    write_costs(path, COSTS)
    assert read_costs(path) == COSTS
    turned = given_costs(path, ["b", "a"])
    assert turned.forward == (2.0, 1.0)
    assert turned.source == str(path)
    with pytest.raises(PlanError, match=r"no entry for op 'c' \(1 of 2"):
        given_costs(path, ["a", "c"])


def test_files_that_are_no_costs(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    with pytest.raises(PlanError, match="cannot read"):
        read_costs(path)
    for text, message in (("{", "not JSON"), ("[]", "expected an object"), ('{"version": 9}', "version 9")):
        path.write_text(text)
        with pytest.raises(PlanError, match=message):
            read_costs(path)
    path.write_text('{"version": 1, "names": ["a"]}')
    with pytest.raises(PlanError, match="no field 'forward'"):
        read_costs(path)


def test_layer_profiles(tmp_path: Path) -> None:
    path = tmp_path / "graph.txt"
    path.write_text(PROFILE)
    graph = read_graph(path)
    assert graph.costs.names == ("node1", "node2")
    assert graph.edges == ((0, 1),)
    assert graph.costs.forward == (0.0, 0.002)
    assert graph.costs.backward == (0.0, 0.004)
    assert graph.costs.output_bytes == (8, 20)
    assert graph.costs.parameter_bytes == (0, 24)
    for change, message in (
        ("\tnode2 -- node9\n", "node9"),
        ("nonsense\n", ":4: expected"),
        ("\tnode2 -- node1\n", "cycle"),
    ):
        path.write_text(PROFILE + change)
        with pytest.raises(PlanError, match=message):
            read_graph(path)


def test_operator_graphs(tmp_path: Path) -> None:
    path = tmp_path / "graph.json"
    path.write_text(json.dumps(OPERATORS))
    graph = read_graph(path)
    # Backward ops follow the forward; 6 has no forward op of its own, so its edge to 4 is kept, turned round.
    assert graph.costs.names == ("4", "5", "3", "6")
    assert graph.edges == ((0, 3), (1, 2))
    assert graph.colocated == ((0, 1),)
    assert [(tensor.ops, tensor.size) for tensor in graph.tensors or ()] == [
        ((1, 2), 0.5),
        ((0, 2), 0.25),
        ((0, 3), 0.125),
    ]
    accelerator, host = graph.devices
    assert accelerator.seconds == (3.0, 1.0, float("inf"), 4.0)
    assert host.seconds == (30.0, 10.0, 20.0, 30.0)
    assert (accelerator.count, host.count) == (2, 1)
    path.write_text(json.dumps({"nodes": [], "edges": []}))
    with pytest.raises(PlanError, match="there is no field 'maxSizePerFPGA'"):
        read_graph(path)
    with pytest.raises(PlanError, match="cannot tell the format"):
        read_graph(tmp_path / "graph.xml")
