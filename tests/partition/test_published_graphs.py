"""The published graphs: every known optimum is met, and proved."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pipepart.cost.given import read_graph
from pipepart.partition import check, given_problem, partition

DATA = Path(os.environ.get("PIPEPART_DATA", Path(__file__).parents[3] / "shared" / "data"))

pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason=f"the published graphs are not in {DATA} (set PIPEPART_DATA)")

# graph, devices, optimum with one host more (4 decimals are known), optimum without it
OPERATORS = [
    ("LayerGraphs_bert24_inference", 6, 17.7899, 17.789906),
    ("LayerGraphs_bert24_training", 6, 41.7458, 41.745812),
    ("LayerGraphs_resnet50_training", 6, 78.6318, 80.454887),
    ("OperatorGraphs_bert_l-6_inference", 3, 29.5795, 33.989102),
    ("OperatorGraphs_bert_l-3_training", 3, 65.3031, 65.303149),
]
# graph, chunks, milliseconds; the last one is known for one order only, and other orders are better
PROFILES = [("alexnet", 2, 43.075), ("gnmt", 4, 25.868), ("gnmt", 8, 19.032), ("resnet50", 4, 111.497)]


@pytest.mark.parametrize(("name", "devices", "with_host", "alone"), OPERATORS, ids=[row[0] for row in OPERATORS])
@pytest.mark.parametrize("host", [False, True], ids=["accelerators", "and-host"])
def test_operator_graphs(name: str, devices: int, with_host: float, alone: float, host: bool) -> None:
    problem = given_problem(read_graph(DATA / "dnn-partitioning" / f"{name}.json"), host=host)
    answer = partition(problem, devices + host, slack=0.0)
    check(problem, answer)
    assert answer.proved
    if host:
        assert answer.bottleneck == pytest.approx(with_host, abs=5.1e-5)
    else:
        assert answer.bottleneck == pytest.approx(alone, rel=1e-6)


@pytest.mark.parametrize(("name", "chunks", "optimum"), PROFILES)
def test_layer_profiles(name: str, chunks: int, optimum: float) -> None:
    problem = given_problem(read_graph(DATA / "pipedream" / f"{name}_graph.txt"))
    answer = partition(problem, chunks, slack=0.0)
    check(problem, answer)
    assert answer.proved
    assert answer.bottleneck * 1e3 == pytest.approx(optimum, abs=5.1e-4)


def test_other_orders_than_the_files_are_better_for_resnet50() -> None:
    problem = given_problem(read_graph(DATA / "pipedream" / "resnet50_graph.txt"))
    answer = partition(problem, 8, slack=0.0)
    assert answer.proved
    assert answer.bottleneck * 1e3 < 58.447
