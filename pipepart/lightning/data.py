"""Data of a run: its first batch, which planning needs; the batches of a window; streams that end on all ranks together."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_unflatten
from torch.utils.data import DataLoader, IterableDataset

from pipepart.errors import PlanError
from pipepart.lightning.first_batch import PreparedFirst, same_batch
from pipepart.lightning.namespaces import of, overridden
from pipepart.lightning.random_states import isolate_rng
from pipepart.lightning.run_patches import RunPatches

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

__all__ = [
    "LoaderAround",
    "batches_ahead",
    "batches_of_evaluation",
    "begin_streams",
    "ends_together",
    "loader_number",
    "needs_agreement",
    "of_rank_zero",
    "prepare",
    "received",
    "reopen",
    "shared_example",
    "steps_ahead",
    "transfer_hook",
    "unwrapped",
    "why_not_ahead",
]


# ---- the first batch


def shared_example(trainer: Trainer, given: Any, broadcast: Callable[[Any], Any], patches: RunPatches) -> Any:
    """The batch to record with, on every rank: the `given` one, or the first batch of rank 0. Every rank must call it.

    None: this run has no loader, a limit of 0 batches, or an empty loader. `patches` are those of the run.
    """
    if given is not None:
        return trainer.strategy.batch_to_device(broadcast(given))
    loader = _open_loader(trainer, patches)
    if loader is None:
        return None
    first = _prepared_once(trainer, _first_batch(trainer, loader), patches) if trainer.is_global_zero else None
    if trainer.state.fn != "fit":
        begin_streams(loader)
    return of_rank_zero(trainer, first, broadcast)


def of_rank_zero(trainer: Trainer, batch: Any, broadcast: Callable[[Any], Any]) -> Any:
    """The batch of rank 0, on every rank. Every rank must call it."""
    batch = broadcast(batch)
    return batch if batch is None or trainer.is_global_zero else received(trainer, batch)


def received(trainer: Trainer, batch: Any) -> Any:
    """A batch that another rank has prepared and sent, on the device of this rank. No other hook runs a second time."""
    module: Any = trainer.lightning_module
    return module._call_batch_hook("transfer_batch_to_device", batch, trainer.strategy.root_device, 0)


def _open_loader(trainer: Trainer, patches: RunPatches) -> Any:
    """The loader that the trainer is about to run, if any. Every rank must call it (Lightning waits for all).

    Loops of an evaluation would ask for their loaders once more when they run.
    """
    fitting = trainer.state.fn == "fit"
    loop: Any = trainer.fit_loop if fitting else trainer._active_loop
    with _generators_as_given(trainer.strategy):
        loop.setup_data()
    if not fitting:
        patches.put(loop, "setup_data", _not_the_next(loop.setup_data))
    loader = loop._combined_loader
    return None if loader is None or not loader.flattened else loader


def loader_number(trainer: Trainer, opened: bool, patches: RunPatches) -> int | None:
    """The number of the loader of the first batch, if steps of this run get it: an evaluation of several, one by one.

    `opened`: `shared_example` has opened the loader.
    """
    if trainer.state.fn == "fit":
        return None
    loop: Any = trainer._active_loop
    loader = loop._combined_loader if opened else _open_loader(trainer, patches)
    if loader is None:
        return None
    begin_streams(loader)
    if loader._mode == "sequential" and len(loader.flattened) > 1:
        return 0
    loop._verify_dataloader_idx_requirement()  # a step that takes the number: Lightning's own words, before it is recorded
    return None


def _not_the_next(function: Callable[[], None]) -> Callable[[], None]:
    """The function, of which the next call does nothing."""
    calls: list[None] = []

    def call() -> None:
        calls.append(None)
        if len(calls) > 1:
            function()

    return call


def reopen(trainer: Trainer) -> None:
    """Start the training data again, at the position of a checkpoint if there is one."""
    loop: Any = trainer.fit_loop
    if loop._data_fetcher is not None:
        begin_streams(loop._combined_loader)
        loop._load_combined_loader_states()
        iter(loop._data_fetcher)


def begin_streams(loader: Any) -> None:
    """Let the streams of a combined loader continue where planning has stopped reading them."""
    for one in loader.flattened:
        while isinstance(one, LoaderAround):
            if hasattr(type(one), "begin"):
                one.begin()
            one = one._loader


def steps_ahead(trainer: Trainer) -> float:
    """The largest number of batches that the fit will train on, as far as it is known."""
    by_steps = math.inf if trainer.max_steps < 0 else trainer.max_steps * trainer.accumulate_grad_batches
    epochs = math.inf if trainer.max_epochs in (None, -1) else trainer.max_epochs
    return min(by_steps, epochs * trainer.num_training_batches) if epochs else 0


def _first_batch(trainer: Trainer, loader: Any) -> Any:
    """The first batch of a loader, as it gives it; None if it has none. The run still begins with this batch.

    Random states (global ones, and the generators of loaders and samplers) and the positions of loaders that have one
    (`state_dict`, `load_state_dict`) are restored. Streams that can be read only once keep the batch (`read_once`).
    """
    # Training takes one batch of every loader at once, evaluation (if not told otherwise) one loader after the other.
    at_once = loader._mode != "sequential"
    with isolate_rng(), _generators_kept(loader.flattened), _positions_kept(loader.flattened):
        found = [next(iter(_read_alone(one)), None) for one in (loader.flattened if at_once else loader.flattened[:1])]
    if any(batch is None for batch in found):
        return None
    return tree_unflatten(found, of(trainer)._tree_flatten(loader.iterables)[1]) if at_once else found[0]


def _prepared_once(trainer: Trainer, batch: Any, patches: RunPatches) -> Any:
    """The batch as the step will receive it. If the run begins with the same batch, its hooks do not run again."""
    module: Any = trainer.lightning_module
    if batch is None or not transfer_hook(trainer, module):
        return None if batch is None else prepare(trainer, batch)
    first = PreparedFirst(trainer.precision_plugin.convert_input(batch), trainer)
    prepared = prepare(trainer, batch)
    first.pass_on(prepared, trainer, patches)
    return prepared


def prepare(trainer: Trainer, batch: Any) -> Any:
    """Convert and move a batch as the loops of Lightning do before a step."""
    module: Any = trainer.lightning_module
    batch = trainer.precision_plugin.convert_input(batch)
    batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
    return trainer.strategy.batch_to_device(batch, dataloader_idx=0)


@contextmanager
def _positions_kept(loaders: list[Any]) -> Iterator[None]:
    own = [unwrapped(loader) for loader in loaders]
    stateful = [one for one in own if hasattr(one, "state_dict") and hasattr(one, "load_state_dict")]
    states = [(loader, deepcopy(loader.state_dict()), dict(getattr(loader, "__dict__", {}))) for loader in stateful]
    try:
        yield
    finally:
        for loader, state, attributes in states:
            if attributes:
                loader.__dict__.clear()
                loader.__dict__.update(attributes)
            # A state may be that of the last batch, from which `load_state_dict` goes on with the next one.
            if not same_batch(loader.state_dict(), state):
                loader.load_state_dict(state)


@contextmanager
def _generators_kept(loaders: list[Any]) -> Iterator[None]:
    states = [(generator, generator.get_state()) for loader in loaders for generator in _generators_of(loader)]
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)


@contextmanager
def _generators_as_given(strategy: Any) -> Iterator[None]:
    """Give generators of loaders that are made inside the states that they come with: the run starts the loaders again."""
    process, states = strategy.process_dataloader, dict[torch.Generator, torch.Tensor]()

    def note(loader: Any) -> Any:
        for generator in _generators_of(loader):
            states.setdefault(generator, generator.get_state())
        return process(loader)

    strategy.process_dataloader = note
    try:
        yield
    finally:
        del strategy.process_dataloader
        for generator, state in states.items():
            generator.set_state(state)


def _generators_of(loader: Any) -> list[torch.Generator]:
    """The random generators that the user gave a loader or its sampler."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    owners = (loader, getattr(loader, "sampler", None), getattr(batch_sampler, "sampler", None))
    found = {id(one): one for one in (getattr(owner, "generator", None) for owner in owners)}
    return [one for one in found.values() if isinstance(one, torch.Generator)]


# ---- the batches of a window

_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


class _Kept(Iterator[Any]):
    """Iterator that can return its next items before they are taken."""

    def __init__(self, source: Iterator[Any]) -> None:
        self._source, self._kept = source, deque[Any]()

    def __next__(self) -> Any:
        return self._kept.popleft() if self._kept else next(self._source)

    def look(self, count: int) -> list[Any]:
        """The next `count` items, or as many as there are."""
        while len(self._kept) < count:
            try:
                self._kept.append(next(self._source))
            except StopIteration:
                break
        return list(self._kept)[:count]


def batches_ahead(trainer: Trainer) -> list[Any]:
    """The batches, as the loader gives them, that are accumulated with the present one and come after it.

    They are taken from the iterator of Lightning early, kept, and passed on in the same order when Lightning asks for
    them.
    """
    loop: Any = trainer.fit_loop
    ready = loop.epoch_loop.batch_progress.current.ready  # includes the present one
    left = -ready % trainer.accumulate_grad_batches
    count = int(min(left, loop.max_batches - ready))
    return [batch for batch, _, _ in _coming(loop._data_fetcher, count)]


def batches_of_evaluation(trainer: Trainer, count: int, loader: int) -> list[tuple[Any, int]]:
    """The batches of this loader that an evaluation comes to next, at most `count`, each with its number."""
    loop: Any = trainer._active_loop
    return [(batch, index) for batch, index, number in _coming(loop._data_fetcher, count) if number == loader]


def _coming(fetcher: Any, count: int) -> list[Any]:
    """The next entries of a fetcher of Lightning, at most `count`. It still gives them when Lightning asks for them."""
    if count < 1 or fetcher.done:
        return []
    if not isinstance(fetcher.iterator, _Kept):
        fetcher.iterator = _Kept(fetcher.iterator)
    found = list(fetcher.batches)  # Lightning itself reads loaders without a length one batch ahead
    found += fetcher.iterator.look(count - len(found))
    return found[:count]


def why_not_ahead(trainer: Trainer, module: LightningModule) -> str:
    """The code of the user that must not see a batch early, as a name; empty if there is none."""
    if hook := transfer_hook(trainer, module):
        return hook
    loop: Any = trainer._active_loop
    loader = loop._combined_loader
    for one in loader.flattened if loader is not None else ():
        if hasattr(unwrapped(one), "state_dict"):
            return f"{type(unwrapped(one)).__name__}.state_dict"
    return ""


def transfer_hook(trainer: Trainer, module: LightningModule) -> str:
    """The hook around the transfer of a batch to the device that the user has written, as a name; empty if there is none."""
    datamodule: Any = getattr(trainer, "datamodule", None)
    for hook in _HOOKS:
        if overridden(hook, module, "LightningModule"):
            return f"{type(module).__name__}.{hook}"
        if datamodule is not None and overridden(hook, datamodule, "LightningDataModule"):
            return f"{type(datamodule).__name__}.{hook}"
    return ""


# ---- loaders around loaders


class LoaderAround:
    """A loader around that of the user, which has all its other attributes."""

    def __init__(self, loader: Any, **own: Any) -> None:
        self.__dict__.update(_loader=loader, **own)

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # while it is copied
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._loader, name, value)


def unwrapped(loader: Any) -> Any:
    """The loader of the user."""
    return unwrapped(loader._loader) if isinstance(loader, LoaderAround) else loader


def _read_alone(loader: Any) -> Any:
    """The loader for a rank that reads it alone; a stream keeps what is read."""
    while isinstance(loader, LoaderAround) and not hasattr(type(loader), "begin"):
        loader = loader._loader
    return loader


# ---- streams


def needs_agreement(loader: Any) -> bool:
    """Whether ranks may see different numbers of batches: with streams, not with datasets that have an index."""
    loader = unwrapped(loader)
    if isinstance(loader, DataLoader):
        return isinstance(loader.dataset, IterableDataset)
    return not hasattr(loader, "__len__")


def ends_together(loader: Any, reads: bool, agree: Callable[[bool], bool]) -> Any:
    """The loader, which ends on all ranks when it ends on a rank that `reads` (the first stage of a replica).

    ``agree(more)`` returns whether all ranks want to continue. Every rank calls it once for each batch.
    """
    try:
        len(loader)
    except (TypeError, NotImplementedError):
        return _Stream(loader, reads, agree)
    return _SizedStream(loader, reads, agree)


class _Stream(LoaderAround):
    def __init__(self, loader: Any, reads: bool, agree: Callable[[bool], bool]) -> None:
        super().__init__(loader, _reads=reads, _agree=agree)

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self._loader)
        batch: Any = _NOTHING
        while True:
            following = next(batches, _NOTHING)
            if not self._agree(following is not _NOTHING or not self._reads):
                return
            # A stage that does not read the data gives its last batch to hooks, if its own stream was shorter.
            batch = batch if following is _NOTHING else following
            if batch is _NOTHING:
                raise PlanError(
                    "the stream of this rank is empty, but the first stage of its replica has data. Give all stages of a "
                    "replica the same data: divide streams by `strategy.distributed_sampler_kwargs`, not by rank."
                )
            yield batch


class _SizedStream(_Stream):
    def __len__(self) -> int:
        return len(self._loader)


_NOTHING = object()
