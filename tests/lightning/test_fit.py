"""`Trainer.fit` with the strategy: weights, losses and metrics as one plain process gives them."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from support.lightning_modules import Module, loader
from support.ranks import run_ranks
from support.reference import assert_close, reference_step

import pipepart
from pipepart import PipelineStrategy
from pipepart.runtime.sync import ReplicaMean

SLOW = pytest.mark.slow
QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
    "use_distributed_sampler": False,
}


def _fit(name: str, devices: int, strategy, trainer: dict, samples: int = 42, batch_size: int = 8):
    module = Module(name, seed=3 if int(torch.distributed.get_rank() if devices > 1 else 0) == 0 else 99)
    trainer = L.Trainer(strategy=strategy, devices=devices, **{**QUIET, **trainer})
    trainer.fit(module, loader(name, samples, batch_size), loader(name, 20, batch_size, seed=6))
    state = trainer.strategy.lightning_module_state_dict()
    metrics = {key: float(value) for key, value in trainer.callback_metrics.items()}
    return {key: value.clone() for key, value in state.items()}, module.seen, metrics, trainer.global_step


def _pipeline(name: str, stages: int, devices: int, trainer: dict, **options):
    strategy = PipelineStrategy(stages=stages, microbatches=4, **options)
    return _fit(name, devices, strategy, trainer)


def _plain_loop(name: str, steps: int, clip: float | None, accumulate: int = 1):
    """The same training written down in plain PyTorch: micro-batches by hand, no Lightning, no pipepart."""
    module = Module(name, seed=3)
    setup = module.configure_optimizers()
    optimizer, scheduler = setup["optimizer"], setup["lr_scheduler"]["scheduler"]
    losses, done, batch_number, samples = [], 0, 0, 0
    while done < steps:
        for batch in loader(name, 42, 8):  # the last batch has fewer samples than micro-batches
            size = len(batch[0])
            count = min(4, size)
            sizes = [size // count + (i < size % count) for i in range(count)]
            before = [p.grad.clone() if p.grad is not None else None for p in module.parameters()]
            module.zero_grad()
            losses.append(float(reference_step(module.model, batch, sizes)))
            for p, old in zip(module.parameters(), before):
                if p.grad is not None:
                    p.grad *= size  # batches that are accumulated count by their samples
                    if old is not None:
                        p.grad += old
            batch_number += 1
            samples += size
            if batch_number % accumulate:
                continue
            for p in module.parameters():
                p.grad /= samples
            samples = 0
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(module.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            done += 1
            if done == steps:
                break
    return module.state_dict(), losses


@pytest.mark.parametrize(
    ("name", "stages"),
    [
        ("gpt", 2),
        pytest.param("gpt", 3, marks=SLOW),
        pytest.param("mlp", 4, marks=SLOW),
        pytest.param("unet", 2, marks=SLOW),
    ],
)
def test_weights_after_training_equal_one_process(name: str, stages: int) -> None:
    options = {"max_steps": 8, "gradient_clip_val": 0.5}
    answers = run_ranks(stages, _pipeline, name, stages, stages, options)
    expected, losses = _plain_loop(name, 8, 0.5)
    state = answers[0][0]
    assert list(state) == list(Module(name).state_dict())
    for key, value in expected.items():
        assert_close(key, state[key], value)
    for _, seen, _, step in answers:
        assert seen == pytest.approx(losses, rel=1e-9)
        assert step == 8
    assert all(answer[2] == answers[0][2] for answer in answers), "metrics differ between ranks"
    assert set(answers[0][2]) == {"train_loss", "val_loss"}


@pytest.mark.slow
def test_gradient_accumulation_equals_one_process() -> None:
    answers = run_ranks(
        2, _pipeline, "gpt", 2, 2, {"max_steps": 4, "accumulate_grad_batches": 3, "gradient_clip_val": 0.5}
    )
    expected, _ = _plain_loop("gpt", 4, 0.5, accumulate=3)
    for key, value in expected.items():
        assert_close(key, answers[0][0][key], value)


def _plain_lightning(name: str, trainer: dict):
    return _fit(name, 1, "auto", trainer)


def test_one_stage_equals_plain_lightning() -> None:
    """One stage with one micro-batch is one device."""
    options = {"max_steps": 8, "gradient_clip_val": 0.5}
    state, seen, metrics, _ = _fit("gpt", 1, PipelineStrategy(stages=1), options)
    expected_state, expected_seen, expected_metrics, _ = _plain_lightning("gpt", options)
    assert seen == pytest.approx(expected_seen, rel=1e-9)
    assert metrics == pytest.approx(expected_metrics, rel=1e-6)  # Lightning keeps metrics in float32
    for key, value in expected_state.items():
        assert_close(key, state[key], value)


def _by_name(name: str):
    return _fit(name, 2, "pipepart", {"max_steps": 3})


@pytest.mark.slow
def test_strategy_by_name() -> None:
    assert "pipepart" in L.pytorch.strategies.StrategyRegistry
    answers = run_ranks(2, _by_name, "mlp")
    assert len(answers[0][1]) == 3
    assert pipepart.PipelineStrategy.strategy_name == "pipepart"


def _counted(*args: Any) -> tuple[Any, list[int]]:
    """A fit, and how often gradients were exchanged between the replicas by then, at each step of the optimizer."""
    count, steps = [0], []
    own, step = ReplicaMean.finish, Module.optimizer_step

    def finish(self):
        count[0] += 1
        return own(self)

    def optimizer_step(self, epoch, batch_idx, optimizer, closure):
        def watched():
            loss = closure()
            steps.append(count[0])
            return loss

        step(self, epoch, batch_idx, optimizer, watched)

    ReplicaMean.finish, Module.optimizer_step = finish, optimizer_step
    try:
        return _pipeline(*args), steps
    finally:
        ReplicaMean.finish, Module.optimizer_step = own, step


@pytest.mark.slow
def test_replicas_equal_one_process_and_reduce_once_for_each_step() -> None:
    """Two replicas see the same batches here (no sampler), so their mean is the gradient of one."""
    options = {"max_steps": 4, "accumulate_grad_batches": 3, "gradient_clip_val": 0.5}
    answers = run_ranks(4, _counted, "gpt", 2, 4, options)
    expected, losses = _plain_loop("gpt", 4, 0.5, accumulate=3)
    for (state, seen, _, _), steps in answers:
        assert steps == [1, 2, 3, 4], "one exchange of gradients for each step of the optimizer"
        assert seen == pytest.approx([loss / 3 for loss in losses], rel=1e-9), "Lightning shows the share of the step"
        for key, value in expected.items() if state else ():
            assert_close(key, state[key], value)
    assert answers[0][0][0]


def _checkpoint(stages: int, devices: int, folder: str, resume: str | None, steps: int):
    module = Module("gpt", seed=3)
    trainer = L.Trainer(
        strategy=PipelineStrategy(stages=stages, microbatches=4),
        devices=devices,
        max_steps=steps,
        **{**QUIET, "enable_checkpointing": True, "default_root_dir": folder, "limit_val_batches": 0},
    )
    trainer.fit(module, loader("gpt", 44, 8), ckpt_path=resume)
    trainer.save_checkpoint(f"{folder}/{stages}-{steps}.ckpt")
    return trainer.strategy.lightning_module_state_dict()


@pytest.mark.slow
def test_checkpoint_is_plain_lightning_and_resumes_at_another_shape(tmp_path) -> None:
    run_ranks(2, _checkpoint, 2, 2, str(tmp_path), None, 3)
    path = tmp_path / "2-3.ckpt"
    content = torch.load(path, weights_only=True)
    Module("gpt").load_state_dict(content["state_dict"])
    assert len(content["optimizer_states"][0]["state"]) == len(list(Module("gpt").parameters()))
    resumed = run_ranks(3, _checkpoint, 3, 3, str(tmp_path), str(path), 7)[0]
    expected = _checkpoint(1, 1, str(tmp_path), str(path), 7)
    assert not torch.equal(expected["model.head.weight"], content["state_dict"]["model.head.weight"])
    for key, value in expected.items():
        assert_close(key, resumed[key], value)
