"""What is measured: the default recipes with their own data and loss, and the models of the runtime bench."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from tools.bench.runtime.models import MODELS

__all__ = ["NAMES", "RECIPES", "build", "usual_batch"]

RECIPES = ("gpt", "resnet", "unet", "vit", "llama_hf", "seq2seq", "moe", "rnn", "mlp")
NAMES = (*RECIPES, *(f"bench {name}" for name in MODELS))


class _Step(nn.Module):
    """The training step of a recipe as a forward that returns the loss; what it logs goes nowhere."""

    def __init__(self, module: Any, tree: Any) -> None:
        super().__init__()
        self.module, self._tree = module, tree
        module.__dict__["log"] = lambda *args, **options: None

    def forward(self, *leaves: Any) -> torch.Tensor:
        loss = self.module.training_step(tree_unflatten(list(leaves), self._tree), 0)
        return loss["loss"] if isinstance(loss, dict) else loss


def build(name: str, batch_size: int | None = None) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A model, the same on every rank, and a batch for it: of so many samples, or as the recipe has it."""
    torch.manual_seed(0)
    if name.startswith("bench "):
        kind: Any = MODELS[name.removeprefix("bench ")]
        return kind(), kind.batch(batch_size or 32)
    from pipepart.cli.config import checked, compose_config
    from pipepart.cli.fit import build_recipe
    from pipepart.planning.sources import resized

    module, data = build_recipe(checked(compose_config([f"recipe={name}"])))
    data.prepare_data()
    data.setup("fit")
    leaves, tree = tree_flatten(next(iter(data.train_dataloader())))
    if batch_size is not None:
        leaves = resized(leaves, batch_size)
    return _Step(module, tree), tuple(leaves)


def usual_batch(name: str) -> int:
    """Samples of a batch as the recipe has it."""
    return next(int(leaf.shape[0]) for leaf in build(name)[1] if isinstance(leaf, torch.Tensor) and leaf.dim())
