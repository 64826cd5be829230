"""Python state around a step: a change is seen at the next step, on every rank, as in one process."""

from __future__ import annotations

from functools import cache
from typing import Any

import lightning as L
import pytest
import torch
from stateful import FILLING, READING, REFUSED, loaders
from support.ranks import run_ranks
from torch.utils._pytree import tree_flatten
from watching import QUIET, run_fit

from pipepart import PipelineStrategy
from pipepart.errors import PipepartError

EPOCHS = 4


def _fit(names: list[str], pipeline: bool, devices: int, **options: Any) -> dict[str, Any]:
    found = {}
    for name in names:
        module = {**READING, **FILLING}[name]()
        strategy: Any = PipelineStrategy(stages=2, microbatches=3) if pipeline else "auto"
        found[name] = run_fit(module, *loaders(), strategy, devices, **{"max_epochs": EPOCHS, **options})
        found[name]["held"] = module.state() if hasattr(module, "state") else None
        if pipeline:
            found[name]["made"] = {key: variants.made for key, variants in strategy._steps.variants.items()}
    return found


@cache
def _one_process(name: str) -> dict[str, Any]:
    return _fit([name], False, 1)[name]


def _equal(got: Any, expected: Any, where: str) -> None:
    assert got["order"] == expected["order"], where
    assert got["losses"] == pytest.approx(expected["losses"], rel=1e-9), where
    assert got["metrics"] == pytest.approx(expected["metrics"], rel=1e-9), where


@pytest.fixture(scope="module")
def answers() -> list[dict[str, Any]]:
    return run_ranks(2, _fit, [*READING, *FILLING], True, 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*READING, *FILLING])
def test_equal_to_one_process(name: str, answers: list[dict[str, Any]]) -> None:
    expected = _one_process(name)
    for rank, answer in enumerate(answers):
        _equal(answer[name], expected, f"{name} on rank {rank}")
    written = answers[0][name]["logged"]
    assert [(step, line.keys()) for step, line in written] == [(s, line.keys()) for s, line in expected["logged"]]
    for (_, line), (_, wanted) in zip(written, expected["logged"]):
        assert line == pytest.approx(wanted, rel=1e-9)
    for key, value in expected["state"].items():
        torch.testing.assert_close(answers[0][name]["state"][key], value, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_numbers_become_inputs(answers: list[dict[str, Any]]) -> None:
    """A number that changes costs one more recording, and none from then on; a flag costs one for each of its values."""
    for name, most in {"Annealed": 2, "AnnealedByBatch": 3, "Namespaces": 2, "Flagged": 5}.items():
        for rank, answer in enumerate(answers):
            assert answer[name]["made"]["training_step"] <= most, f"{name} on rank {rank}: {answer[name]['made']}"


@pytest.mark.slow
def test_containers_hold_the_same_on_every_rank(answers: list[dict[str, Any]]) -> None:
    expected = _one_process("Containers")["held"]
    for rank, answer in enumerate(answers):
        held = answer["Containers"]["held"]
        for key, wanted in expected.items():
            where = f"{key} on rank {rank}"
            (got, tree), (want, form) = tree_flatten(held[key]), tree_flatten(wanted)
            assert tree == form, where
            for a, b in zip(got, want):
                if isinstance(b, (float, torch.Tensor)):
                    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12, msg=where)
                else:
                    assert a == b, where


def _resumed(pipeline: bool, devices: int, folder: str) -> dict[str, Any]:
    """Two epochs of a run that anneals, a checkpoint, and two more in a new trainer."""
    options = {**QUIET, "devices": devices, "enable_checkpointing": True, "default_root_dir": folder}
    path = f"{folder}/{'pipeline' if pipeline else 'plain'}.ckpt"
    losses: list[float] = []
    for epochs in (2, EPOCHS):
        module = READING["Annealed"]()
        module.on_train_batch_end = lambda outputs, batch, batch_idx: losses.append(float(outputs["loss"]))
        strategy: Any = PipelineStrategy(stages=2, microbatches=3) if pipeline else "auto"
        trainer = L.Trainer(strategy=strategy, max_epochs=epochs, **options)
        trainer.fit(module, *loaders(), ckpt_path=path if epochs > 2 else None)
        trainer.save_checkpoint(path)
    return {"losses": losses}


@pytest.mark.slow
def test_a_resumed_run_goes_on_with_its_state(tmp_path) -> None:
    expected = _resumed(False, 1, str(tmp_path))
    for answer in run_ranks(2, _resumed, True, 2, str(tmp_path)):
        assert answer["losses"] == pytest.approx(expected["losses"], rel=1e-9)


def _refused(names: list[str]) -> dict[str, str]:
    found = {}
    for name in names:
        try:
            _run(REFUSED[name][0]())
            found[name] = "nothing was raised"
        except PipepartError as error:
            found[name] = str(error)
    return found


def _run(module: Any) -> None:
    run_fit(module, *loaders(), PipelineStrategy(stages=2, microbatches=3), 2, max_epochs=20, num_sanity_val_steps=0)


@pytest.mark.slow
def test_what_cannot_be_repeated_is_refused_by_name() -> None:
    names = [name for name in REFUSED if name != "deciding"]
    for rank, answer in enumerate(run_ranks(2, _refused, names)):
        for name in names:
            assert REFUSED[name][1] in answer[name], f"{name} on rank {rank}: {answer[name]}"


@pytest.mark.slow
def test_a_value_that_is_decided_by_at_every_step_is_refused_by_name() -> None:
    for answer in run_ranks(2, _refused, ["deciding"]):
        assert REFUSED["deciding"][1] in answer["deciding"]
        assert "recorded 16 times" in answer["deciding"]
