"""An encoder-decoder transformer that maps one sequence to another.

The answer of the encoder goes to every layer of the decoder, over all stages between.

    pipepart train recipe=seq2seq
    pipepart train recipe=seq2seq data.path=questions.tsv data.length=64 model.depth=6 strategy.stages=4
"""

from __future__ import annotations

import random
from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from recipes.optimizers import Make, decayed, optimized

__all__ = ["PairData", "Seq2SeqModule"]

PAD, BEGIN, END = 256, 257, 258  # after the bytes
Batch = tuple[torch.Tensor, torch.Tensor]


def made_up(samples: int, length: int, seed: int = 0) -> list[tuple[str, str]]:
    """Digits, and their answer: the digits in reverse, each one twice."""
    rng = random.Random(seed)
    questions = ["".join(rng.choices("0123456789", k=rng.randint(2, (length - 2) // 2))) for _ in range(samples)]
    return [(question, "".join(2 * digit for digit in reversed(question))) for question in questions]


def encode(text: str, length: int) -> list[int]:
    """Bytes between begin and end, filled up to `length`."""
    codes = [BEGIN, *text.encode()[: length - 2], END]
    return codes + [PAD] * (length - len(codes))


class PairData(L.LightningDataModule):
    """Pairs of texts: generated, or lines of your own file (question TAB answer)."""

    def __init__(
        self,
        length: int = 24,
        batch_size: int = 32,
        samples: int = 4096,
        path: str | None = None,
        vocabulary: int = 259,
    ) -> None:
        super().__init__()
        self.batch_size = batch_size
        pairs = made_up(samples, length)
        if path is not None:
            lines = Path(path).read_text(encoding="utf-8").splitlines()
            pairs = [(q, a) for q, tab, a in (line.partition("\t") for line in lines) if tab]
        questions, answers = (torch.tensor([encode(pair[i], length) for pair in pairs]) for i in range(2))
        cut = len(pairs) * 9 // 10
        self.train = TensorDataset(questions[:cut], answers[:cut])
        self.val = TensorDataset(questions[cut:], answers[cut:])

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val, self.batch_size)


class Attention(nn.Module):
    """Attention of `x` to `there` under the mask `allowed`."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ask, self.offer, self.out = nn.Linear(width, width), nn.Linear(width, 2 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor, there: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
        q = self.ask(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = self.offer(there).unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=allowed).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """One layer of the encoder, or of the decoder if it receives a memory."""

    def __init__(self, width: int, heads: int, decoder: bool) -> None:
        super().__init__()
        self.look = Attention(width, heads)
        self.recall = Attention(width, heads) if decoder else None
        self.norm1, self.norm2, self.norm3 = nn.LayerNorm(width), nn.LayerNorm(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(
        self,
        x: torch.Tensor,
        allowed: torch.Tensor,
        memory: torch.Tensor | None = None,
        readable: torch.Tensor | None = None,
    ) -> torch.Tensor:
        h = self.norm1(x)
        x = x + self.look(h, h, allowed)
        if self.recall is not None and memory is not None and readable is not None:
            x = x + self.recall(self.norm3(x), memory, readable)
        return x + self.mlp(self.norm2(x))


class Seq2SeqModule(L.LightningModule):
    def __init__(
        self,
        optimizer: Make,
        scheduler: Make | None = None,
        vocabulary: int = 259,
        length: int = 24,
        width: int = 64,
        depth: int = 2,
        heads: int = 4,
    ) -> None:
        super().__init__()
        self.codes, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.encoder = nn.ModuleList(Layer(width, heads, decoder=False) for _ in range(depth))
        self.decoder = nn.ModuleList(Layer(width, heads, decoder=True) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)
        self.optimizer, self.scheduler = optimizer, scheduler

    def forward(self, question: torch.Tensor, answer: torch.Tensor) -> torch.Tensor:
        readable = (question != PAD)[:, None, None, :]
        memory = self.codes(question) + self.places(torch.arange(question.shape[1], device=question.device))
        for layer in self.encoder:
            memory = layer(memory, readable)
        steps = torch.arange(answer.shape[1], device=answer.device)
        past = steps[:, None] >= steps[None, :]
        x = self.codes(answer) + self.places(steps)
        for layer in self.decoder:
            x = layer(x, past, memory, readable)
        return self.head(self.norm(x))

    def step(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        question, answer = batch
        scores, wanted = self(question, answer[:, :-1]), answer[:, 1:]
        loss = F.cross_entropy(scores.flatten(0, 1), wanted.flatten(), reduction="none")
        counted = (wanted != PAD).flatten().float()
        right = (scores.argmax(-1) == wanted).flatten().float()
        # Divided by all positions, so that the loss is a mean over samples for any split of the batch.
        return (loss * counted).mean(), (right * counted).sum() / counted.sum()

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        loss, _ = self.step(batch)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        loss, right = self.step(batch)
        self.log("val/loss", loss, prog_bar=True, sync_dist=True)
        self.log("val/accuracy", right, prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimized(decayed(self), self.optimizer, self.scheduler)
