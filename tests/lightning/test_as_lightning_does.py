"""Behaviour that Lightning's own tests ask for: arguments of steps, runs without data, restored callbacks, copies, traces."""

from __future__ import annotations

import copy
import os
import pickle
import threading
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import BackboneFinetuning, BaseFinetuning, Callback, ModelCheckpoint, Timer
from realistic import Boring, build
from support.ranks import run_ranks
from torch import nn
from torch.utils.data import DataLoader
from watching import QUIET

from pipepart import PipelineStrategy
from pipepart.runtime import rendezvous


def _strategy(devices: int, **options: Any) -> Any:
    """One plain device (0), or a pipeline of this number of stages."""
    return PipelineStrategy(stages=devices, microbatches=2, **options) if devices else "auto"


def _trainer(devices: int, folder: Any = None, sharded: bool = False, **options: Any) -> L.Trainer:
    strategy = _strategy(devices, sharded=sharded) if sharded else _strategy(devices)
    return L.Trainer(strategy=strategy, devices=max(1, devices), default_root_dir=folder, **{**QUIET, **options})


# ---- arguments of steps


class AnyArguments(Boring):
    def validation_step(self, batch, batch_idx, dataloader_idx):
        self.log(
            f"x{dataloader_idx}", self.loss(self(batch)) + batch_idx + 10.0 * dataloader_idx, add_dataloader_idx=False
        )

    def test_step(self, *args):
        return super().test_step(*args)

    def predict_step(self, batch, number, dataloader_idx):
        return self(batch) + number + 10.0 * dataloader_idx


def _evaluated(devices: int) -> Any:
    torch.manual_seed(0)
    module = AnyArguments().double()
    _, train, _ = build("boring")
    trainer = _trainer(devices, limit_val_batches=2, limit_test_batches=2, limit_predict_batches=2)
    validated = trainer.validate(module, [train, train], verbose=False)
    tested = trainer.test(module, train, verbose=False)
    return validated, tested, trainer.predict(module, [train, train])


def test_steps_get_the_arguments_that_lightning_gives_them() -> None:
    """Of any names, as `*args`, and the number of the loader in a run without a fit."""
    validated, tested, predicted = _evaluated(0)
    ours = _evaluated(1)
    assert [set(one) for one in ours[0]] == [set(one) for one in validated]
    for mine, theirs in zip((*ours[0], *ours[1]), (*validated, *tested)):
        assert mine == pytest.approx(theirs, rel=1e-9)
    torch.testing.assert_close(ours[2], predicted)


def test_a_number_of_the_loader_that_lightning_does_not_give_is_an_error_of_lightning() -> None:
    _, train, _ = build("boring")
    with pytest.raises(RuntimeError, match=r"You provided only a single `val_dataloader`, but have included"):
        _trainer(1).validate(AnyArguments().double(), train)


# ---- runs without data


class _Seen(Callback):
    def __init__(self) -> None:
        self.order: list[str] = []

    def load_state_dict(self, state_dict):
        self.order.append("load_state_dict")

    def state_dict(self):
        return {"a": 1}


for _name in ("on_fit_start", "on_sanity_check_start", "on_validation_batch_end", "on_train_start", "on_fit_end"):
    setattr(_Seen, _name, lambda self, *args, _name=_name: self.order.append(_name))


def _without_training(devices: int, folder: str) -> Any:
    torch.manual_seed(devices)
    module = Boring().double()
    _, train, _ = build("boring")
    found = []
    for options in ({"num_sanity_val_steps": 2}, {"limit_val_batches": 0}):
        seen = _Seen()
        trainer = _trainer(devices, limit_train_batches=0, max_epochs=1, callbacks=[seen], **options)
        trainer.fit(module, train, train)
        path = f"{folder}/{devices}-{len(found)}.ckpt"
        trainer.save_checkpoint(path)
        saved = torch.load(path, weights_only=True)["state_dict"]
        same = all(torch.equal(value, saved[name]) for name, value in module.state_dict().items())
        found.append((seen.order, trainer.global_step, same))
        assert trainer.validate(module, DataLoader([]), verbose=False) == []
    return found


def test_a_fit_without_training_batches(tmp_path: Path) -> None:
    """The sanity check runs, as on one device; if there is none, nothing is planned."""
    expected = _without_training(0, str(tmp_path))
    assert "on_validation_batch_end" in expected[0][0]
    assert run_ranks(2, _without_training, 2, str(tmp_path)) == [expected, expected]


# ---- callbacks are restored before the fit starts


class Backbone(Boring):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))

    def forward(self, x):
        return self.layer(self.backbone(x))

    def configure_optimizers(self):
        return torch.optim.SGD(self.layer.parameters(), lr=0.05)


def _resumed(devices: int, folder: str) -> Any:
    """Two epochs, the second of them with the backbone, and a third one after a resume."""
    _, train, _ = build("boring")
    for epochs, resume in ((2, None), (3, f"{folder}/{devices}.ckpt")):
        torch.manual_seed(0)
        module, seen = Backbone().double(), _Seen()
        tuning = BackboneFinetuning(unfreeze_backbone_at_epoch=1, verbose=False)
        timer = Timer(duration={"days": 1})
        callbacks = [tuning, seen, timer]
        trainer = _trainer(devices, limit_train_batches=2, max_epochs=epochs, limit_val_batches=0, callbacks=callbacks)
        trainer.fit(module, train, ckpt_path=resume)
        if resume is None:
            before = timer.time_elapsed()
            trainer.save_checkpoint(f"{folder}/{devices}.ckpt")
    groups = len(trainer.optimizers[0].param_groups)
    return seen.order, module.state_dict(), groups, timer.time_elapsed() > before


@pytest.mark.slow
def test_callbacks_are_restored_before_the_fit_starts(tmp_path: Path) -> None:
    order, state, groups, goes_on = _resumed(0, str(tmp_path))
    assert order[:2] == ["load_state_dict", "on_fit_start"]
    assert groups == 2
    assert goes_on
    for devices, answers in ((1, [_resumed(1, str(tmp_path))]), (2, run_ranks(2, _resumed, 2, str(tmp_path)))):
        for mine in answers:
            assert (mine[0], mine[2], mine[3]) == (order, groups, True), devices
            torch.testing.assert_close(mine[1], state, rtol=1e-9, atol=1e-12)


def _kept_apart(devices: int) -> Any:
    """What a fine-tuning callback adds to the optimizer: not the bias whose values another one in the optimizer has."""
    found: list[Any] = []

    class Thaw(BaseFinetuning):
        def freeze_before_training(self, pl_module):
            self.freeze(pl_module.backbone)

        def finetune_function(self, pl_module, epoch, optimizer):
            self.unfreeze_and_add_param_group(pl_module.backbone, optimizer, lr=0.01)
            names = {id(p): name for name, p in pl_module.named_parameters()}
            found.append([[names[id(p)] for p in group["params"]] for group in optimizer.param_groups])
            weights = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
            other = torch.optim.SGD([weights[0]], lr=0.1)
            found.append(len(self.filter_on_optimizer(other, [weights[1], nn.Parameter(torch.zeros(2))])))

    torch.manual_seed(0)
    module = Backbone().double()
    for part in (module.backbone[0], module.backbone[2], module.layer[2]):
        nn.init.zeros_(part.bias)
    _, train, _ = build("boring")
    options: dict[str, Any] = {"limit_train_batches": 1, "limit_val_batches": 0, "max_epochs": 1}
    _trainer(devices, callbacks=[Thaw()], **options).fit(module, train)
    return found


@pytest.mark.filterwarnings("ignore:The provided params to be frozen")
def test_fine_tuning_compares_parameters_by_value_as_on_one_device() -> None:
    expected = _kept_apart(0)
    assert expected[0][1] == ["backbone.0.weight", "backbone.2.weight"], "equal biases are in the optimizer already"
    assert expected[1] == 1
    assert run_ranks(2, _kept_apart, 2) == [expected, expected]


# ---- nothing to optimize, copies, environment


class Unoptimized(Boring):
    def configure_optimizers(self):
        return None


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.filterwarnings("ignore:.*configure_optimizers.*returned.*None")
def test_a_run_without_an_optimizer_is_saved_and_resumed(tmp_path: Path, sharded: bool) -> None:
    torch.manual_seed(0)
    _, train, _ = build("boring")
    path = tmp_path / "a.ckpt"
    options: dict[str, Any] = {"limit_train_batches": 1, "limit_val_batches": 0, "sharded": sharded}
    trainer = _trainer(1, max_epochs=1, **options)
    trainer.fit(Unoptimized().double(), train)
    trainer.save_checkpoint(path)
    if not sharded:
        assert torch.load(path, weights_only=True)["optimizer_states"] == [{}]
    trainer = _trainer(1, max_epochs=2, **options)
    trainer.fit(Unoptimized().double(), train, ckpt_path=path)
    assert trainer.current_epoch == 2


def test_a_trainer_can_be_pickled_and_copied(tmp_path: Path) -> None:
    _, train, _ = build("boring")
    checkpoint = ModelCheckpoint(tmp_path)
    options: dict[str, Any] = {"limit_val_batches": 0, "limit_train_batches": 1, "max_steps": 1}
    trainer = _trainer(1, callbacks=[checkpoint], enable_checkpointing=True, **options)
    pickled = pickle.loads(pickle.dumps(trainer))
    weights = []
    for one in (trainer, pickled):
        torch.manual_seed(0)
        module = Boring().double()
        one.fit(module, train)
        weights.append(module.state_dict())
    torch.testing.assert_close(weights[0], weights[1])
    torch.manual_seed(0)
    for copied in (copy.deepcopy(trainer), pickle.loads(pickle.dumps(trainer))):
        copied.fit_loop.epoch_loop.max_steps = 2
        copied.fit(Boring().double(), train)
        assert (copied.global_step, trainer.global_step) == (2, 1)


def test_a_run_of_one_process_leaves_no_variables_and_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "PIPEPART_JOB"):
        monkeypatch.delenv(name, raising=False)
    _, train, _ = build("boring")
    before, groups = set(os.environ), dist.is_initialized()
    _trainer(1, max_steps=1, limit_val_batches=0).fit(Boring().double(), train)
    assert not [name for name in set(os.environ) - before if "PIPEPART" in name or "IFNAME" in name]
    assert dist.is_initialized() == groups


def _interfaces() -> list[Any]:
    """The interface while groups are made, in the run, and after it; of a job that chose the interface itself."""
    seen: list[Any] = []
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")

    class Note(Callback):
        def on_train_start(self, trainer, pl_module):
            seen.append([os.environ.get(name) for name in names])

    kept = {name: os.environ.pop(name, None) for name in names}
    chosen = dict(rendezvous._chosen)
    rendezvous._chosen.update(dict.fromkeys(names, "lo"))
    try:
        _, train, _ = build("boring")
        _trainer(2, max_steps=1, limit_val_batches=0, callbacks=[Note()]).fit(Boring().double(), train)
        seen.append([os.environ.get(name) for name in names])
        with rendezvous.locally():
            seen.append([os.environ.get(name) for name in names])
    finally:
        rendezvous._chosen.clear()
        rendezvous._chosen.update(chosen)
        os.environ.update({name: value for name, value in kept.items() if value is not None})
    return seen


def test_interfaces_are_set_during_a_run_only() -> None:
    for seen in run_ranks(2, _interfaces):
        assert seen == [["lo", "lo"], [None, None], ["lo", "lo"]]


# ---- parameters that are thawed when the fit starts


def _thawed(devices: int) -> Any:
    class Thaw(BaseFinetuning):
        def freeze_before_training(self, pl_module):
            self.freeze(pl_module)

        def finetune_function(self, pl_module, epoch, optimizer):
            if epoch == 0:
                self.make_trainable(pl_module.layer)

    torch.manual_seed(0)
    module = Backbone().double()
    _, train, _ = build("boring")
    options: dict[str, Any] = {"limit_train_batches": 2, "limit_val_batches": 0, "max_epochs": 1}
    _trainer(devices, callbacks=[Thaw()], **options).fit(module, train)
    return module.state_dict(), [name for name, p in module.named_parameters() if p.requires_grad]


def test_all_parameters_are_frozen_when_the_run_is_set_up() -> None:
    state, trained = _thawed(0)
    assert len(trained) == 6
    for mine, names in run_ranks(2, _thawed, 2):
        assert names == trained
        torch.testing.assert_close(mine, state, rtol=1e-9, atol=1e-12)


# ---- one process


def test_a_run_in_one_process_watches_no_others() -> None:
    module, train, _ = build("boring")
    _trainer(1, max_steps=1).fit(module, train)
    assert not [thread for thread in threading.enumerate() if "Observer" in type(thread).__name__]


def test_one_process_needs_no_variables_of_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables of a job of SLURM without those of its ranks, as in an interactive shell of it."""
    for name, value in {"SLURM_NTASKS": "1", "SLURM_JOB_NAME": "train", "SLURM_JOB_ID": "1"}.items():
        monkeypatch.setenv(name, value)
    for name in ("SLURM_NODEID", "SLURM_PROCID", "SLURM_LOCALID"):
        monkeypatch.delenv(name, raising=False)
    module, train, _ = build("boring")
    trainer = _trainer(1, max_steps=1)
    trainer.fit(module, train)
    assert (trainer.global_rank, trainer.world_size, trainer.global_step) == (0, 1, 1)
