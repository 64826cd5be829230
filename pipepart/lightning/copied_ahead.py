"""Batches on the way to an accelerator: copied while the device computes, and only to ranks that need them.

The first stage of a replica reads the batch. There the loader copies each batch from pinned host memory, on a stream of its
own. A loader with workers reads ahead anyway, so its next batch is copied as soon as the present one is handed out:

```
copies         batch 0 | batch 1 |           | batch 2 |           | ...
computing              |     step on batch 0 |     step on batch 1 | ...
```

Other loaders are not asked for a batch earlier than Lightning asks: datasets that draw random numbers in this process would
draw them in another order. On the CPU nothing of this happens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from pipepart.devices import computes_on_host, current_stream, new_stream, on_stream, pinned, used_on
from pipepart.lightning.data import LoaderAround, transfer_hook
from pipepart.lightning.namespaces import either, loaded, overridden
from pipepart.lightning.wholeness import Wholeness
from pipepart.recording.inputs import trees

if TYPE_CHECKING:
    from lightning.pytorch import Callback, Trainer

__all__ = ["BatchPlaces", "copied_ahead", "shows_batch"]

_SHOW_BATCH = tuple(
    f"on_{step}_batch_{when}" for step in ("train", "validation", "test", "predict") for when in ("start", "end")
)
"""Hooks of modules and callbacks that get the batch."""
_NEED_NO_VALUES = ("lightning", "pytorch_lightning", "pipepart")
"""Packages whose callbacks do not read the batch."""


class BatchPlaces:
    """Where the batches of a run are needed: in host memory, or on the device of this rank."""

    def __init__(self, trainer: Callable[[], Trainer], whole: Wholeness) -> None:
        self._trainer, self._whole = trainer, whole

    def _is_first(self) -> bool:
        """Whether this rank is the first stage of a replica. Before there is a plan, every rank may be."""
        return self._whole.runtime is None or self._whole.runtime.is_first

    def loader(self, loader: Any) -> Any:
        """The loader, which copies batches to the device ahead of their use where nobody else moves them."""
        return copied_ahead(loader, self._trainer().strategy.root_device, self._copied_here)

    def _copied_here(self) -> bool:
        trainer = self._trainer()
        return self._is_first() and not transfer_hook(trainer, trainer.lightning_module)

    def stay_on_host(self) -> bool:
        """Whether nothing on this rank needs values of a batch on the device: no stage that reads it, and no hook."""
        trainer = self._trainer()
        module = trainer.lightning_module
        if computes_on_host(trainer.strategy.root_device) or self._is_first() or transfer_hook(trainer, module):
            return False
        if any(overridden(hook, module, "LightningModule") for hook in _SHOW_BATCH):
            return False
        return not any(shows_batch(callback, _SHOW_BATCH) for callback in trainer.callbacks)  # type: ignore[attr-defined]


def shows_batch(callback: Callback, hooks: Sequence[str]) -> bool:
    """Whether a callback of the user has one of the hooks, which get the batch; those of Lightning and ours need no values."""
    for hook in hooks:
        owner = next(kind for kind in type(callback).__mro__ if hook in vars(kind))
        if owner not in either("Callback") and owner.__module__.partition(".")[0] not in _NEED_NO_VALUES:
            return True
    return False


def copied_ahead(loader: Any, device: torch.device, wanted: Callable[[], bool]) -> Any:
    """The loader, whose batches are on `device` already if they are `wanted` there when it is started.

    A device that is the host, or has no streams, needs no copies: the loader is returned unchanged.
    """
    if computes_on_host(device) or current_stream(device) is None:
        return loader
    try:
        len(loader)
    except (TypeError, NotImplementedError):
        return _Copied(loader, device, wanted)
    return _SizedCopied(loader, device, wanted)


class _Copied(LoaderAround):
    def __init__(self, loader: Any, device: torch.device, wanted: Callable[[], bool]) -> None:
        super().__init__(loader, _device=device, _wanted=wanted)

    def __iter__(self) -> Iterator[Any]:
        if not self._wanted():
            return iter(self._loader)
        copies = _Copies(self._device)
        begun = map(copies.begin, iter(self._loader))
        return map(copies.finish, _one_ahead(begun) if _reads_ahead(self._loader) else begun)


class _SizedCopied(_Copied):
    def __len__(self) -> int:
        return len(self._loader)


def _reads_ahead(loader: Any) -> bool:
    """Whether asking for the next batch early changes nothing: workers have begun it, and no position is saved with it."""
    return isinstance(loader, DataLoader) and loader.num_workers > 0 and not hasattr(loader, "state_dict")


def _one_ahead(items: Iterator[Any]) -> Iterator[Any]:
    """The same items; each is taken from the source when the one before it is asked for."""
    kept = next(items, _END)
    while kept is not _END:
        given, kept = kept, next(items, _END)
        yield given


_END: Any = object()


class _Copies:
    """Copies from pinned host memory to a device, on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, new_stream(device)
        self._sources: list[tuple[Any, Any]] = []
        """Batches in host memory whose copies may not be done, with the event of their end."""

    def begin(self, batch: Any) -> tuple[Any, Any]:
        """Begin the copy of a batch. Returns the batch on the device and the event of the end of its copy."""
        assert self._stream is not None
        self._sources = [(event, source) for event, source in self._sources if not event.query()]
        source = trees.map_structure(partial(_pinned, device=self._device), batch)
        with on_stream(self._stream):
            copy = loaded().move_data_to_device(source, self._device)
            event = self._stream.record_event()
        self._sources.append((event, source))
        return copy, event

    def finish(self, begun: tuple[Any, Any]) -> Any:
        """Let the computation, not the host, wait for the end of a copy. Returns the batch on the device."""
        copy, event = begun
        stream = current_stream(self._device)
        assert stream is not None
        stream.wait_event(event)
        for leaf in trees.leaves_of(copy):
            if isinstance(leaf, torch.Tensor) and leaf.device == self._device:
                used_on(leaf, stream)
        return copy


def _pinned(leaf: Any, device: torch.device) -> Any:
    plain = isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided
    return pinned(leaf, device) if plain else leaf
