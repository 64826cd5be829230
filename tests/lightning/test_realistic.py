"""Realistic LightningModules, unmodified: weights, losses, logs, hooks and learning rates as on one device."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import pytest
from realistic import MICRO_STATISTICS, MODULES, build
from support.ranks import run_ranks
from watching import MicrobatchesByHand, assert_same_run, assert_same_state, run_fit

from pipepart import PipelineStrategy, Plan

MICROBATCHES = 3
SIX = ("gpt", "resnet", "many_losses", "frozen")
"""On six processes: tied weights, batch statistics, several losses, parts without gradients. All others are on 2 x 2."""


def _pipelines(names: list[str], stages: int, devices: int, plans: dict[str, Plan] | None = None) -> dict[str, Any]:
    found = {}
    for name in names:
        module, train, val = build(name)
        given = {"plan": plans[name]} if plans else {"stages": stages, "microbatches": MICROBATCHES}
        strategy = PipelineStrategy(**given)
        found[name] = run_fit(module, train, val, strategy, devices)
        found[name]["epoch_values"] = getattr(module, "epoch_values", None)
        found[name]["plan"] = strategy.plan
    return found


@cache
def _one_replica(stages: int) -> list[dict[str, Any]]:
    """Every module on so many stages, each with a plan of its own."""
    return run_ranks(stages, _pipelines, list(MODULES), stages, stages, timeout=360)


_references: dict[str, Any] = {}


def _reference(name: str) -> dict[str, Any]:
    """Plain Lightning on one device, with the whole batch at once where that is the same thing."""
    if name not in _references:
        module, train, val = build(name)
        strategy = MicrobatchesByHand(MICROBATCHES) if name in MICRO_STATISTICS else "auto"
        _references[name] = run_fit(module, train, val, strategy, 1)
        _references[name]["epoch_values"] = getattr(module, "epoch_values", None)
    return _references[name]


def _check(name: str, answers: list[dict[str, Any]]) -> None:
    expected = _reference(name)
    for rank, answer in enumerate(answers):
        where = f"{name} on rank {rank}"
        assert_same_run(answer[name], expected, where)
        if expected["epoch_values"] is not None:
            assert answer[name]["epoch_values"] == pytest.approx(expected["epoch_values"], rel=1e-6), where
    written = answers[0][name]["logged"]
    assert [(step, list(line)) for step, line in written] == [
        (step, list(line)) for step, line in expected["logged"]
    ], name
    for (_, line), (_, wanted) in zip(written, expected["logged"]):
        assert line == pytest.approx(wanted, rel=1e-6, abs=1e-6), name
    assert_same_state(answers[0][name]["state"], expected["state"], name)


@pytest.mark.parametrize(
    ("stages", "devices"),
    [
        pytest.param(stages, devices, marks=pytest.mark.xdist_group(f"realistic on {stages} stages"))
        for stages, devices in [(2, 2), (3, 3), (2, 4), (3, 6)]
    ],
)
@pytest.mark.slow
@pytest.mark.timeout(700)
def test_equal_to_one_device(stages: int, devices: int) -> None:
    """Replicas take the plans of one of them: its stages are the same, and it is measured once."""
    answers, replicas = _one_replica(stages), devices // stages
    names = list(MODULES) if devices < 6 else list(SIX)
    if replicas > 1:
        plans = {name: dataclasses.replace(answers[0][name]["plan"], replicas=replicas) for name in names}
        answers = run_ranks(devices, _pipelines, names, stages, devices, plans, timeout=360)
    for name in names:
        assert answers[0][name]["plan"].replicas == replicas, name
        _check(name, answers)


def test_classifier_equal_to_one_device() -> None:
    """The quick one of them: metrics, lists, returned values."""
    _check("classifier", run_ranks(2, _pipelines, ["classifier"], 2, 2))
