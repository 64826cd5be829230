"""A character-level GPT: data, model and training step in one file.

    pipepart train recipe=gpt
    pipepart train recipe=gpt data.text=my_book.txt model.depth=12 strategy.stages=4
"""

from __future__ import annotations

from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

from recipes.text import story

__all__ = ["GPT", "Characters", "GPTModule"]


class Characters(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Windows of a text as (characters, next characters)."""

    def __init__(self, codes: torch.Tensor, context: int) -> None:
        self.codes, self.context = codes, context

    def __len__(self) -> int:
        return (len(self.codes) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = index * self.context
        window = self.codes[start : start + self.context + 1]
        return window[:-1], window[1:]


class CharacterData(L.LightningDataModule):
    """A text file of yours, or a made-up story of `characters` characters; the last tenth is for validation."""

    def __init__(self, context: int = 64, batch_size: int = 32, text: str | None = None, characters: int = 300_000) -> None:
        super().__init__()
        self.context, self.batch_size = context, batch_size
        content = story(characters) if text is None else Path(text).read_text(encoding="utf-8")
        self.alphabet = sorted(set(content))
        codes = {character: code for code, character in enumerate(self.alphabet)}
        self.codes = torch.tensor([codes[character] for character in content])
        if len(self.codes) < 20 * context:
            raise ValueError(f"the text has {len(self.codes)} characters; with context={context} it needs {20 * context}")

    @property
    def vocabulary(self) -> int:
        return len(self.alphabet)

    def train_dataloader(self) -> DataLoader:
        codes = self.codes[: len(self.codes) * 9 // 10]
        return DataLoader(Characters(codes, self.context), self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader:
        codes = self.codes[len(self.codes) * 9 // 10 :]
        return DataLoader(Characters(codes, self.context), self.batch_size)


class Block(nn.Module):
    """Attention and a small network, each added to the stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, time, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).split(width, dim=2)
        q, k, v = (z.view(batch, time, self.heads, width // self.heads).transpose(1, 2) for z in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, time, width))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, vocabulary: int, context: int = 64, width: int = 128, depth: int = 6, heads: int = 4) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight  # tied: one matrix reads and writes characters
        self.apply(self._initialise)

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


class GPTModule(L.LightningModule):
    """Nothing here knows of pipelines."""

    def __init__(self, model: GPT, learning_rate: float = 1e-3, weight_decay: float = 0.1) -> None:
        super().__init__()
        self.model, self.learning_rate, self.weight_decay = model, learning_rate, weight_decay

    def step(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x, y = batch
        return F.cross_entropy(self.model(x).flatten(0, 1), y.flatten())

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = self.step(batch)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> None:
        self.log("val/loss", self.step(batch), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        matrices = [p for p in self.parameters() if p.dim() >= 2]
        vectors = [p for p in self.parameters() if p.dim() < 2]
        groups = [{"params": matrices, "weight_decay": self.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=self.learning_rate, betas=(0.9, 0.95))


def build(model: dict, data: dict, optimizer: dict) -> tuple[GPTModule, CharacterData]:
    """The module and the data of this recipe from its configuration."""
    characters = CharacterData(**data)
    network = GPT(characters.vocabulary, characters.context, **model)
    return GPTModule(network, **optimizer), characters
