"""`verify=True`: the table of one process, micro-batches and the pipeline."""

from __future__ import annotations

import contextlib
import io
import re
from typing import Any

import pytest
import torch
from support.mixers import Clip, HandNorm
from support.models import build
from support.ranks import run_ranks
from torch import nn


class InTheMiddle(HandNorm):
    """Too much of the model comes after samples have met."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Sequential(nn.Linear(12, 40), nn.GELU(), nn.Linear(40, 3))


def _verified(make: Any, stages: int) -> str:
    from pipepart import Pipeline

    torch.manual_seed(0)
    model = make()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        pipe = Pipeline(model, model.batch(9), stages=stages, microbatches=3, verify=True)
    held = dict(pipe.named_parameters())
    assert all(p.grad is None and torch.equal(p, before[name]) for name, p in held.items())
    return said.getvalue()


def _figures(table: str) -> dict[str, tuple[float, float]]:
    """Row -> relative difference of micro-batches and of the pipeline."""
    found = {}
    for line in table.splitlines()[2:]:
        name = line.strip().split("  ")[0]
        numbers = [float(word) for word in re.findall(r"\d\.\de[+-]\d+", line)]
        found[name] = tuple(numbers + [0.0] * (2 - len(numbers)))
    return found


@pytest.mark.slow
def test_table_of_a_model_whose_samples_meet_at_the_end() -> None:
    first, second = run_ranks(2, _verified, Clip, 2)
    assert second == "" and first.startswith("verify") and "3 micro-batches" in first
    rows = _figures(first)
    assert set(rows) == {"loss", "gradients of stage 0", "gradients of stage 1"}
    assert rows["loss"][0] > 0.1 and rows["loss"][1] < 1e-5
    assert rows["gradients of stage 0"][0] > 0.05 and rows["gradients of stage 0"][1] < 1e-4


@pytest.mark.slow
def test_table_shows_what_cannot_be_made_equal() -> None:
    table = run_ranks(2, _verified, InTheMiddle, 2)[0]
    assert _figures(table)["loss"][1] > 1e-5 or _figures(table)["gradients of stage 0"][1] > 1e-3


def _plain() -> Any:
    return build("mlp")


def test_table_of_one_process() -> None:
    rows = _figures(_verified(_plain, 1))
    assert all(pipeline < 1e-5 for _, pipeline in rows.values())
