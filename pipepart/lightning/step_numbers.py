"""The numbers that a step reads: of its batch and its loader, of the trainer, and of places that change from step to step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pipepart.lightning.trainer_views import number_of_trainer
from pipepart.recording import Recording

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

__all__ = ["all_numbers", "numbers_of", "step_numbers"]


def step_numbers(trainer: Trainer, batch_idx: int, loader: int | None) -> dict[str, Any]:
    """The numbers of a step, by the names of their inputs."""
    return {
        "batch_idx": batch_idx,
        "global_step": trainer.global_step,
        "current_epoch": trainer.current_epoch,
        "dataloader_idx": loader or 0,
    }


def numbers_of(recording: Recording, trainer: Trainer, numbers: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers that a recording takes, by the names of their inputs."""
    wanted = {item.name for item in recording.inputs if item.kind == "number"}
    own = {key: value for key, value in numbers.items() if key in wanted}
    rates = {name: number_of_trainer(trainer, name) for name in wanted}
    return own | {name: rate for name, rate in rates.items() if rate is not None}


def all_numbers(recording: Recording, trainer: Trainer, batch_idx: int, loader: int | None) -> dict[str, Any]:
    """All numbers of a step, on every rank."""
    numbers = numbers_of(recording, trainer, step_numbers(trainer, batch_idx, loader))
    places = {item.name: item.place for item in recording.inputs if item.place is not None}
    return numbers | {name: place.read() for name, place in places.items()}
