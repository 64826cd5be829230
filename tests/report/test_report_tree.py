"""The tree of the graph view: every op once, modules that are used again, edges that cross cuts, boxes that never overlap."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from report_samples import gpt_graph, sample_plan

from pipepart.report import GraphView
from pipepart.report.page import make_payload

ASSETS = Path(__file__).parents[2] / "pipepart" / "report" / "assets"
PURE = ("schedules.js", "simulate.js", "hierarchy.js", "layout.js")

pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")


def small_graph(modules: list[str], edges: list[tuple[int, int]]) -> Any:
    fields = {
        "kind": "module",
        "target": "f",
        "module_class": "Linear",
        "source": "",
        "shape": (2,),
        "dtype": "float32",
    }
    ops = [
        SimpleNamespace(
            name=f"op{n}", module=module, output_bytes=100 + n, parameters=(), parameter_bytes=0, flops=0, **fields
        )
        for n, module in enumerate(modules)
    ]
    return SimpleNamespace(ops=tuple(ops), edges=tuple(edges), hash="x")


def ask(graphs: list[Any], mode: str = "module", stages: int = 2, opened: int = 9) -> list[dict]:
    cases = []
    for graph in graphs:
        payload = make_payload(sample_plan(stages, graph=graph), title="x", graph=GraphView.of(graph))
        cases.append({"payload": payload, "mode": mode, "open": opened})
    command = ["node", str(Path(__file__).parent / "tree_cases.js"), str(ASSETS), *PURE]
    done = subprocess.run(command, input=json.dumps(cases), capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def ops_of(tree: dict | int) -> list[int]:
    return [tree] if isinstance(tree, int) else [op for child in tree["children"] for op in ops_of(child)]


def random_graph(number: int) -> Any:
    draw = random.Random(number)
    size = draw.randint(2, 60)
    modules = [".".join(draw.choice("abc") for _ in range(draw.randint(0, 3))) for _ in range(size)]
    edges = sorted({(a, b) for b in range(1, size) for a in (draw.randrange(b), draw.randrange(b))})
    return small_graph(modules, edges)


@pytest.mark.parametrize("mode", ["module", pytest.param("stage", marks=pytest.mark.slow)])
def test_every_op_is_there_once_and_no_box_covers_another(mode):
    graphs = [random_graph(number) for number in range(60)] + [gpt_graph(3), gpt_graph(150)]
    for graph, answer in zip(graphs, ask(graphs, mode), strict=True):
        assert sorted(ops_of(answer["tree"])) == list(range(len(graph.ops)))
        for layout in answer["layouts"]:
            for n, (x, y, w, h) in enumerate(layout["boxes"]):
                assert x >= -1e-6
                assert x + w <= layout["size"][0] + 1e-6
                assert y + h <= layout["size"][1] + 1e-6
                for u, v, a, b in layout["boxes"][:n]:
                    assert x + w <= u + 1e-6 or u + a <= x + 1e-6 or y + h <= v + 1e-6 or v + b <= y + 1e-6


def test_module_that_is_used_again_appears_twice():
    graph = small_graph(["embed", "body.0", "body.1", "embed"], [(0, 1), (1, 2), (2, 3)])
    (answer,) = ask([graph])
    assert len(answer["tree"]["children"]) == 3  # embed, body, embed again; without that, body would stand in a circle
    (answer,) = ask([small_graph(["a.x", "b", "a.x", "a.y"], [(0, 1), (1, 2), (2, 3)])])
    assert [child if isinstance(child, int) else child["label"] for child in answer["tree"]["children"]] == [
        0,
        1,
        "a (2)",
    ]


def test_modules_with_one_child_are_joined():
    (answer,) = ask([small_graph(["a.b.c", "a.b.d", "e"], [(0, 1), (1, 2)])])
    assert [child if isinstance(child, int) else child["label"] for child in answer["tree"]["children"]] == ["a.b", 2]


def test_edges_that_cross_a_cut_carry_their_bytes():
    """Two chunks of two ops: op 1 goes to both ops of the second chunk and is sent once; op 0 goes to the last one."""
    graph = small_graph(["a", "b", "c", "d"], [(0, 1), (1, 2), (1, 3), (2, 3), (0, 3)])
    (answer,) = ask([graph], mode="stage", opened=1)
    (edge,) = answer["between"]
    assert (edge["from"], edge["to"], edge["pairs"]) == ("stage 0", "stage 1", 3)
    assert edge["cut"]
    assert not edge["skip"]
    assert edge["bytes"] == 101 + 100
    (answer,) = ask([graph], mode="stage", stages=4, opened=1)
    skips = {(edge["from"], edge["to"]) for edge in answer["between"] if edge["skip"]}
    assert skips == {("stage 1", "stage 3"), ("stage 0", "stage 3")}


def test_crowds_are_bundled():
    graph = small_graph([""] * 3000, [(n, n + 1) for n in range(2999)])
    (answer,) = ask([graph], opened=1)
    assert len(answer["tree"]["children"]) <= 120
    assert sorted(ops_of(answer["tree"])) == list(range(3000))
