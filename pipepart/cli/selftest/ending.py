"""Checks of the end of a job: one rank is killed or raises in a step, and all others end in time and show the cause."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
from torch import nn

from pipepart.cli.selftest.crew import Answer, Crew, Place
from pipepart.cli.selftest.verdicts import Verdict, failed, passed
from pipepart.errors import PipepartError

__all__ = ["ENDINGS", "IN_TIME", "check_ending"]

ENDINGS = ("killed", "raises")
IN_TIME = 10.0
"""Seconds within which all ranks must have ended."""
_CAUSE = "raised on purpose by the self-test"
_BEFORE = 2  # steps before the failure
_AFTER = 6  # steps of a rank that notices nothing
_armed: list[str] = []
"""How this rank is to fail in its next step; empty for a step that passes."""


class _Trip(torch.autograd.Function):
    """Passes its input on, and fails if it is armed: killed in the forward, raising in the backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        if "killed" in _armed:
            os.kill(os.getpid(), signal.SIGKILL)
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        if "raises" in _armed:
            raise ValueError(_CAUSE)
        return gradient


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Trip.apply(self.linear(x))


class _Model(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(_Layer() for _ in range(layers)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def _train_until(place: Place, how: str) -> tuple[str, float]:
    """Train until the last rank fails, and return the error of this rank and its time."""
    from pipepart import Pipeline

    torch.manual_seed(0)
    model, batch = _Model(place.size), torch.randn(8, 32)
    pipe = Pipeline(
        model,
        (batch,),
        stages=place.size,
        microbatches=4,
        schedule="1f1b",
        split_at=[f"layers.{index}" for index in range(1, place.size)],
        **place.pipeline_options,
    )
    for _ in range(_BEFORE):
        pipe.step(batch)
    begun = time.time()
    if place.rank == place.size - 1:
        _armed.append(how)
    try:
        for _ in range(_AFTER):
            pipe.step(batch)
    except PipepartError as error:
        return str(error), begun
    except Exception as error:
        return f"{type(error).__name__}: {error}", begun
    finally:
        _armed.clear()
    return "", begun


def check_ending(crew: Crew, how: str) -> Verdict:
    """Let the last rank of a crew fail, and judge the ends of all others. The crew is used up afterwards."""
    answers = crew.answers(_train_until, how)
    last = crew.size - 1
    stuck = crew.dismiss(IN_TIME)
    ended = time.time()
    try:
        return _judged(how, answers, last, stuck, ended)
    finally:
        crew.close()


def _judged(how: str, answers: list[Answer], last: int, stuck: list[int], ended: float) -> Verdict:
    others = [answer for answer in answers if answer.rank != last]
    starts = [answer.value[1] for answer in answers if answer.ok]
    if how == "killed" and (answers[last].ok or "SIGKILL" not in str(answers[last].value)):
        return failed(f"rank {last} was to be killed: {_said(answers[last])}")
    silent = [answer for answer in others if not answer.ok]
    if silent:
        return failed(f"rank {silent[0].rank}: {silent[0].value}")
    if stuck:
        return failed(f"rank {stuck[0]} has shown the cause, but its process had not ended {IN_TIME:.0f} s later")
    wanted = _CAUSE if how == "raises" else f"rank {last}"
    for answer in others:
        text = _said(answer)
        if wanted not in text and not (how == "killed" and "lost another rank" in text):
            return failed(f"rank {answer.rank} does not show the cause: {text or 'it has noticed nothing'}")
    seconds = ended - max(starts)
    if seconds > IN_TIME:
        return failed(
            f"the ranks ended {seconds:.1f} s after the failure; expected at most {IN_TIME:.0f} s", seconds=seconds
        )
    return passed(f"all others ended within {seconds:.1f} s and showed the cause", seconds=seconds)


def _said(answer: Answer) -> str:
    return str(answer.value[0] if answer.ok else answer.value)
