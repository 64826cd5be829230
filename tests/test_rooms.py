"""Set-up goes through the rooms in the order of the data and does the work of each of them once."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import lightning as L
import pytest
import torch
from support.lightning_modules import Module, loader
from support.models import build
from support.ranks import run_ranks

from pipepart import Pipeline, PipelineStrategy
from pipepart.build import batch_verdict
from pipepart.cost import cache
from pipepart.planning import search
from pipepart.recording import record as recording_of_a_call
from pipepart.recording import record_step
from pipepart.recording.proof import chunk_proof
from pipepart.runtime import StageRuntime

WORK: dict[str, list[Callable[..., Any]]] = {
    "recording": [recording_of_a_call, record_step],
    "samples": [batch_verdict.look_at_samples],
    "cost": [cache.profiled],
    "planning": [search],
    "proof of the chunks": [chunk_proof.prove_chunks],
    "runtime": [StageRuntime.__init__],
}
"""The rooms of set-up in the order of the data, and the functions that do their work."""


@contextmanager
def _followed(rooms: list[str]) -> Iterator[None]:
    """Inside, `rooms` gets the room of each call of one of these functions."""
    room_of = {function.__code__: room for room, functions in WORK.items() for function in functions}

    def see(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code in room_of:
            rooms.append(room_of[frame.f_code])

    sys.setprofile(see)
    try:
        yield
    finally:
        sys.setprofile(None)


def _of_a_pipeline() -> list[str]:
    model, rooms = build("mlp"), list[str]()
    with _followed(rooms):
        Pipeline(model, model.batch(8), stages=2, microbatches=2)
    return rooms


def _of_a_fit() -> list[str]:
    rooms: list[str] = []
    strategy = PipelineStrategy(stages=2, microbatches=2)
    trainer = L.Trainer(
        strategy=strategy, devices=2, accelerator="cpu", max_steps=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    with _followed(rooms):
        trainer.fit(Module("mlp"), loader("mlp", 16, 8))
    return rooms


@pytest.mark.parametrize("how", [_of_a_pipeline, _of_a_fit])
def test_each_room_is_entered_once(how: Callable[[], list[str]]) -> None:
    first, second = run_ranks(2, how)
    entered = [room for room, _ in groupby(first)]
    assert entered == list(WORK), "rank 0 does all of it, in the order of the data"
    assert [room for room, _ in groupby(second)] == ["recording", "cost", "runtime"], "the others are told"


def test_a_room_that_is_entered_again_is_seen() -> None:
    rooms: list[str] = []
    with _followed(rooms):
        for _ in range(2):
            recording = recording_of_a_call(torch.nn.Linear(2, 2), (torch.randn(2, 2),))
            batch_verdict.look_at_samples(recording, (torch.randn(4, 2),), {}, 2)
    assert [room for room, _ in groupby(rooms)] == ["recording", "samples"] * 2
