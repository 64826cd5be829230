"""Steps as users and libraries write them: equal to one process, or refused by name on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning as L
import pytest
import torch
from as_written import CASES, REFUSED
from stateful import Auto, loaders
from support.ranks import run_ranks
from torch.utils.data import DataLoader, IterableDataset
from watching import QUIET, assert_same_run, assert_same_state, run_fit

from pipepart import PipelineStrategy
from pipepart.errors import PipepartError

_PLAIN = (bool, int, float, str)


def _fit(names: list[str], pipeline: bool) -> dict[str, Any]:
    found = {}
    for name in names:
        module = CASES[name]()
        strategy: Any = PipelineStrategy(stages=2, microbatches=3) if pipeline else "auto"
        found[name] = run_fit(module, *loaders(), strategy, 2 if pipeline else 1, max_epochs=2)
        found[name]["held"] = {key: value for key, value in vars(module).items() if type(value) in _PLAIN}
        if pipeline:
            found[name]["made"] = strategy._steps.variants["training_step"].made
    return found


def _compare(name: str, answers: list[dict[str, Any]]) -> None:
    expected = _fit([name], False)[name]
    for rank, answer in enumerate(answers):
        assert_same_run(answer[name], expected, f"{name} on rank {rank}")
        for key, value in expected["held"].items():
            wanted = pytest.approx(value, rel=1e-9) if isinstance(value, float) else value
            assert answer[name]["held"][key] == wanted, f"{name}.{key} on rank {rank}"
    assert_same_state(answers[0][name]["state"], expected["state"], name)
    written = answers[0][name]["logged"]
    assert [(step, line.keys()) for step, line in written] == [(s, line.keys()) for s, line in expected["logged"]]
    for (step, line), (_, wanted) in zip(written, expected["logged"]):
        assert line == pytest.approx(wanted, rel=1e-6), f"{name}, step {step}"


@pytest.fixture(scope="module")
def answers() -> list[dict[str, Any]]:
    return run_ranks(2, _fit, list(CASES), True)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_equal_to_one_process(name: str, answers: list[dict[str, Any]]) -> None:
    _compare(name, answers)


@pytest.mark.slow
def test_a_step_that_changes_its_state_is_recorded_few_times(answers: list[dict[str, Any]]) -> None:
    """Numbers that a step sets become inputs of its graph; learning rates are inputs from the beginning."""
    for name, most in {"Counting": 3, "Filling": 3, "Reading": 1, "Vectors": 1, "MetricLoss": 1}.items():
        assert answers[0][name]["made"] <= most, name


def _refused(names: list[str]) -> dict[str, str]:
    found = {}
    for name in names:
        try:
            run_fit(
                REFUSED[name][0](), *loaders(), PipelineStrategy(stages=2, microbatches=3), 2, num_sanity_val_steps=0
            )
            found[name] = "nothing was raised"
        except PipepartError as error:
            found[name] = str(error)
    return found


@pytest.mark.slow
def test_what_cannot_be_repeated_is_refused_by_name() -> None:
    for rank, answer in enumerate(run_ranks(2, _refused, list(REFUSED))):
        for name, (_, words) in REFUSED.items():
            assert words in answer[name], f"{name} on rank {rank}: {answer[name]}"


# ---- data


class Once(IterableDataset):
    """A stream that can be read only once."""

    def __init__(self, hidden: bool) -> None:
        generator = torch.Generator().manual_seed(5)
        rows = [torch.randn(10, generator=generator, dtype=torch.float64) for _ in range(20)]
        self.hidden, self.rows = hidden, iter([(row[:6], row[6:]) for row in rows])

    def __iter__(self) -> Iterator[Any]:
        return self._again() if self.hidden else self.rows

    def _again(self) -> Iterator[Any]:
        yield from self.rows


class Noisy(Once):
    """A stream that begins again, with random numbers of the process."""

    def __init__(self, hidden: bool) -> None:
        super().__init__(hidden)
        self.rows = list(self.rows)

    def __iter__(self) -> Iterator[Any]:
        for x, y in self.rows:
            yield x + 0.1 * torch.randn(6, dtype=torch.float64), y


def _streams(pipeline: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind, hidden in ((Once, False), (Once, True), (Noisy, False)):
        module, losses = Auto(), []
        module.on_train_batch_end = lambda outputs, batch, index, losses=losses: losses.append(float(outputs["loss"]))
        strategy: Any = PipelineStrategy(stages=2, microbatches=2) if pipeline else "auto"
        trainer = L.Trainer(strategy=strategy, devices=2 if pipeline else 1, max_epochs=2, **QUIET)
        torch.manual_seed(7)
        trainer.fit(module, DataLoader(kind(hidden), batch_size=4))
        strategy = PipelineStrategy(stages=2, microbatches=2) if pipeline else "auto"
        trainer = L.Trainer(strategy=strategy, devices=2 if pipeline else 1, **QUIET)
        torch.manual_seed(8)
        validated = trainer.validate(Auto(), DataLoader(kind(hidden), batch_size=4), verbose=False)
        found[f"{kind.__name__} {hidden}"] = [*losses, validated[0]["val_loss"]]
    return found


@pytest.mark.slow
def test_streams_that_can_be_read_only_once_lose_no_batch() -> None:
    expected = _streams(False)
    assert [len(losses) for losses in expected.values()] == [6, 6, 11], (
        "one epoch of a stream that ends; two of the other"
    )
    for answer in run_ranks(2, _streams, True):
        for name, losses in expected.items():
            assert answer[name] == pytest.approx(losses, rel=1e-9), name


class Transferring(Auto):
    """Notes its loaders and the hooks around the transfer of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.__dict__["calls"] = []

    def on_before_batch_transfer(self, batch, index):
        self.calls.append("before")
        return [batch[0] * 1.0, batch[1]]

    def transfer_batch_to_device(self, batch, device, index):
        self.calls.append("move")
        return super().transfer_batch_to_device(batch, device, index)

    def on_after_batch_transfer(self, batch, index):
        self.calls.append("after")
        batch[0].mul_(2)
        return batch

    def train_dataloader(self):
        self.calls.append("train loader")
        return loaders()[0]

    def val_dataloader(self):
        self.calls.append("val loader")
        return loaders()[1]

    predict_dataloader = val_dataloader

    def predict_step(self, batch, index):
        return self.body(batch[0]).sum()


def _calls(run: str, strategy: Any) -> tuple[list[str], dict[str, float], Any]:
    module = Transferring()
    trainer = L.Trainer(strategy=strategy, devices=1, max_epochs=1, **QUIET)
    answer = getattr(trainer, run)(module)
    return module.calls, {key: float(value) for key, value in trainer.callback_metrics.items()}, answer


@pytest.mark.parametrize("run", ["fit", "validate", "predict"])
def test_loaders_and_transfer_hooks_are_called_as_often_as_on_one_device(run: str) -> None:
    calls, metrics, answer = _calls(run, PipelineStrategy(stages=1, microbatches=2))
    expected, wanted, outputs = _calls(run, "auto")
    assert sorted(calls) == sorted(expected)
    assert calls == expected or run == "fit"
    assert metrics == pytest.approx(wanted, rel=1e-9)
    if run == "predict":
        torch.testing.assert_close(torch.stack(answer), torch.stack(outputs))
