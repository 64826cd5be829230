"""Manual optimization and several optimizers, on several stages and replicas, as on one device."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from manual import MODULES, REFUSED, data
from support.ranks import run_ranks
from torch.utils._pytree import keystr, tree_flatten_with_path
from torch.utils.data import DataLoader
from watching import QUIET, assert_same_run, run_fit

from pipepart import PipelineStrategy
from pipepart.errors import ConfigError, PipepartError
from pipepart.lightning.refusals import check_module, check_optimizers

EQUAL = ["Gan", "ToggledGan", "ActorCritic", "Adversary", "Accumulated"]
DOUBLE = {"max_epochs": 1, "precision": "64-true"}


def _fit(names: list[str], stages: int, replicas: int, microbatches: int = 3) -> dict[str, Any]:
    """Ten steps of each module. Each replica gets its share of each batch."""
    found = {}
    for name in names:
        strategy = PipelineStrategy(stages=stages, microbatches=microbatches)
        replica = int(os.environ["RANK"]) // stages
        loader = data(replica, replicas)
        found[name] = run_fit(MODULES[name](), loader, None, strategy, stages * replicas, **DOUBLE)
    return found


@cache
def _one_device(name: str) -> dict[str, Any]:
    return run_fit(MODULES[name](), data(), None, "auto", 1, **DOUBLE)


def _check(names: list[str], stages: int, replicas: int, microbatches: int = 3) -> None:
    answers = run_ranks(stages * replicas, _fit, names, stages, replicas, microbatches)
    for name in names:
        expected = _one_device(name)
        for rank, answer in enumerate(answers):
            where = f"{name} on rank {rank} of {replicas} x {stages}"
            got = answer[name]
            if replicas == 1:  # losses and logs are those of the batch of a replica
                assert_same_run(got, expected, where)
                assert [(s, line.keys()) for s, line in got["logged"]] == [
                    (s, line.keys()) for s, line in expected["logged"]
                ] or rank
                for (_, line), (_, wanted) in zip(got["logged"], expected["logged"]):
                    assert line == pytest.approx(wanted, rel=1e-6, abs=1e-6), where
            assert (got["step"], got["rates"]) == (expected["step"], expected["rates"]), where
        state = answers[0][name]["state"]
        assert list(state) == list(expected["state"]), name
        for key, value in expected["state"].items():
            torch.testing.assert_close(
                state[key], value, rtol=1e-9, atol=1e-11, msg=f"{name} {key} {replicas} x {stages}"
            )


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("stages", "replicas", "names"),
    [(2, 1, EQUAL), (1, 2, EQUAL), (3, 1, ["Gan", "ActorCritic"]), (2, 2, ["ToggledGan"])],
)
def test_equal_to_one_device(stages: int, replicas: int, names: list[str]) -> None:
    """All modules at {1, 2, 3} stages x {1, 2} replicas: `python -m tools.bench.manual`."""
    _check(names, stages, replicas)


@pytest.mark.slow
@pytest.mark.timeout(300)
def _fit_one_sample(stages: int | None) -> dict[str, Any]:
    strategy: Any = "auto" if stages is None else PipelineStrategy(stages=stages)
    samples = data(batch_size=1).dataset.tensors[0]  # type: ignore[attr-defined]
    return run_fit(MODULES["OneSample"](), DataLoader(samples), None, strategy, stages or 1, **DOUBLE)


def test_a_step_that_fails_with_batches_of_other_sizes() -> None:
    """All of its acts are done. Before, those after the place of the failure were not."""
    assert_same_run(_fit_one_sample(1), _fit_one_sample(None), "one stage")


def test_batch_norm_changes_its_statistics_once() -> None:
    _check(["NormGan"], 2, 1, microbatches=1)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_random_numbers_are_the_same_in_all_segments_and_on_any_number_of_stages() -> None:
    (one,), two = run_ranks(1, _fit, ["NoisyGan"], 1, 1), run_ranks(2, _fit, ["NoisyGan"], 2, 1)
    expected = one["NoisyGan"]
    assert len(set(expected["losses"])) == 10
    for rank, answer in enumerate(two):
        assert_same_run(answer["NoisyGan"], expected, f"rank {rank}")
    for key, value in expected["state"].items():
        torch.testing.assert_close(two[0]["NoisyGan"]["state"][key], value, rtol=1e-9, atol=1e-11, msg=key)


def _epoch(stages: int, saved: str, resumed: str | None) -> None:
    """Five steps, from the beginning or after five others, and a checkpoint. Without stages: plain Lightning."""
    strategy: Any = PipelineStrategy(stages=stages, microbatches=3) if stages else "auto"
    options = {**QUIET, **DOUBLE, "max_epochs": 1 if resumed is None else 2, "enable_checkpointing": True}
    folder = os.path.dirname(saved)
    trainer = L.Trainer(strategy=strategy, devices=max(1, stages), default_root_dir=folder, **options)
    trainer.fit(MODULES["ToggledGan"](), data(batches=5), ckpt_path=resumed)
    trainer.save_checkpoint(saved)


def _flat(path: str) -> dict[str, Any]:
    """Everything in a checkpoint that training goes on with, by its path."""
    found = torch.load(path, weights_only=False)
    kept = {key: found[key] for key in ("state_dict", "optimizer_states", "lr_schedulers", "epoch", "global_step")}
    return {keystr(path): value for path, value in tree_flatten_with_path(kept)[0]}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_checkpoints_are_those_of_one_device_and_go_on_at_another_shape(tmp_path) -> None:
    """Two optimizers and schedulers: 5 steps on 2 stages, then 5 on one device, and the other way round."""
    names = {key: str(tmp_path / f"{key}.ckpt") for key in ("plain", "piped", "plain then piped", "piped then plain")}
    _epoch(0, names["plain"], None)
    run_ranks(2, _epoch, 2, names["piped"], None)
    _epoch(0, names["piped then plain"], names["piped"])
    run_ranks(2, _epoch, 2, names["plain then piped"], names["plain"])
    for one, other in [("plain", "piped"), ("piped then plain", "plain then piped")]:
        expected, got = _flat(names[one]), _flat(names[other])
        assert got.keys() == expected.keys()
        for key, value in expected.items():
            if isinstance(value, (float, torch.Tensor)):
                torch.testing.assert_close(
                    got[key], value, rtol=1e-9, atol=1e-12, msg=lambda text, key=key: f"{key}: {text}"
                )
            else:
                assert got[key] == value, f"{other}: {key}"
    assert _flat(names["piped then plain"])["['global_step']"] == 20


def _refused() -> dict[str, str]:
    found = {}
    for kind in REFUSED:
        try:
            _fit_once(kind())
            found[kind.__name__] = "nothing was raised"
        except PipepartError as error:
            found[kind.__name__] = f"{type(error).__name__}: {error}"
    return found


def _fit_once(module: L.LightningModule) -> None:
    strategy = PipelineStrategy(stages=2, microbatches=3)
    L.Trainer(strategy=strategy, devices=2, max_steps=1, **{**QUIET, **DOUBLE}).fit(module, data(batches=1))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_what_cannot_be_cut_is_refused_by_name_on_all_ranks() -> None:
    first, second = run_ranks(2, _refused)
    for kind, words in REFUSED.items():
        assert words in first[kind.__name__], first[kind.__name__]
    assert first == second


def test_refused_before_anything_is_recorded() -> None:
    with torch.device("meta"):
        module = MODULES["Gan"]()
    with pytest.raises(ConfigError, match="built on the meta device"):
        check_module(module)
    optimizers = list(MODULES["Gan"]().configure_optimizers())
    check_optimizers(optimizers, Precision(), automatic=False)
    with pytest.raises(ConfigError, match="automatic optimization takes one"):
        check_optimizers(optimizers, Precision(), automatic=True)
    scaled = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    with pytest.raises(ConfigError, match="Use 'bf16-mixed'"):
        check_optimizers(optimizers, scaled, automatic=False)


def test_verify_says_that_it_is_not_possible(monkeypatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("pipepart.lightning.pipeline_strategy.tell", said.append)
    strategy = PipelineStrategy(stages=1, microbatches=3, verify=True)
    L.Trainer(strategy=strategy, devices=1, max_steps=1, **{**QUIET, **DOUBLE}).fit(MODULES["Gan"](), data(batches=1))
    shown = "".join(said)
    assert "verify     not possible: the step runs its backwards and optimizers itself" in shown
    assert "2 backward(s), run as 2 pipeline(s) over the same stages" in shown
