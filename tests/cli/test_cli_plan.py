"""`pipepart plan` for recipes, clusters and any module, without a process."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from support.perfetto import check_trace

from pipepart.cli.main import main
from pipepart.planning import Plan

SMALL = ["recipe=mlp", "model.width=16"]
MODEL = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)])

    def forward(self, x):
        return self.net(x).square().mean()

def make():
    return Model(), (torch.randn(8, 8),)
"""


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.distributed.init_process_group", None)  # nothing may be started


def test_a_recipe_for_this_machine(capsys, tmp_path: Path) -> None:
    assert main(["plan", *SMALL, "strategy.stages=3", "-o", "out/plan.json"]) == 0
    assert "recipe mlp for this machine" in capsys.readouterr().out
    plan = Plan.load(tmp_path / "out" / "plan.json")
    assert (plan.stages, plan.replicas, plan.cost_source) == (3, 1, "profile")
    assert main(["view", "out", "--text"]) == 0
    shown = capsys.readouterr().out
    assert "predicted" in shown
    assert "stage  2 " in shown  # a stage may hold several chunks, by what was measured
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["plan.json"]
    words = ["--compare", "out/plan.json", "--svg", "plan.svg", "--perfetto", "trace.json", "--title", "three"]
    assert main(["view", "out", "-o", "page.html", *words]) == 0
    assert capsys.readouterr().out.split() == ["page.html", "plan.svg", "trace.json"]
    assert "<title>three</title>" in (tmp_path / "page.html").read_text()
    check_trace(json.loads((tmp_path / "trace.json").read_text()))


def test_a_recipe_for_a_cluster_that_is_not_there(capsys) -> None:
    words = [
        "plan",
        *SMALL,
        "cluster=mixed_a100_v100",
        "devices=4",
        "strategy.stages=2",
        "strategy.schedule=1f1b",
        "--json",
    ]
    assert main(words) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["replicas"], data["schedule"], data["cost_source"]) == (2, "1f1b", "analytic")


def test_any_module(capsys, tmp_path: Path) -> None:
    (tmp_path / "somewhere.py").write_text(MODEL)
    assert main(["plan", "somewhere:make", "strategy.stages=2", "strategy.microbatches=4"]) == 0
    shown = capsys.readouterr().out
    assert "somewhere:make" in shown
    assert "4 micro-batches of 2" in shown
    sys.modules.pop("somewhere", None)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["cluster=h10"], "did you mean 'h100'"),
        (["nowhere:make"], "Expected package.module:function"),
        (["cluster=h100", "strategy.stages=3", "devices=4"], "multiple of stages"),
        (["strategy.stagse=2"], "did you mean 'stages'"),
    ],
)
def test_mistakes(words: list[str], expected: str, capsys) -> None:
    assert main(["plan", *words]) == 2
    assert expected in capsys.readouterr().err
