"""Options of the Trainer: each run equals the same run of plain Lightning on one device."""

from __future__ import annotations

import contextlib
import gc
import os
import tempfile
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch import callbacks as cb
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.profilers import PyTorchProfiler
from realistic import Base, Rows, build
from support.ranks import run_ranks
from torch.utils.data import DataLoader
from watching import QUIET, assert_same_run, assert_same_state, run_fit

from pipepart import PipelineStrategy

LIMITS: dict[str, dict[str, Any]] = {
    "fast_dev_run": {"fast_dev_run": 2},
    "limit_batches": {"limit_train_batches": 2, "limit_val_batches": 1, "num_sanity_val_steps": 1},
    "overfit_batches": {"overfit_batches": 2},
    "val_check_interval": {"val_check_interval": 2, "check_val_every_n_epoch": None, "max_epochs": 2},
    "every_second_epoch": {"check_val_every_n_epoch": 2, "max_epochs": 3, "num_sanity_val_steps": 0},
    "max_steps": {"max_steps": 4, "max_epochs": -1},
    "accumulate": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
    "clip_value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "reload_loaders": {"reload_dataloaders_every_n_epochs": 1},
    "max_time": {"max_time": {"seconds": 0}, "max_epochs": -1},
    "tqdm": {"enable_progress_bar": True, "profiler": "simple", "max_epochs": 1},
    "rich": {"enable_progress_bar": True, "callbacks": cb.RichProgressBar, "profiler": "advanced", "max_epochs": 1},
    "pytorch_profiler": {"detect_anomaly": True, "profiler": PyTorchProfiler, "max_epochs": 1},
    "double": {"precision": "64-true"},
}


def _limits(names: list[str], strategy: str, devices: int) -> dict[str, Any]:
    found = {}
    for name in names:
        module, train, val = build(
            {"fast_dev_run": "classifier", "every_second_epoch": "many_losses"}.get(name, "autoencoder")
        )
        if name == "double":
            train, val = (
                DataLoader(x.dataset, 8, collate_fn=lambda rows: torch.stack(rows).double()) for x in (train, val)
            )
        chosen = PipelineStrategy(stages=2, microbatches=3) if strategy == "pipeline" else "auto"
        with tempfile.TemporaryDirectory() as folder:
            options = dict(LIMITS[name])
            if name == "rich":
                options["callbacks"] = [cb.RichProgressBar()]
            elif name == "pytorch_profiler":
                options["profiler"] = PyTorchProfiler(folder, "profile")
            found[name] = run_fit(module, train, val, chosen, devices, **options)
            if name == "pytorch_profiler":
                found[name]["profiled"] = "[pl][profile]" in "".join(p.read_text() for p in Path(folder).glob("*"))
    return found


def _check(answers: list[dict[str, Any]], expected: dict[str, Any], relative: float = 1e-8) -> None:
    for name, wanted in expected.items():
        for rank, answer in enumerate(answers):
            assert_same_run(answer[name], wanted, f"{name} on rank {rank}", relative)
        assert_same_state(answers[0][name]["state"], wanted["state"], name, 10 * relative)


QUICK = ["limit_batches", "val_check_interval", "accumulate", "clip_value"]


@pytest.mark.slow
def test_limits_and_clipping() -> None:
    _check(run_ranks(2, _limits, QUICK, "pipeline", 2), _limits(QUICK, "plain", 1))


@pytest.mark.slow
def test_all_other_options() -> None:
    """Also with progress bars and profilers. (A limit of no time at all ends both runs at the same step.)"""
    names = [name for name in LIMITS if name not in QUICK]
    answers, expected = run_ranks(2, _limits, names, "pipeline", 2), _limits(names, "plain", 1)
    _check(answers, expected)
    assert expected["max_time"]["step"] < 3
    for name in ("tqdm", "rich"):
        assert answers[0][name]["bar"] == pytest.approx(expected[name]["bar"], rel=1e-6), name
        assert "loss_epoch" in expected[name]["bar"]
    assert all(answer["pytorch_profiler"]["profiled"] for answer in answers)


# ---- optimizers


class Lion(torch.optim.Optimizer):
    """A small optimizer of one's own, as people bring along."""

    def __init__(self, params, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                    p.add_(torch.tanh(100 * momentum.lerp(p.grad, 0.1)), alpha=-group["lr"])
                    momentum.lerp_(p.grad, 0.01)
        return loss


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, eps=1e-3, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-3),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, eps=1e-3),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5, eps=1e-3),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, eps=1e-3, momentum=0.5, centered=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2, eps=1e-3),
    "radam": lambda p: torch.optim.RAdam(p, lr=1e-2, eps=1e-3),
    "adamax": lambda p: torch.optim.Adamax(p, lr=1e-2, eps=1e-3),
    "asgd": lambda p: torch.optim.ASGD(p, lr=1e-2),
    "lion": lambda p: Lion(p),
}


def _optimizers(names: list[str], pipeline: bool, devices: int, folder: str) -> dict[str, Any]:
    found, plan = {}, None
    for name in names:
        module, train, _ = build("warm_up")
        module.configure_optimizers = lambda module=module, name=name: OPTIMIZERS[name](module.parameters())
        if not pipeline:
            chosen: Any = "auto"
        elif plan is None:
            chosen = PipelineStrategy(stages=2, microbatches=3)
        else:
            chosen = PipelineStrategy(plan=plan)  # the same model: it is measured once
        trainer = L.Trainer(strategy=chosen, devices=devices, max_epochs=2, **QUIET)
        trainer.fit(module, train)
        plan = chosen.plan if pipeline else None
        trainer.save_checkpoint(f"{folder}/{name}-{pipeline}.ckpt")
        found[name] = trainer.global_step
    return found


@pytest.mark.slow
def test_optimizers_equal_one_device(tmp_path) -> None:
    """Weights and the whole state of the optimizer, as it is in the checkpoint."""
    names = list(OPTIMIZERS)
    run_ranks(2, _optimizers, names, True, 2, str(tmp_path))
    _optimizers(names, False, 1, str(tmp_path))
    for name in names:
        got = torch.load(tmp_path / f"{name}-True.ckpt", weights_only=True)
        wanted = torch.load(tmp_path / f"{name}-False.ckpt", weights_only=True)
        assert_same_state(got["state_dict"], wanted["state_dict"], name)
        got, wanted = got["optimizer_states"][0], wanted["optimizer_states"][0]
        assert got["param_groups"] == wanted["param_groups"], name
        assert list(got["state"]) == list(wanted["state"]), name
        for index, state in wanted["state"].items():
            assert set(got["state"][index]) == set(state), name
            for key, value in state.items():
                other = torch.as_tensor(got["state"][index][key]).double()
                assert torch.allclose(other, torch.as_tensor(value).double(), rtol=1e-7, atol=1e-9), (
                    f"{name} {index} {key}"
                )


# ---- precision


class Overflow(Base):
    """One weight gets an infinite gradient in 16 bits at the third step, on one stage only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(12, 12), torch.nn.Linear(12, 4)

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self.second(torch.relu(self.first(x)))
        return torch.nn.functional.cross_entropy(logits, y)

    def on_after_backward(self):
        if self.trainer.fit_loop.epoch_loop.batch_idx == 1 and not self.second.weight.is_meta:
            self.second.weight.grad[0, 0] = float("inf")


def _half(precision: str, pipeline: bool, devices: int) -> dict[str, Any]:
    options: dict[str, Any] = {"max_epochs": 2, "gradient_clip_val": 0.5}
    if precision == "16-mixed":
        options["plugins"] = [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0))]
        torch.manual_seed(3)
        module, train, val = Overflow(), *build("warm_up", dtype=torch.float32)[1:]
    else:
        options["precision"] = precision
        name = "autoencoder" if precision != "16-true" else "boring"  # squares of Adam underflow
        module, train, val = build(name, dtype=torch.float32)
    chosen = PipelineStrategy(stages=2, microbatches=2) if pipeline else "auto"
    found = run_fit(module, train, val if precision != "16-mixed" else None, chosen, devices, **options)
    scaler = getattr(module.trainer.precision_plugin, "scaler", None)
    return {**found, "scale": scaler.get_scale() if scaler is not None else None}


@pytest.mark.parametrize(
    ("precision", "relative"), [("16-mixed", 1e-2), ("bf16-mixed", 3e-2), ("bf16-true", 6e-2), ("16-true", 2e-2)]
)
@pytest.mark.slow
def test_precision(precision: str, relative: float) -> None:
    answers = run_ranks(2, _half, precision, True, 2)
    expected = _half(precision, False, 1)
    for rank, answer in enumerate(answers):
        assert answer["order"] == expected["order"]
        assert answer["losses"] == pytest.approx(expected["losses"], rel=relative), rank
        assert answer["scale"] == expected["scale"], "ranks decide together, as one device does"
    assert_same_state(answers[0]["state"], expected["state"], precision, relative)
    if precision == "16-mixed":
        assert expected["scale"] == 256.0, "two steps were skipped"


# ---- callbacks


def _callbacks(pipeline: bool, devices: int, folder: str) -> dict[str, Any]:
    module, train, val = build("autoencoder")
    best = cb.ModelCheckpoint(folder, filename="{epoch}", monitor="val_loss", save_top_k=2, save_last=True)
    stop = cb.EarlyStopping("val_loss", min_delta=0.02, patience=1)
    more = [
        cb.LearningRateMonitor(),
        cb.DeviceStatsMonitor(),
        cb.Timer(),
        cb.ModelSummary(max_depth=2),
        cb.RichModelSummary(),
    ]
    schedule = cb.GradientAccumulationScheduler({0: 1, 2: 2})
    chosen = PipelineStrategy(stages=2, microbatches=3) if pipeline else "auto"
    found = run_fit(
        module, train, val, chosen, devices,
        callbacks=[best, stop, schedule, *more], enable_checkpointing=True, enable_model_summary=True, max_epochs=6,
    )  # fmt: skip
    found["best"] = (
        best.best_model_path,
        float(best.best_model_score),
        sorted(best.best_k_models),
        best.last_model_path,
    )
    found["stopped"] = stop.stopped_epoch
    trainer = module.trainer
    found["tested"] = trainer.validate(module, val, ckpt_path="best", verbose=False)
    found["parameters"] = L.pytorch.utilities.model_summary.ModelSummary(module).total_parameters
    return found


@pytest.mark.slow
def test_callbacks(tmp_path) -> None:
    """Checkpoints by a monitor, early stopping, learning rates, device statistics, summaries, the best one validated."""
    expected = _callbacks(False, 1, str(tmp_path / "one"))
    for rank, answer in enumerate(run_ranks(2, _callbacks, True, 2, str(tmp_path / "two"))):
        assert_same_run(answer, expected, f"rank {rank}")
        path, score, paths, last = expected["best"]
        names = [p.replace("/one/", "/two/") for p in (path, *paths, last)]
        assert answer["best"] == (names[0], pytest.approx(score, rel=1e-6), names[1:-1], names[-1])
        assert answer["stopped"] == expected["stopped"]
        assert answer["tested"] == [pytest.approx(expected["tested"][0], rel=1e-6)]
        assert answer["parameters"] == expected["parameters"]


class Thaw(cb.BaseFinetuning):
    """Trains the head first, then all of it."""

    def freeze_before_training(self, module):
        self.freeze(module.encoder)

    def finetune_function(self, module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.encoder, optimizer, lr=1e-3)


def _thaw(pipeline: bool, devices: int) -> dict[str, Any]:
    module, train, _ = build("warm_up")
    module.configure_optimizers = lambda: torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.05)
    chosen = PipelineStrategy(stages=2, microbatches=3) if pipeline else "auto"
    return run_fit(module, train, None, chosen, devices, callbacks=[Thaw()], max_epochs=3)


@pytest.mark.slow
def test_fine_tuning_callback() -> None:
    expected = _thaw(False, 1)
    answers = run_ranks(2, _thaw, True, 2)
    assert_same_run(answers[1], expected, "thaw")
    assert_same_state(answers[0]["state"], expected["state"], "thaw")
    before = build("warm_up")[0].state_dict()
    assert not torch.equal(expected["state"]["encoder.weight"], before["encoder.weight"])


def _learning_rate(pipeline: bool, devices: int) -> tuple[Any, Any]:
    module, train, _ = build("many_losses", samples=48)
    module.learning_rate = 1e-3
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=module.learning_rate)
    module.optimizer_step = lambda epoch, batch_idx, optimizer, closure: optimizer.step(closure=closure)
    chosen = PipelineStrategy(stages=2, microbatches=3) if pipeline else "auto"
    trainer = L.Trainer(strategy=chosen, devices=devices, max_epochs=1, **{**QUIET, "enable_checkpointing": True})
    found = L.pytorch.tuner.Tuner(trainer).lr_find(
        module, train, num_training=12, max_lr=0.5, attr_name="learning_rate"
    )
    trainer.fit(module, train)
    return found.results, found.suggestion(skip_begin=1, skip_end=1)


@pytest.mark.slow
def test_lr_find(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    results, suggestion = _learning_rate(False, 1)
    for got, best in run_ranks(2, _learning_rate, True, 2):
        assert got["lr"] == results["lr"]
        assert got["loss"] == pytest.approx(results["loss"], rel=1e-6)
        assert best == suggestion


class Norms(cb.Callback):
    def __init__(self, pipeline: bool) -> None:
        self.seen: list[dict[str, float]] = []
        self.pipeline = pipeline

    def on_before_optimizer_step(self, trainer, module, optimizer):
        explicit = self.pipeline and trainer.global_step % 2
        with trainer.strategy.whole_parameters(gradients=True) if explicit else contextlib.nullcontext():
            self.seen.append({key: float(value) for key, value in L.pytorch.utilities.grad_norm(module, 2).items()})
            torch.nn.utils.clip_grad_norm_(module.parameters(), 0.01)


def _norms(pipeline: bool, devices: int) -> Any:
    module, train, _ = build("warm_up")
    norms = Norms(pipeline)
    chosen = PipelineStrategy(stages=2, microbatches=3, schedule="1f1b", split_at=["decoder"]) if pipeline else "auto"
    found = run_fit(module, train, None, chosen, devices, callbacks=[norms], max_epochs=1)
    return norms.seen, found["state"]


@pytest.mark.slow
def test_norms_in_a_hook_are_those_of_the_model() -> None:
    expected, state = _norms(False, 1)
    answers = run_ranks(2, _norms, True, 2)
    for got, _ in answers:
        assert len(got) == len(expected) > 1
        for one, other in zip(got, expected):
            assert one == pytest.approx(other, rel=1e-8, abs=1e-12)
    assert_same_state(answers[0][1], state, "clipped by hand")


# ---- validate, test and predict without fit


def _evaluations(pipeline: bool, devices: int) -> dict[str, Any]:
    found = {}
    for name in ("boring", "autoencoder", "classifier"):
        module, train, val = build(name)
        chosen = PipelineStrategy(stages=2, microbatches=3) if pipeline else "auto"
        trainer = L.Trainer(strategy=chosen, devices=devices, **QUIET)
        answers = {"validate": trainer.validate(module, [val, train] if name == "boring" else val, verbose=False)}
        if name == "boring":
            answers["test"] = trainer.test(module, train, verbose=False)
            answers["predict"] = trainer.predict(module, train)
        if name == "autoencoder":
            answers["predict"] = trainer.predict(module, [train, val])
            trainer.fit_loop.max_epochs = 1
            trainer.fit(module, train, val)  # planned anew, with the same trainer
            answers["after"] = trainer.validate(module, val, verbose=False)
        found[name] = answers
    return found


def _close(got: Any, wanted: Any) -> None:
    left, tree = torch.utils._pytree.tree_flatten(got)
    right, other = torch.utils._pytree.tree_flatten(wanted)
    assert tree == other
    for a, b in zip(left, right):
        assert torch.allclose(torch.as_tensor(a), torch.as_tensor(b), rtol=1e-6, atol=1e-9)


@pytest.mark.slow
def test_validate_test_predict_without_fit() -> None:
    expected = _evaluations(False, 1)
    for answer in run_ranks(2, _evaluations, True, 2):
        _close(answer, expected)


# ---- one model after another


def _open_files() -> list[int]:
    """Of this process, after each of three fits that nobody holds on to."""
    counts = []
    for _ in range(3):
        module, train, _ = build("boring")
        trainer = L.Trainer(strategy=PipelineStrategy(stages=2, microbatches=3), devices=2, max_steps=1, **QUIET)
        trainer.fit(module, train)
        del module, train, trainer
        for _ in range(2):  # what weak dictionaries let go is found by the second
            gc.collect()
        torch.distributed.barrier()
        counts.append(len(os.listdir("/proc/self/fd")))
    return counts


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc to count")
def test_a_run_that_is_over_leaves_no_file_open() -> None:
    for first, *later in run_ranks(2, _open_files):
        assert max(later) <= first


def _again() -> list[float]:
    """A second trainer takes the same module, of which each rank holds a part only."""
    module, train, val = build("boring")
    losses = []
    for _ in range(2):
        trainer = L.Trainer(strategy=PipelineStrategy(stages=2, microbatches=3), devices=2, max_epochs=1, **QUIET)
        trainer.fit(module, train)
        losses.append(trainer.validate(module, val, verbose=False)[0]["x"])
    trainer.strategy.make_whole()
    assert not any(p.is_meta for p in module.parameters())
    with torch.no_grad():
        batch = next(iter(DataLoader(Rows(type(module).sample, 12, 5, torch.float64), batch_size=12)))
        losses.append(float(module.loss(module.layer(batch))))
    return losses


@pytest.mark.slow
def test_module_is_whole_again_for_the_next_trainer() -> None:
    answers = run_ranks(2, _again)
    assert answers[0] == answers[1]
    assert answers[0][1] < answers[0][0]
    assert answers[0][2] == pytest.approx(answers[0][1], rel=1e-6)
