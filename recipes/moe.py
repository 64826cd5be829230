"""A transformer with a mixture of experts: each token goes through the few experts that its router chooses.

pipepart train recipe=moe
pipepart train recipe=moe model.experts=8 model.depth=8 strategy.stages=4
"""

from __future__ import annotations

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn

from recipes.gpt import Block
from recipes.optimizers import Make, decayed, optimized

__all__ = ["Experts", "MoE", "MoEModule"]

Batch = tuple[torch.Tensor, torch.Tensor]


class Experts(nn.Module):
    """A router and experts, of which each token uses `chosen`."""

    def __init__(self, width: int, experts: int, chosen: int) -> None:
        super().__init__()
        self.chosen = chosen
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(experts)
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The output, and the balance loss: 1 if the tokens are spread evenly over the experts, more otherwise."""
        tokens = x.flatten(0, 1)
        chances = self.router(tokens).softmax(dim=-1)
        weights, who = chances.topk(self.chosen, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        answer = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(who == number)  # their number depends on the data
            answer = answer.index_add(0, token, expert(tokens[token]) * weights[token, slot, None])
        used = F.one_hot(who, len(self.experts)).float().mean(dim=(0, 1))
        spread = len(self.experts) * (used * chances.mean(dim=0)).sum()
        return answer.view_as(x), spread


class MoEBlock(Block):
    """A block of the GPT with experts instead of its MLP."""

    def __init__(self, width: int, heads: int, experts: int, chosen: int) -> None:
        super().__init__(width, heads)
        self.mlp = nn.Identity()  # type: ignore[assignment]
        self.experts = Experts(width, experts, chosen)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        x = x + self.attend(self.norm1(x))
        answer, spread = self.experts(self.norm2(x))
        return x + answer, spread


class MoE(nn.Module):
    def __init__(
        self,
        vocabulary: int,
        context: int,
        width: int = 96,
        depth: int = 4,
        heads: int = 4,
        experts: int = 4,
        chosen: int = 2,
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(MoEBlock(width, heads, experts, chosen) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        spreads = []
        for block in self.blocks:
            h, spread = block(h)
            spreads.append(spread)
        return self.head(self.norm(h)), torch.stack(spreads).mean()


class MoEModule(L.LightningModule):
    def __init__(
        self,
        optimizer: Make,
        scheduler: Make | None = None,
        vocabulary: int = 256,
        context: int = 64,
        width: int = 96,
        depth: int = 4,
        heads: int = 4,
        experts: int = 4,
        chosen: int = 2,
        balance: float = 0.01,
    ) -> None:
        super().__init__()
        self.model = MoE(vocabulary, context, width, depth, heads, experts, chosen)
        self.balance = balance
        self.optimizer, self.scheduler = optimizer, scheduler

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        x, y = batch
        scores, spread = self.model(x)
        loss = F.cross_entropy(scores.flatten(0, 1), y.flatten())
        self.log("train/loss", loss, prog_bar=True)
        self.log("train/spread", spread)
        return loss + self.balance * spread

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        x, y = batch
        self.log(
            "val/loss", F.cross_entropy(self.model(x)[0].flatten(0, 1), y.flatten()), prog_bar=True, sync_dist=True
        )

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimized(decayed(self), self.optimizer, self.scheduler)
