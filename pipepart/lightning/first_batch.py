"""The first batch of a run, which planning has prepared already: hooks around its transfer do not run a second time."""

from __future__ import annotations

from typing import Any

import torch

from pipepart.lightning.run_patches import RunPatches
from pipepart.lightning.transfer_state import TransferState
from pipepart.recording.inputs import trees
from pipepart.recording.recorded_run.contexts import outside_rng

__all__ = ["PreparedFirst", "same_batch"]


class PreparedFirst:
    """A batch as the loader gave it, and as hooks have prepared it.

    If the run begins with the same batch (it is not shuffled), it gets the prepared one. Hooks that draw random numbers run
    again, with the random numbers of the run; so do all hooks if the state that they can read has changed since.
    """

    def __init__(self, raw: Any, trainer: Any) -> None:
        leaves, self._tree = trees.flatten(raw)
        # Hooks may change tensors in place.
        self._leaves = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self._drawn, self._state = _draws(), TransferState(trainer)
        self._waits = True
        self._prepared: Any = None

    def pass_on(self, prepared: Any, trainer: Any, patches: RunPatches) -> None:
        """Let the loop of the run use the prepared batch, once."""
        self._state.hooks_have_run()
        if _draws() != self._drawn:
            return
        module, strategy = trainer.lightning_module, trainer.strategy
        hook, move = module._on_before_batch_transfer, strategy.batch_to_device
        stage = trainer.state.stage  # batches of a sanity check or of a validation in between are others

        def before_transfer(batch: Any, dataloader_idx: int = 0) -> Any:
            if self._waits and trainer.state.stage == stage:
                self._waits = False
                same = same_batch(batch, trees.unflatten(self._leaves, self._tree))
                if same and self._state.done_again():
                    self._prepared = prepared
                self._leaves = []
            return batch if self._prepared is not None else hook(batch, dataloader_idx=dataloader_idx)

        def to_device(batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
            made, self._prepared = self._prepared, None
            return made if made is not None else move(batch, device, dataloader_idx=dataloader_idx)

        patches.put(module, "_on_before_batch_transfer", before_transfer)
        patches.put(strategy, "batch_to_device", to_device)


def _draws() -> Any:
    return outside_rng(), torch.default_generator.get_state().tolist()


def same_batch(a: Any, b: Any) -> bool:
    """Whether two batches are equal, element by element."""
    (leaves, tree), (others, form) = trees.flatten(a), trees.flatten(b)
    if tree != form or len(leaves) != len(others):
        return False
    for x, y in zip(leaves, others):
        if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor):
            if x.shape != y.shape or x.dtype != y.dtype or not torch.equal(x, y):
                return False
        elif type(x) is not type(y) or not bool(x == y):
            return False
    return True
