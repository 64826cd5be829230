"""The first batch of a run, looked at before the run: planning needs its shapes. Nothing is used up by that."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities._pytree import _tree_flatten as tree_flatten
from lightning.pytorch.utilities.seed import isolate_rng
from torch.utils._pytree import tree_unflatten

from pipepart.errors import PlanError
from pipepart.lightning.loaders import unwrapped

__all__ = ["first_batch", "open_loader", "prepare", "reopen", "steps_ahead"]


def open_loader(trainer: Trainer) -> Any:
    """The loader that the trainer is about to run. Every rank must call it (Lightning waits for all)."""
    loop: Any = trainer.fit_loop if trainer.state.fn == TrainerFn.FITTING else trainer._active_loop
    loop.setup_data()
    loader = loop._combined_loader
    if loader is None or not loader.flattened:
        raise PlanError(
            "there is no data to plan with: this run has no loader, or a limit of 0 batches. Give the strategy `example_batch`."
        )
    return loader


def steps_ahead(trainer: Trainer) -> float:
    """How many batches the fit is going to train on at most, as far as that is known."""
    by_steps = math.inf if trainer.max_steps < 0 else trainer.max_steps * trainer.accumulate_grad_batches
    epochs = math.inf if trainer.max_epochs in (None, -1) else trainer.max_epochs
    return min(by_steps, epochs * trainer.num_training_batches) if epochs else 0


def reopen(trainer: Trainer) -> None:
    """Begin the training data anew, at the place that a checkpoint says if there is one."""
    loop: Any = trainer.fit_loop
    if loop._data_fetcher is not None:
        loop._load_combined_loader_states()
        iter(loop._data_fetcher)


def first_batch(trainer: Trainer, loader: Any) -> Any:
    """The first batch of a loader, as the step will get it.

    Random states (global ones, and the generators of loaders and samplers) and the places of loaders that know theirs
    (`state_dict`, `load_state_dict`) are put back. A dataset that cannot be
    iterated twice loses the batch; such a run gives `example_batch` to the strategy instead.
    """
    # Training takes one batch of every loader at once, evaluation one loader after the other.
    fitting = trainer.state.fn == TrainerFn.FITTING
    with isolate_rng(), _generators_kept(loader.flattened), _places_kept(loader.flattened):
        found = [next(iter(unwrapped(one)), None) for one in (loader.flattened if fitting else loader.flattened[:1])]
    if any(batch is None for batch in found):
        raise PlanError("a loader of this run gave no batch; planning needs one to know the shapes")
    return prepare(trainer, tree_unflatten(found, tree_flatten(loader.iterables)[1]) if fitting else found[0])


def prepare(trainer: Trainer, batch: Any) -> Any:
    """What the loops of Lightning do to a batch before a step."""
    module: Any = trainer.lightning_module
    batch = trainer.precision_plugin.convert_input(batch)
    batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
    return trainer.strategy.batch_to_device(batch, dataloader_idx=0)


@contextmanager
def _places_kept(loaders: list[Any]) -> Iterator[None]:
    own = [unwrapped(loader) for loader in loaders]
    stateful = [one for one in own if hasattr(one, "state_dict") and hasattr(one, "load_state_dict")]
    states = [(loader, deepcopy(loader.state_dict())) for loader in stateful]
    try:
        yield
    finally:
        for loader, state in states:
            loader.load_state_dict(state)


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
