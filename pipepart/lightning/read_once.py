"""Streams that can be read only once: the batches that planning has read are kept, and the run begins with them.

Planning opens the data early, to see its first batch. A stream is not opened again for the first epoch: it may go on where it
was, or begin with other batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from pipepart.lightning.data import LoaderAround, needs_agreement, unwrapped
from pipepart.lightning.random_states import isolate_rng, random_states, same_random_states, set_random_states

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
    """A stream that planning opens before the run begins, without losing batches.

    It is opened once: what planning reads is kept, and the run goes on reading where planning has stopped. The run draws the
    random numbers that planning has drawn while it was reading (windows of a series, augmentation).
    """

    def __init__(self, loader: Any) -> None:
        super().__init__(loader, _source=None, _kept=[], _opened=None, _drawn=None, _plans=True)

    def begin(self) -> None:
        """The run begins: the next one who opens the stream gets the kept batches and the rest."""
        self.__dict__["_plans"] = False

    def __iter__(self) -> Iterator[Any]:
        if self._plans:
            return self._again()
        if self._source is None:
            return iter(self._loader)
        source, kept, opened = self._source, self._kept, self._opened
        self.__dict__.update(_source=None, _kept=[])
        return _continued(opened, kept, source)

    def _again(self) -> Iterator[Any]:
        """The batches from the first one on. What was not read before is read with the random states of the stream."""
        if self._source is None:
            with isolate_rng():
                before = random_states()
                source = iter(self._loader)
                self.__dict__.update(_source=source, _opened=before, _drawn=random_states())
        position = 0
        while position < len(self._kept) or self._read():
            yield self._kept[position][0]
            position += 1

    def _read(self) -> bool:
        """Read and keep the next batch, with the random states after it; False if there is none."""
        with isolate_rng():
            set_random_states(self._drawn)
            batch = next(self._source, _NOTHING)
            self.__dict__["_drawn"] = random_states()
        if batch is _NOTHING:
            return False
        self._kept.append((batch, self._drawn))
        return True


class _SizedStream(KeptStream):
    def __len__(self) -> int:
        return len(self._loader)


def _continued(opened: Any, kept: list[tuple[Any, Any]], source: Iterator[Any]) -> Iterator[Any]:
    """Kept batches, then the rest. Random states are those of a run that reads them now, unless others have drawn since."""
    before = opened
    for batch, after in kept:
        if same_random_states(random_states(), before):
            set_random_states(after)
        before = after
        yield batch
    yield from source
