"""The public surface fits on one screen, and every name on it works."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import torch
from support.models import MLP

import pipepart

ROOT = Path(pipepart.__file__).parents[1]


def test_names() -> None:
    assert sorted(pipepart.__all__) == [
        "CaptureError", "Captured", "Cluster", "ConfigError", "NotebookStrategy", "Pipeline", "PipelineMonitor",
        "PipelineStrategy", "PipepartError", "Plan", "PlanError", "WeightEMA", "capture", "consolidate", "load_cluster", "plan",
    ]  # fmt: skip
    assert all(hasattr(pipepart, name) for name in pipepart.__all__)


def test_version_is_the_one_of_the_package() -> None:
    assert importlib.metadata.version("pipepart") == pipepart.__version__


def test_capture_and_plan_without_processes() -> None:
    model = MLP().double()
    captured = pipepart.capture(model, MLP.batch(8))
    assert torch.allclose(captured.module(*(batch := MLP.batch(5))), model(*batch))
    plan = pipepart.plan(model, MLP.batch(32), cluster="a100_80", devices=4, stages=2, replicas=2, cost="analytic")
    assert (plan.stages, plan.replicas) == (2, 2)
    assert plan.lower_bound <= plan.step_time
    assert "stage" in plan.describe()


def test_readme_names_what_exists() -> None:
    readme = (ROOT / "README.md").read_text()
    for path in ("docs/partition.svg", "recipes", "conf", "tools/bench", "tests"):
        assert path in readme
        assert (ROOT / path).exists(), path
    for folder in sorted(path.name for path in (ROOT / "pipepart").iterdir() if (path / "__init__.py").exists()):
        assert folder in readme, f"README does not say what pipepart/{folder} is"
