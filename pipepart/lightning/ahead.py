"""The batches that will be accumulated with the one that is trained on, looked at before their time.

Lightning takes batches one by one from an iterator. Some are taken from it early and kept, and handed on in the same
order when Lightning asks for them; it counts them then, as always.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden

from pipepart.lightning.loaders import unwrapped

__all__ = ["batches_ahead", "why_not_ahead"]

_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


class _Kept(Iterator[Any]):
    """An iterator that can be looked into."""

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
    """The batches, as the loader gives them, that are accumulated with the present one and come after it."""
    loop: Any = trainer.fit_loop
    ready = loop.epoch_loop.batch_progress.current.ready  # the present one is among them
    left = -ready % trainer.accumulate_grad_batches
    count = int(min(left, loop.max_batches - ready))
    fetcher = loop._data_fetcher
    if count < 1 or fetcher.done:
        return []
    if not isinstance(fetcher.iterator, _Kept):
        fetcher.iterator = _Kept(fetcher.iterator)
    found = list(fetcher.batches)  # loaders without a length are read one batch ahead by Lightning itself
    found += fetcher.iterator.look(count - len(found))
    return [batch for batch, _, _ in found[:count]]


def why_not_ahead(trainer: Trainer, module: LightningModule) -> str:
    """What the user has written that a batch must not go through before its time; empty if there is nothing."""
    datamodule: Any = getattr(trainer, "datamodule", None)
    for hook in _HOOKS:
        if is_overridden(hook, module, LightningModule):
            return f"{type(module).__name__}.{hook}"
        if datamodule is not None and is_overridden(hook, datamodule, LightningDataModule):
            return f"{type(datamodule).__name__}.{hook}"
    loader: Any = trainer.fit_loop._combined_loader
    for one in loader.flattened if loader is not None else ():
        if hasattr(unwrapped(one), "state_dict"):
            return f"{type(unwrapped(one)).__name__}.state_dict"
    return ""
