"""What a step says and counts happens once for each batch, with values of the whole batch, as on one device."""

from __future__ import annotations

import contextlib
import io
import logging
import re
import warnings
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers.logger import rank_zero_experiment
from lightning_utilities.core import rank_zero
from outside import CASES, REFUSED
from support.ranks import run_ranks
from torch.utils.data import DataLoader, TensorDataset
from watching import QUIET, Notes, Written, assert_same_state

from pipepart import PipelineStrategy
from pipepart.errors import PipepartError


class Experiment:
    """Keeps all calls, as an object and below keys."""

    def __init__(self, calls: list[Any], name: str = "") -> None:
        self._calls, self._name = calls, name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Experiment(self._calls, f"{self._name}.{name}")

    def __getitem__(self, key: Any) -> Any:
        return Experiment(self._calls, f"{self._name}[{key}]")

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self._calls.append((self._name, _plain(args), _plain(kwargs)))


class Kept(Written):
    """A logger with an experiment."""

    name = "kept"

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        return Experiment(self.calls)

    def log_hyperparams(self, *args, **kwargs):
        self.calls.append(("hyperparameters", _plain(args), _plain(kwargs)))


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record):
        self.lines.append(f"{record.funcName}: {record.getMessage()}")


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().tolist()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _loaders() -> tuple[DataLoader, DataLoader]:
    torch.manual_seed(3)
    data = TensorDataset(torch.randn(13, 6, dtype=torch.float64), torch.randn(13, 4, dtype=torch.float64))
    return DataLoader(data, batch_size=8), DataLoader(data, batch_size=8)


def _run(name: str, strategy: Any, devices: int) -> dict[str, Any]:
    module, logger, notes, printed, lines = CASES[name](), Kept(), Notes(), io.StringIO(), Lines()
    logs = [logging.getLogger("of the user"), rank_zero.log]  # that of the package imported last
    for log in logs:
        log.addHandler(lines)
        log.setLevel(logging.INFO)
    try:
        with contextlib.redirect_stdout(printed), warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("default")
            options = {**QUIET, "max_epochs": 2, "log_every_n_steps": 1, "logger": logger}
            trainer = L.Trainer(strategy=strategy, devices=devices, callbacks=[notes], **options)
            trainer.fit(module, *_loaders())
    finally:
        for log in logs:
            log.removeHandler(lines)
    kinds = (bool, int, float, str, list, type(None))
    parts = {path: part for path, part in module.named_modules() if path in ("first", "warming", "last")}
    return {
        "printed": [line for line in printed.getvalue().splitlines() if line.startswith(_PRINTED)],
        "warned": [str(warning.message) for warning in warned if "the loss is" in str(warning.message)],
        "lines": [line for line in lines.lines if line.startswith("training_step")],
        "calls": logger.calls,
        "logged": [[step, line] for step, line in logger.lines],
        "losses": notes.losses,
        "metrics": {key: float(value) for key, value in trainer.callback_metrics.items()},
        "held": {
            f"{path}.{key}": value
            for path, part in parts.items()
            for key, value in vars(part).items()
            if type(value) in kinds and key[0] != "_" and key != "training"
        },
        "state": {key: value.clone() for key, value in trainer.strategy.lightning_module_state_dict().items()},
    }


_PRINTED = ("loss", "[", "n=", "rows", "0.", "1.", "val")


def _fit(names: list[str], stages: int, microbatches: int) -> dict[str, Any]:
    if not stages:
        return {name: _run(name, "auto", 1) for name in names}
    return {name: _run(name, PipelineStrategy(stages=stages, microbatches=microbatches), stages) for name in names}


def _compare(got: Any, expected: Any, where: str) -> None:
    """Equal, with numbers (also those in texts) up to rounding."""
    if isinstance(expected, dict):
        assert got.keys() == expected.keys(), where
        for key, value in expected.items():
            _compare(got[key], value, f"{where}, {key}")
    elif isinstance(expected, (list, tuple)):
        assert len(got) == len(expected), f"{where}: {got} instead of {expected}"
        for index, (mine, value) in enumerate(zip(got, expected)):
            _compare(mine, value, f"{where}, {index}")
    elif isinstance(expected, str) and isinstance(got, str):
        number = r"-?\d+\.\d+(?:e-?\d+)?"
        expected = re.sub(r", grad_fn=<\w+>", "", expected)
        assert re.sub(number, "#", got) == re.sub(number, "#", expected), where
        numbers = [float(text) for text in re.findall(number, got)]
        assert numbers == pytest.approx([float(text) for text in re.findall(number, expected)], rel=1e-6), where
    else:
        assert got == (pytest.approx(expected, rel=1e-6) if isinstance(expected, float) else expected), where


_ON_RANK_0 = ("printed", "warned", "lines", "calls", "logged")


@pytest.mark.slow
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 4), (1, 3)])
def test_equal_to_one_device(stages: int, microbatches: int) -> None:
    expected = _fit(list(CASES), 0, 1)
    if stages > 1:
        answers = run_ranks(stages, _fit, list(CASES), stages, microbatches)
    else:
        answers = [_fit(list(CASES), stages, microbatches)]
    for rank, answer in enumerate(answers):
        for name in CASES:
            for key in ("losses", "metrics", "held", *(_ON_RANK_0 if rank == 0 else ())):
                _compare(answer[name][key], expected[name][key], f"{name} on rank {rank}: {key}")
            if rank:
                assert not any(answer[name][key] for key in ("printed", "warned", "lines", "calls")), name
    for name in CASES:
        assert_same_state(answers[0][name]["state"], expected[name]["state"], name)
    assert expected["Printing"]["printed"] and expected["Logging"]["calls"] and expected["Logging"]["warned"]
    assert expected["Logging"]["lines"] and expected["Counting"]["held"]["first.calls"] == 4


def _refused(names: list[str]) -> dict[str, str]:
    found = {}
    for name in names:
        strategy = PipelineStrategy(stages=2, microbatches=4)
        try:
            options = {**QUIET, "logger": Kept()}
            L.Trainer(strategy=strategy, devices=2, max_epochs=1, **options).fit(REFUSED[name][0](), *_loaders())
            found[name] = "nothing was raised"
        except PipepartError as error:
            found[name] = str(error)
    return found


@pytest.mark.slow
def test_what_cannot_happen_once_for_a_batch_is_refused_by_name_on_all_ranks() -> None:
    for rank, answer in enumerate(run_ranks(2, _refused, list(REFUSED))):
        for name, (_, words) in REFUSED.items():
            assert words in answer[name], f"{name} on rank {rank}: {answer[name]}"


def test_one_micro_batch_may_change_buffers_of_a_module_that_is_kept_whole() -> None:
    states = []
    for strategy in (PipelineStrategy(stages=1, microbatches=1), "auto"):
        module = REFUSED["buffers"][0]()
        L.Trainer(strategy=strategy, devices=1, max_epochs=1, **QUIET).fit(module, _loaders()[0])
        states.append(module.state_dict())
    assert_same_state(*states, "one micro-batch")
