"""A stack of LSTMs that gives each letter of a word a tag. Batches have the length of their longest word.

pipepart train recipe=rnn
pipepart train recipe=rnn data.path=tagged.tsv data.tags=12 model.layers=8 strategy.stages=4
"""

from __future__ import annotations

import random
from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from recipes.optimizers import Make, optimized

__all__ = ["TagData", "TaggerModule"]

NO_TAG = -1
Pair = tuple[torch.Tensor, torch.Tensor]


def made_up(samples: int, longest: int, tags: int, seed: int = 0) -> list[tuple[str, list[int]]]:
    """Words over six letters; the tag of a letter is the number of its earlier occurrences, at most `tags` - 1."""
    rng = random.Random(seed)
    words = ["".join(rng.choices("abcdef", k=rng.randint(4, longest))) for _ in range(samples)]
    return [(word, [min(word[:i].count(c), tags - 1) for i, c in enumerate(word)]) for word in words]


class TagData(L.LightningDataModule):
    """Words with one tag per letter: generated, or lines of your own file (word TAB tag tag tag, numbers from 0)."""

    def __init__(
        self,
        batch_size: int = 32,
        samples: int = 4096,
        longest: int = 24,
        path: str | None = None,
        vocabulary: int = 128,
        tags: int = 5,
    ) -> None:
        super().__init__()
        self.batch_size = batch_size
        if path is None:
            found = made_up(samples, longest, tags)
        else:
            lines = [line.split("\t") for line in Path(path).read_text(encoding="ascii").splitlines() if "\t" in line]
            found = [(word, [int(tag) for tag in row.split()]) for word, row in lines]
            for word, row in found:
                if len(word) != len(row) or max(row) >= tags:
                    raise ValueError(
                        f"{path}: {word!r} has {len(row)} tags, the largest is {max(row)}; data.tags={tags}"
                    )
        pairs = [(torch.tensor([ord(c) for c in word]), torch.tensor(row)) for word, row in found]
        cut = len(pairs) * 9 // 10
        self.train, self.val = pairs[:cut], pairs[cut:]

    @staticmethod
    def collate(pairs: list[Pair]) -> Pair:
        words, tags = zip(*pairs)
        return pad_sequence(list(words), batch_first=True), pad_sequence(
            list(tags), batch_first=True, padding_value=NO_TAG
        )

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, self.batch_size, shuffle=True, drop_last=True, collate_fn=self.collate)  # type: ignore[arg-type]

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val, self.batch_size, collate_fn=self.collate)  # type: ignore[arg-type]


class TaggerModule(L.LightningModule):
    """A stack of LSTMs, one module per layer, so that layers can be on different stages."""

    def __init__(
        self,
        optimizer: Make,
        scheduler: Make | None = None,
        vocabulary: int = 128,
        tags: int = 5,
        width: int = 64,
        layers: int = 4,
    ) -> None:
        super().__init__()
        self.letters = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(nn.LSTM(width, width, batch_first=True) for _ in range(layers))
        self.head = nn.Linear(width, tags)
        self.optimizer, self.scheduler = optimizer, scheduler

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.letters(words)
        for layer in self.layers:
            x = x + layer(x)[0]
        return self.head(x)

    def step(self, batch: Pair) -> tuple[torch.Tensor, torch.Tensor]:
        words, tags = batch
        scores = self(words)
        counted = tags != NO_TAG
        losses = F.cross_entropy(scores.transpose(1, 2), tags, ignore_index=NO_TAG, reduction="none")
        # The mean over each word, then over words, does not depend on the split into micro-batches.
        loss = (losses.sum(1) / counted.sum(1)).mean()
        return loss, ((scores.argmax(-1) == tags) & counted).sum() / counted.sum()

    def training_step(self, batch: Pair, batch_idx: int) -> torch.Tensor:
        loss, _ = self.step(batch)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Pair, batch_idx: int) -> None:
        loss, right = self.step(batch)
        self.log("val/loss", loss, prog_bar=True, sync_dist=True)
        self.log("val/accuracy", right, prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimized(self.parameters(), self.optimizer, self.scheduler)
