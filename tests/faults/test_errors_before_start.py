"""Bad input is one clear sentence, before anything is trained."""

from __future__ import annotations

import re

import lightning as L
import pytest
import torch
from support.lightning_modules import Module, loader
from support.models import MLP
from support.ranks import error_of, run_ranks

from pipepart import Pipeline, PipelineStrategy, Plan
from pipepart.errors import PlanError, ScheduleError
from pipepart.runtime import fit_mesh


def test_unknown_schedule_suggests_the_nearest() -> None:
    with pytest.raises(ScheduleError, match=r"'1f1' is not known: did you mean '1f1b'\?"):
        PipelineStrategy(stages=2, schedule="1f1")
    with pytest.raises(ScheduleError, match="did you mean 'gpipe'"):
        Pipeline(MLP().double(), MLP.batch(8), schedule="g-pipe")


@pytest.mark.parametrize("stages", [0, -1, 2.5, "two", True])
def test_stages_must_be_a_number_of_devices(stages) -> None:
    with pytest.raises(PlanError, match="stages must be a whole number of at least 1 or 'auto'"):
        PipelineStrategy(stages=stages)


def test_devices_that_are_no_multiple_of_stages() -> None:
    with pytest.raises(
        PlanError, match=r"devices must be a multiple of stages .* got devices=3, stages=2. Use devices=4"
    ):
        L.Trainer(strategy=PipelineStrategy(stages=2), devices=3, accelerator="cpu", logger=False)
    with pytest.raises(PlanError, match="replicas x stages must equal devices"):
        fit_mesh(4, stages=2, replicas=3)
    with pytest.raises(PlanError, match="devices must be a multiple of replicas"):
        fit_mesh(5, replicas=2)


def test_mesh_follows_from_what_is_given() -> None:
    assert (fit_mesh(8, 4).replicas, fit_mesh(8, 4).stages) == (2, 4)
    assert (fit_mesh(8).replicas, fit_mesh(8).stages) == (1, 8)
    assert (fit_mesh(8, replicas=4).replicas, fit_mesh(8, replicas=4).stages) == (4, 2)
    mesh = fit_mesh(6, 3)
    assert [mesh.pipeline(r) for r in range(2)] == [[0, 1, 2], [3, 4, 5]]
    assert [mesh.copies(s) for s in range(3)] == [[0, 3], [1, 4], [2, 5]]


def test_batch_smaller_than_the_microbatches() -> None:
    with pytest.raises(
        PlanError, match=r"a batch of 3 sample\(s\) cannot be split into 4 micro-batches.*microbatches=3 or less"
    ):
        Pipeline(MLP().double(), MLP.batch(3), microbatches=4)


def test_example_without_a_batch_dimension() -> None:
    with pytest.raises(PlanError, match="no tensor with a dimension for the samples"):
        Pipeline(MLP().double(), (torch.tensor(1.0), torch.tensor(2.0)), microbatches=2)


def test_a_function_is_no_module() -> None:
    with pytest.raises(PlanError, match="expected a module or a bound method of a module, got function"):
        Pipeline(lambda x: x, (torch.randn(4, 2),))


def _too_many_stages():
    class Tiny(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.only = torch.nn.Linear(4, 4)

        def forward(self, x):
            return self.only(x).sum()

    Pipeline(Tiny(), (torch.randn(8, 4),), stages=4, microbatches=4)


@pytest.mark.slow
def test_more_stages_than_the_model_can_be_cut_into() -> None:
    for text in run_ranks(4, error_of, _too_many_stages):
        assert re.search("PartitionError.*4", text), text


def _small_last_batch_only():
    module = Module("mlp")
    trainer = L.Trainer(
        strategy=PipelineStrategy(stages=2, microbatches=16),
        devices=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        max_steps=1,
    )
    trainer.fit(module, loader("mlp", 20, 8))


def test_microbatches_that_no_batch_can_fill_in_a_trainer() -> None:
    for text in run_ranks(2, error_of, _small_last_batch_only):
        assert re.search("a batch of 8 sample.* cannot be split into 16 micro-batches", text), text


def test_plan_files(tmp_path) -> None:
    with pytest.raises(PlanError, match="there is no plan at"):
        Plan.load(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(PlanError, match=r"bad.json.*not a plan"):
        Plan.load(tmp_path / "bad.json")
    (tmp_path / "other.json").write_text('{"version": 99}')
    with pytest.raises(PlanError, match="version 99; expected 1"):
        Plan.load(tmp_path / "other.json")


def test_plan_of_another_model_or_shape(tmp_path) -> None:
    pipe = Pipeline(MLP().double(), MLP.batch(8), microbatches=2)
    pipe.plan.save(tmp_path / "plan.json")
    plan = Plan.load(tmp_path / "plan.json")
    assert plan == pipe.plan
    assert plan.hash == pipe.plan.hash
    again = Pipeline(MLP().double(), MLP.batch(8), plan=plan)
    assert again.plan.microbatches == 2
    with pytest.raises(PlanError, match="the plan is for another model"):
        Pipeline(MLP(depth=5).double(), MLP.batch(8), plan=plan)
