"""Streams that can be read only once: the batches that planning has read are kept, and the run begins with them.

Planning opens the data early, to see its first batch, and the run opens it again. A stream that begins again with the same
batch is simply opened twice. From any other stream no batch is lost: what was read is passed on, and the reading goes on
where it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from pipepart.lightning.data import LoaderAround, needs_agreement, unwrapped
from pipepart.lightning.first_batch import same_batch
from pipepart.lightning.random_states import isolate_rng

__all__ = ["KeptStream", "read_once"]

_NOTHING = object()


def read_once(loader: Any) -> Any:
    """The loader, with the batches of a stream kept until the run begins (see `KeptStream.begin`)."""
    own = unwrapped(loader)
    workers = isinstance(own, DataLoader) and own.num_workers > 0  # each has its own copy of the dataset
    if not needs_agreement(loader) or workers or hasattr(own, "state_dict"):
        return loader
    try:
        len(loader)
    except (TypeError, NotImplementedError):
        return KeptStream(loader)
    return _SizedStream(loader)


class KeptStream(LoaderAround):
    """A stream that may be opened several times before the run begins, without losing batches."""

    def __init__(self, loader: Any) -> None:
        super().__init__(loader, _source=None, _kept=[], _plans=True)

    def begin(self) -> None:
        """The run begins: the next one who opens the stream gets the kept batches and the rest."""
        self.__dict__["_plans"] = False

    def __iter__(self) -> Iterator[Any]:
        if self._plans and self._source is None:
            self._open()
        if self._source is None:  # it begins again each time
            return iter(self._loader)
        if self._plans:
            return self._again()
        source, kept = self._source, self._kept
        self.__dict__.update(_source=None, _kept=[])
        return _continued(kept, source)

    def _open(self) -> None:
        """Open the stream, and find out whether it begins again when it is opened once more."""
        with isolate_rng():
            source = iter(self._loader)
            first = next(source, _NOTHING)
        with isolate_rng():
            other = iter(self._loader)
            again = _NOTHING if other is source else next(other, _NOTHING)
        if first is _NOTHING or (again is not _NOTHING and same_batch(first, again)):
            return
        kept = [batch for batch in (first, again) if batch is not _NOTHING]
        self.__dict__.update(_source=source, _kept=kept)

    def _again(self) -> Iterator[Any]:
        position = 0
        while True:
            if position == len(self._kept):
                batch = next(self._source, _NOTHING)
                if batch is _NOTHING:
                    return
                self._kept.append(batch)
            yield self._kept[position]
            position += 1


class _SizedStream(KeptStream):
    def __len__(self) -> int:
        return len(self._loader)


def _continued(kept: list[Any], source: Iterator[Any]) -> Iterator[Any]:
    while kept:
        yield kept.pop(0)
    yield from source
