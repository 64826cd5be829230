"""Loaders whose length is not known beforehand: the first stages decide for all when the data is at its end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from pipepart.errors import PlanError

__all__ = ["ends_together", "needs_agreement", "unwrapped"]


def needs_agreement(loader: Any) -> bool:
    """Whether ranks may see a different number of batches: streams, not datasets with an index."""
    if isinstance(loader, DataLoader):
        return isinstance(loader.dataset, IterableDataset)
    return not hasattr(loader, "__len__")


def ends_together(loader: Any, reads: bool, agree: Callable[[bool], bool]) -> Any:
    """The loader, ending on all ranks when it ends on a rank that `reads` (the first stage of a replica).

    `agree` tells whether all ranks want to go on; it is called once for each batch on every rank.
    """
    try:
        len(loader)
    except (TypeError, NotImplementedError):
        return _Stream(loader, reads, agree)
    return _SizedStream(loader, reads, agree)


def unwrapped(loader: Any) -> Any:
    """The user's loader, for a rank that looks at it on its own."""
    return loader._loader if isinstance(loader, _Stream) else loader


class _Stream:
    def __init__(self, loader: Any, reads: bool, agree: Callable[[bool], bool]) -> None:
        self.__dict__.update(_loader=loader, _reads=reads, _agree=agree)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._loader, name, value)

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self._loader)
        batch: Any = _NOTHING
        while True:
            following = next(batches, _NOTHING)
            if not self._agree(following is not _NOTHING or not self._reads):
                return
            # What a stage that does not read the data gives to hooks is its last batch, if its own stream was shorter.
            batch = batch if following is _NOTHING else following
            if batch is _NOTHING:
                raise PlanError("the stream of this rank is empty, while the first stage has data")
            yield batch


class _SizedStream(_Stream):
    def __len__(self) -> int:
        return len(self._loader)


_NOTHING = object()
