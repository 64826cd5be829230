"""Plain models that show usual architectures: attention, skips, recurrence, experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

__all__ = ["MODELS"]

VOCABULARY = 64
Example = Callable[[int], tuple[Any, ...]]
MODELS: dict[str, Callable[[], tuple[nn.Module, Example]]] = {}


def model(example: Example) -> Callable[[type[nn.Module]], type[nn.Module]]:
    """Register a class whose forward takes the example and returns the loss."""

    def add(kind: type[nn.Module]) -> type[nn.Module]:
        MODELS[kind.__name__] = lambda: (kind(), example)
        return kind

    return add


def ids(batch: int, length: int = 12) -> torch.Tensor:
    return torch.randint(1, VOCABULARY, (batch, length))


def vectors(batch: int) -> tuple[torch.Tensor]:
    return (torch.randn(batch, 16),)


def images(batch: int) -> tuple[torch.Tensor]:
    return (torch.randn(batch, 3, 32, 32),)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float = 0.0):
        super().__init__()
        self.qkv, self.out, self.heads, self.dropout = (
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
            heads,
            dropout,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).split(width, dim=2)
        q, k, v = (t.view(batch, length, self.heads, width // self.heads).transpose(1, 2) for t in (q, k, v))
        rate = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=rate)
        return self.out(y.transpose(1, 2).contiguous().view(batch, length, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float = 0.0):
        super().__init__()
        self.norm1, self.attention, self.norm2 = (
            nn.LayerNorm(width),
            Attention(width, heads, dropout),
            nn.LayerNorm(width),
        )
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Tied embedding and head, positions by arange, an assertion on the length."""

    def __init__(
        self,
        width: int = 32,
        depth: int = 4,
        dropout: float = 0.0,
        heads: int = 4,
        vocabulary: int = VOCABULARY,
        length: int = 16,
    ):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.length = length
        self.head.weight = self.tokens.weight

    def forward(self, idx: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        _, length = idx.size()
        assert length <= self.length, "too long"
        x = self.tokens(idx) + self.positions(torch.arange(0, length, device=idx.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, logits.size(-1)), target.view(-1))


MODELS["gpt"] = lambda: (GPT(), lambda batch: (ids(batch), ids(batch)))
MODELS["gpt_dropout"] = lambda: (GPT(dropout=0.1), lambda batch: (ids(batch), ids(batch)))


@model(lambda batch: (torch.randn(batch, 16), torch.randint(0, 4, (batch,))))
class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.net(x), y)


def conv(i: int, o: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU(inplace=True))


@model(images)
class UNet(nn.Module):
    """Skips over the whole depth by cat, sizes taken from the skips, in-place activations, BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.d1, self.d2, self.mid, self.u2, self.u1 = conv(3, 8), conv(8, 16), conv(16, 16), conv(32, 8), conv(16, 8)
        self.out = nn.Conv2d(8, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.d1(x)
        b = self.d2(F.max_pool2d(a, 2))
        c = self.mid(F.max_pool2d(b, 2))
        u = self.u2(torch.cat([F.interpolate(c, size=b.shape[-2:], mode="bilinear"), b], 1))
        u = self.u1(torch.cat([F.interpolate(u, size=a.shape[-2:], mode="bilinear"), a], 1))
        return self.out(u).pow(2).mean()


class Residual(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.c1, self.b1 = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
        self.c2, self.b2 = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
        self.relu = nn.ReLU(True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.b2(self.c2(self.relu(self.b1(self.c1(x)))))
        y += x
        return self.relu(y)


@model(lambda batch: (*images(batch), torch.randint(0, 10, (batch,))))
class ResNet(nn.Module):
    """The sum is added in place, one activation module is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 8, 3),
            Residual(8),
            Residual(8),
            Residual(8),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(8, 10),
        )

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.net(x), y)


@model(lambda batch: (ids(batch),))
class Recurrent(nn.Module):
    """A tuple of tuples as result of a leaf; a zero state of the batch size."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.lstm = nn.LSTM(16, 16, 2, batch_first=True, dropout=0.1, bidirectional=True)
        self.gru, self.out = nn.GRU(32, 16, batch_first=True), nn.Linear(16, VOCABULARY)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, (hn, _) = self.lstm(self.embed(x))
        h, _ = self.gru(h, torch.zeros(1, x.size(0), 16, device=x.device))
        return F.cross_entropy(self.out(h).transpose(1, 2), x) + hn.mean()


@model(lambda batch: (ids(batch), torch.randint(3, 12, (batch,))))
class PackedRecurrent(nn.Module):
    """Packed sequences: an object that holds tensors goes from op to op."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Embedding(VOCABULARY, 16), nn.LSTM(16, 16, batch_first=True)
        self.out = nn.Linear(16, VOCABULARY)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(self.embed(x), lengths, batch_first=True, enforce_sorted=False)
        h, _ = self.lstm(packed)
        h, _ = pad_packed_sequence(h, batch_first=True, total_length=x.shape[1])
        return F.cross_entropy(self.out(h).transpose(1, 2), x)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = x.shape
        x = x.reshape(-1, shape[-1])
        weights, chosen = self.gate(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == e)
            if token.numel() == 0:
                continue
            out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
        return out.view(shape)


@model(lambda batch: (ids(batch),))
class Mixture(nn.Module):
    """Experts that are skipped when no token goes there: Python control flow on data."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY)
        self.experts = nn.ModuleList(Experts() for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        for experts, norm in zip(self.experts, self.norms):
            h = h + experts(norm(h))
        return F.cross_entropy(self.out(h).transpose(1, 2), x)


@model(lambda batch: (ids(batch), ids(batch)))
class EncoderDecoder(nn.Module):
    """``nn.Transformer`` with a causal mask and a padding mask."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(VOCABULARY, 32), nn.Linear(32, VOCABULARY)
        self.net = nn.Transformer(32, 4, 2, 2, 64, 0.1, batch_first=True)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        mask = self.net.generate_square_subsequent_mask(b.shape[1] - 1)
        h = self.net(self.embed(a), self.embed(b[:, :-1]), tgt_mask=mask, src_key_padding_mask=a == 0)
        return F.cross_entropy(self.out(h).flatten(0, 1), b[:, 1:].flatten())


@model(lambda batch: (ids(batch),))
class TiedEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.net = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, 0.1, batch_first=True), 3)
        self.out = nn.Linear(16, VOCABULARY, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.out(self.net(self.embed(x))).transpose(1, 2), x)


@model(lambda batch: (torch.randn(batch, 16),))
class Dense(nn.Module):
    """Every layer reads all earlier ones."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16 + 8 * i, 8) for i in range(6))
        self.out = nn.Linear(64, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = [x]
        for layer in self.layers:
            seen.append(torch.relu(layer(torch.cat(seen, -1))))
        return self.out(torch.cat(seen, -1)).pow(2).mean()


@model(lambda batch: (torch.randn(batch, 3, 2, 33, 30),))
class Video(nn.Module):
    """Padding to a multiple, folding frames into the batch and out again: sizes computed from sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.out = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, c, t, h, w = x.shape
        x = x.transpose(1, 2).reshape(b * t, c, h, w)
        x = F.pad(x, (0, -w % 8, 0, -h % 8))
        y = F.pixel_unshuffle(self.conv(x).mean(1, keepdim=True), 2)
        y = y.unflatten(0, (b, t)).mean((1, 3, 4))
        z = self.out(y.repeat(1, 2))
        return z.pow(2).sum() / (b * t)
