"""`lightning` and `pytorch_lightning`: the strategy belongs to the package of the trainer that connects it."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import pytorch_lightning as pl
import torch
from lightning.pytorch.strategies import Strategy, StrategyRegistry
from pytorch_lightning_program import Classifier, Data, run
from support.environment import job_environment
from support.ranks import error_of, run_ranks

from pipepart import PipelineMonitor, PipelineStrategy, WeightEMA
from pipepart.lightning import namespaces

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def _packages(thing: Any) -> set[str]:
    """The packages with a Trainer from which the class of a thing derives."""
    return {kind.__module__.partition(".")[0] for kind in type(thing).__mro__} & {"lightning", "pytorch_lightning"}


# ---- a program


def _program(folder: str, resume: str) -> list[Any]:
    average = WeightEMA(0.5, swap=False)
    own = [average, PipelineMonitor(1, folder, report=False)]
    strategy = PipelineStrategy(stages=2, microbatches=2)
    first = run(folder, own=own, strategy=strategy, devices=2)
    first["packages"] = _packages(strategy), _packages(strategy.launcher), _packages(strategy.precision_plugin)
    later = run(f"{folder}/later", resume=resume, strategy="pipepart", devices=2)
    return [first, later]


def _compare(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name in ("ended", "hooks", "best"):
        assert found[name] == expected[name], name
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-9)
    for name in ("validate", "test"):
        assert found[name][0] == pytest.approx(expected[name][0], rel=1e-6), name
    logged = {name: value for name, value in found["logged"].items() if not name.startswith("pipepart/")}
    assert logged == pytest.approx(expected["logged"], rel=1e-6)
    torch.testing.assert_close(found["predict"], expected["predict"], rtol=1e-9, atol=1e-11)
    for name, value in expected["state"].items():
        torch.testing.assert_close(found["state"][name], value, rtol=1e-9, atol=1e-11)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_program_of_pytorch_lightning_equals_one_device(tmp_path: Path) -> None:
    """Own module, data module and callbacks; fit, validate, test and predict; a checkpoint of one device is continued."""
    expected = run(str(tmp_path / "one"))
    resume = tmp_path / "one" / "epoch=0.ckpt"
    resumed = run(str(tmp_path / "one_later"), resume=str(resume))
    for found, later in run_ranks(2, _program, str(tmp_path / "two"), str(resume), timeout=240):
        assert found["packages"] == ({"pytorch_lightning"},) * 3
        _compare(found, expected)
        _compare(later, resumed)
    plain = Classifier.load_from_checkpoint(
        tmp_path / "two" / "epoch=2.ckpt"
    )  # written in parts, read without pipepart
    for name, value in expected["state"].items():
        torch.testing.assert_close(plain.double().state_dict()[name], value, rtol=1e-6, atol=1e-7)


# ---- both in one process


class _Plain(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(8, 4)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.net(batch[0].float()), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


class _Mine(PipelineStrategy):
    """A strategy of the user, which counts steps."""

    def __init__(self) -> None:
        self.count = 0
        super().__init__(stages=1, microbatches=2)

    def training_step(self, *args: Any) -> Any:
        self.count += 1
        return super().training_step(*args)


def _refusal_of_a_timer() -> str:
    """The error for a callback of the other package. The trainer of Lightning 2.5 has one of its own."""
    try:
        trainer = pl.Trainer(strategy="pipepart", devices=1, callbacks=[L.pytorch.callbacks.Timer()], **QUIET)
    except TypeError as error:
        return str(error)
    return error_of(trainer.fit, Classifier())


def _both() -> list[Any]:
    strategies = [PipelineStrategy(stages=1, microbatches=2), _Mine()]
    callback = WeightEMA(0.5)
    data = Data()
    data.setup("fit")
    old = pl.Trainer(strategy=strategies[0], devices=1, max_steps=2, callbacks=callback, precision="64-true", **QUIET)
    new = L.Trainer(strategy=strategies[1], devices=1, max_steps=3, callbacks=WeightEMA(0.5), **QUIET)
    seen = [(_packages(s), isinstance(s, PipelineStrategy)) for s in strategies]
    new.fit(_Plain(), data.train_dataloader())
    old.fit(Classifier(), data)
    mixed = [
        _refusal_of_a_timer(),
        error_of(partial(L.Trainer(strategy="pipepart", devices=1, **QUIET).fit, datamodule=data), _Plain()),
    ]
    steps = [old.global_step, new.global_step, strategies[1].count]
    return [seen, steps, isinstance(callback, pl.Callback), isinstance(callback, L.Callback), mixed]


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_trainers_of_both_in_one_process() -> None:
    [[seen, steps, *is_callback, mixed]] = run_ranks(1, _both, timeout=150)
    assert seen == [({"pytorch_lightning"}, True), ({"lightning"}, True)]
    assert steps == [2, 3, 3]
    assert is_callback == [True, True]
    if L.__version__.startswith("2.5."):
        assert "You passed a `lightning.pytorch` object (Timer) to a `pytorch_lightning` Trainer" in mixed[0]
    else:
        assert "Timer is a Callback of lightning.pytorch, and the Trainer is that of pytorch_lightning" in mixed[0]
    assert (
        "Data is a LightningDataModule of pytorch_lightning, and the Trainer is that of lightning.pytorch" in mixed[1]
    )


def test_registered_in_both() -> None:
    for registry in (StrategyRegistry, pl.strategies.StrategyRegistry):
        assert "pipepart" in registry
    for trainer, package in ((L.Trainer, "lightning"), (pl.Trainer, "pytorch_lightning")):
        strategy = trainer(strategy="pipepart", devices=1, **QUIET).strategy
        assert _packages(strategy) == {package} and type(strategy).__name__ == "PipelineStrategy"
        assert isinstance(strategy, PipelineStrategy)


def test_a_strategy_of_no_trainer_yet() -> None:
    """It counts as one of each package, can be copied and pickled by its class, and belongs to the given plugin."""
    strategy = PipelineStrategy(stages=1)
    assert isinstance(strategy, Strategy) and isinstance(strategy, pl.strategies.ParallelStrategy)
    given = PipelineStrategy(precision_plugin=pl.plugins.precision.DoublePrecision())
    assert _packages(given) == {"pytorch_lightning"}
    for one in (strategy, given):
        for other in (pickle.loads(pickle.dumps(one)), copy.deepcopy(one)):
            assert type(other) is type(one) and other._options == one._options


def test_the_namespace_of_a_thing() -> None:
    assert namespaces.of(Classifier()).pytorch == "pytorch_lightning"
    assert namespaces.of(_Plain()).pytorch == "lightning.pytorch"
    assert namespaces.package_of(L.Fabric(accelerator="cpu", devices=1)) == "lightning.fabric"
    assert namespaces.package_of(torch.nn.Linear(1, 1)) is None
    assert namespaces.either("ModelCheckpoint") == (L.pytorch.callbacks.ModelCheckpoint, pl.callbacks.ModelCheckpoint)
    with pytest.raises(AttributeError, match="NoSuchName"):
        _ = namespaces.loaded().NoSuchName


ORDERS = {
    "import pytorch_lightning as pl, pipepart": ["lightning_fabric", "pytorch_lightning"],
    "import pipepart, pytorch_lightning as pl": ["lightning_fabric", "pytorch_lightning"],
    "import pipepart, lightning.pytorch as pl": ["lightning"],
}
"""Imports of a program, and the packages of Lightning that are imported in the end."""
SCRIPT = """
import os, sys
import torch, torchmetrics  # once for all children; neither imports Lightning

def program(order):
    names = {}
    exec(order, names)
    pl, pipepart = names["pl"], names["pipepart"]
    before = pipepart.PipelineStrategy(stages=1)
    given = {"accelerator": "cpu", "devices": 1, "logger": False, "callbacks": pipepart.WeightEMA()}
    for strategy in (before, "pipepart"):
        assert isinstance(pl.Trainer(strategy=strategy, **given).strategy, pl.strategies.Strategy)
    roots = {name.partition(".")[0] for name in sys.modules}
    print(order, sorted(roots & {"lightning", "pytorch_lightning", "lightning_fabric"}), sep=": ", flush=True)

for order in sys.argv[1:]:
    child = os.fork()
    if not child:
        program(order)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, order
"""


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_only_the_package_of_the_user_is_imported() -> None:
    environment = job_environment(PYTHONPATH=os.pathsep.join([str(Path(__file__).parents[2]), *sys.path]))
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, *ORDERS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("import ")]
    assert lines == [f"{order}: {packages}" for order, packages in ORDERS.items()]
