"""The first batch of a run, looked at before the run: planning needs its shapes. Nothing is used up by that."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.seed import isolate_rng

from pipepart.errors import PlanError

__all__ = ["first_batch"]


def first_batch(trainer: Trainer) -> Any:
    """The first batch of the loader that the trainer is about to run, as its step will get it.

    Random states (global ones, and the generators of loaders and samplers) are put back. A dataset that cannot be
    iterated twice loses the batch; such a run gives `example_batch` to the strategy instead.
    """
    if trainer.state.fn == TrainerFn.FITTING:
        trainer.fit_loop.setup_data()
        loader: Any = trainer.fit_loop._combined_loader
    else:
        loop: Any = trainer._active_loop
        loop.setup_data()
        loader = loop._combined_loader
    if loader is None:
        raise PlanError("there is no data to plan with: the loader of this run is empty")
    with isolate_rng(), _generators_kept(loader.flattened):
        found = next(iter(loader), None)
        loader.reset()
    if found is None:
        raise PlanError("the loader of this run gave no batch; planning needs one to know the shapes")
    batch = found[0] if isinstance(found, tuple) and len(found) == 3 else found
    if trainer.state.fn != TrainerFn.FITTING and len(loader.flattened) > 1 and isinstance(batch, list):
        batch = next(item for item in batch if item is not None)  # evaluation loaders come one after the other
    return prepare(trainer, batch)


def prepare(trainer: Trainer, batch: Any) -> Any:
    """What the loops of Lightning do to a batch before a step."""
    module: Any = trainer.lightning_module
    batch = trainer.precision_plugin.convert_input(batch)
    batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
    return trainer.strategy.batch_to_device(batch, dataloader_idx=0)


@contextmanager
def _generators_kept(loaders: list[Any]) -> Iterator[None]:
    found: dict[int, torch.Generator] = {}
    for loader in loaders:
        batch_sampler = getattr(loader, "batch_sampler", None)
        for owner in (loader, getattr(loader, "sampler", None), getattr(batch_sampler, "sampler", None)):
            generator = getattr(owner, "generator", None)
            if isinstance(generator, torch.Generator):
                found[id(generator)] = generator
    states = [(generator, generator.get_state()) for generator in found.values()]
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)
