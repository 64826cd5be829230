"""Small models in which samples of a batch meet, each with its batch, and look-alikes in which they do not."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["MIXERS", "PLAIN", "VQVAE", "Barlow", "Clip", "SimCLR", "Vicreg"]


def body(inputs: int = 8, width: int = 12, outputs: int = 6, depth: int = 3) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Linear(inputs, width)]
    for _ in range(depth):
        layers += [nn.GELU(), nn.Linear(width, width)]
    return nn.Sequential(*layers, nn.GELU(), nn.Linear(width, outputs))


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = body()

    @staticmethod
    def batch(size: int) -> tuple[torch.Tensor, ...]:
        x = torch.randn(size, 8)
        return x, x + 0.3 * torch.randn(size, 8)


class SimCLR(_Model):
    """NT-Xent: two views, all other samples of the batch are negatives."""

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        z = F.normalize(self.net(torch.cat([a, b])), dim=1)
        scores = z @ z.T / 0.5
        n = a.shape[0]
        scores = scores.masked_fill(torch.eye(2 * n, dtype=torch.bool, device=z.device), -1e9)
        targets = torch.cat([torch.arange(n, 2 * n), torch.arange(n)]).to(z.device)
        return F.cross_entropy(scores, targets)


class Clip(_Model):
    """Two towers and a learned temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.other = body()
        self.logit_scale = nn.Parameter(torch.tensor(1.3))

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        image, text = F.normalize(self.net(a), dim=-1), F.normalize(self.other(b), dim=-1)
        logits = self.logit_scale.exp() * image @ text.t()
        labels = torch.arange(logits.shape[0], device=logits.device)
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2


class Barlow(_Model):
    """The cross-correlation of two views over the batch."""

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        za, zb = self.net(a), self.net(b)
        za, zb = (za - za.mean(0)) / za.std(0), (zb - zb.mean(0)) / zb.std(0)
        c = za.T @ zb / a.shape[0]
        on = (torch.diagonal(c) - 1).pow(2).sum()
        off = (c - torch.diag(torch.diagonal(c))).pow(2).sum()
        return on + 0.005 * off


class Vicreg(_Model):
    """Invariance (a mean over samples), variance and covariance (of the batch)."""

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> dict[str, torch.Tensor]:
        za, zb = self.net(a), self.net(b)
        close = F.mse_loss(za, zb)
        spread = sum(F.relu(1 - torch.sqrt(z.var(0) + 1e-4)).mean() for z in (za, zb))
        centred = za - za.mean(0)
        covariance = centred.T @ centred / (a.shape[0] - 1)
        off = covariance.fill_diagonal_(0).pow(2).sum() / za.shape[1]
        return {"loss": 25 * close + 25 * spread + off, "close": close.detach(), "off": off.detach()}


class Triplet(_Model):
    """The hardest positive and negative of the batch."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = self.net(x)
        distances = torch.cdist(z, z)
        same = y[:, None] == y[None, :]
        hardest = (distances * same).amax(1)
        nearest = (distances + 1e3 * same).amin(1)
        return F.relu(hardest - nearest + 0.3).mean()

    @staticmethod
    def batch(size: int) -> tuple[torch.Tensor, ...]:
        return torch.randn(size, 8), torch.arange(size) % 2


class SupCon(Triplet):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = F.normalize(self.net(x), dim=1)
        logits = torch.einsum("id,jd->ij", z, z) / 0.2
        other = ~torch.eye(len(x), dtype=torch.bool)
        same = torch.eq(y.unsqueeze(0), y.unsqueeze(1)) & other
        logs = logits - torch.logsumexp(logits.masked_fill(~other, -1e9), 1, keepdim=True)
        return -((same * logs).sum(1) / same.sum(1).clamp(min=1)).mean()


class RandomTriplet(Triplet):
    """In-batch mining with index arithmetic."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = self.net(x)
        return F.triplet_margin_loss(z, z.roll(2, 0), z.roll(1, 0), margin=1.0)


class HandNorm(nn.Module):
    """Normalised by the statistics of the batch, written by hand in the middle of the network."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = body(outputs=12), nn.Linear(12, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        h = (h - h.mean(0, keepdim=True)) / (h.var(0, unbiased=False, keepdim=True) + 1e-5).sqrt()
        return F.cross_entropy(self.head(F.gelu(h)), y)

    batch = staticmethod(Triplet.batch)


class BatchAttention(Triplet):
    """Samples attend to each other."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.head = nn.Linear(6, 18), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.net(x)).unsqueeze(0).chunk(3, -1)
        return F.cross_entropy(self.head(F.scaled_dot_product_attention(q, k, v)[0]), y)


class Memory(Triplet):
    """Negatives from a memory that the batch is put into first."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bank", torch.randn(16, 6))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = F.normalize(self.net(x), dim=1)
        keys = torch.cat([z.detach(), self.bank])
        logits = z @ keys.T
        return F.cross_entropy(logits, torch.arange(len(z)))


class Router(Triplet):
    """A mixture of experts with the load-balancing loss of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.head = nn.Linear(6, 4), nn.Linear(6, 3)
        self.experts = nn.Parameter(torch.randn(4, 6, 6) / 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.net(x)
        share = self.gate(h).softmax(-1)
        h = torch.einsum("be,eij,bj->bi", share, self.experts, h)
        chosen = F.one_hot(share.argmax(-1), 4).to(h.dtype)
        balance = 4 * (chosen.mean(0) * share.mean(0)).sum()
        return F.cross_entropy(self.head(h), y) + 0.01 * balance


class Ranking(Triplet):
    """All pairs of the batch."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        score = self.net(x)[:, 0]
        difference = score[:, None] - score[None, :]
        return F.softplus(-difference * torch.sign(y[:, None] - y[None, :])).mean()


class Mmd(_Model):
    """A kernel distance between two sets."""

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        za, zb = self.net(a), self.net(b)

        def kernel(u: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return torch.exp(-(u[:, None] - v[None]).pow(2).sum(-1) / 2).mean()

        return kernel(za, za) + kernel(zb, zb) - 2 * kernel(za, zb)


class Rmse(_Model):
    """The root of the mean over the batch."""

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.sqrt(F.mse_loss(self.net(a), b[:, :6]))


class Saturated(_Model):
    """The square of a mean that is zero for parameters of twice the size: only those of the model show the samples meet."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.linspace(0.6, 0.8, 8).unsqueeze(1))

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        rest = (1 - a.softmax(-1) @ self.gate).relu().mean()
        return F.mse_loss(self.net(a), b[:, :6]) + 30 * rest.square()


class Packed(nn.Module):
    """Documents one after the other in one flat dimension; tokens attend within their document."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv = nn.Embedding(20, 12), nn.Linear(12, 36)
        self.after, self.head = body(12, 24, 12), nn.Linear(12, 20)

    def forward(self, tokens: torch.Tensor, document: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.embed(tokens)).unsqueeze(0).chunk(3, -1)
        mask = document[:, None] == document[None, :]
        h = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)[0]
        return F.cross_entropy(self.head(self.after(h)), tokens)

    @staticmethod
    def batch(size: int) -> tuple[torch.Tensor, ...]:
        return torch.randint(0, 20, (size,)), torch.arange(size) // 7


class VQVAE(nn.Module):
    """A codebook that is moved by the samples of each step, after they were quantised with it."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = body(8, 12, 4), body(4, 12, 8)
        self.register_buffer("codes", torch.randn(5, 4))
        self.register_buffer("sizes", torch.ones(5))
        self.register_buffer("sums", self.codes.clone())

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        z = self.encoder(x)
        nearest = torch.cdist(z.detach(), self.codes).argmin(1)
        quantised = F.embedding(nearest, self.codes)
        if self.training:
            with torch.no_grad():
                hot = F.one_hot(nearest, 5).to(z.dtype)
                self.sizes.data.mul_(0.9).add_(hot.sum(0), alpha=0.1)
                self.sums.data.mul_(0.9).add_(hot.t() @ z, alpha=0.1)
                self.codes.data.copy_(self.sums / (self.sizes + 1e-5).unsqueeze(1))
        commitment = F.mse_loss(z, quantised.detach())
        out = self.decoder(z + (quantised - z).detach())
        error = F.mse_loss(out, x)
        return {"loss": error + 0.25 * commitment, "error": error.detach()}

    @staticmethod
    def batch(size: int) -> tuple[torch.Tensor, ...]:
        return (torch.randn(size, 8),)


class Plain(Triplet):
    """A classifier with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.head = nn.Dropout(0.3), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.drop(F.dropout(self.net(x), 0.2))), y)


class TimeMajor(nn.Module):
    """Turned around, flattened, and back: the order of rows differs between the batch and its parts on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 12), nn.Linear(12, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        t, b = x.shape[1], x.shape[0]
        h = self.lstm(x.transpose(0, 1))[0]
        logits = self.head(h.reshape(t * b, 12)).view(t, b, 3).mean(0)
        return F.cross_entropy(logits, y)

    @staticmethod
    def batch(size: int) -> tuple[torch.Tensor, ...]:
        return torch.randn(size, 5, 8), torch.arange(size) % 3


class Noisy(Triplet):
    """A variational layer: noise of the shape of the samples, and a divergence that is a mean."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        mean, log = self.net(x).chunk(2, 1)
        z = mean + torch.randn_like(mean) * (log / 2).exp()
        divergence = -0.5 * (1 + log - mean.pow(2) - log.exp()).sum(1).mean()
        return F.cross_entropy(z, y) + 0.1 * divergence


class Mixup(Triplet):
    """Samples are mixed with others of the same micro-batch, which is what is meant."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        order = torch.randperm(x.shape[0])
        logits = self.head(self.net(0.7 * x + 0.3 * x[order]))
        return 0.7 * F.cross_entropy(logits, y) + 0.3 * F.cross_entropy(logits, y[order])


class Frames(nn.Module):
    """Frames are folded into the batch, and the loss is divided by samples times frames."""

    def __init__(self) -> None:
        super().__init__()
        self.net = body()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.shape
        return self.net(x.reshape(b * t, 8)).pow(2).sum() / (b * t)

    @staticmethod
    def batch(size: int) -> tuple[torch.Tensor, ...]:
        return (torch.randn(size, 5, 8),)


class Normed(Triplet):
    """BatchNorm: each micro-batch by its own statistics is what is meant."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.free, self.head = (
            nn.BatchNorm1d(6),
            nn.BatchNorm1d(6, track_running_stats=False),
            nn.Linear(6, 3),
        )

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.free(self.norm(self.net(x)))), y)


class OwnBatchNorm(nn.BatchNorm1d):
    """As timm's BatchNormAct2d: the count of batches is an op of its own, and the function is called with the buffers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.num_batches_tracked.add_(1)
        return F.relu(
            F.batch_norm(
                x,
                self.running_mean,
                self.running_var,
                self.weight,
                self.bias,
                self.training,
                self.momentum,
                self.eps,
            )
        )


class OwnNormed(Triplet):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = OwnBatchNorm(6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.norm(self.net(x))), y)


class Standardised(Triplet):
    """As timm's ScaledStdConv2d: the function `batch_norm` standardises a weight, in eval mode as well."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 6))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        weight = F.batch_norm(self.weight[None], None, None, training=True, momentum=0.0)[0]
        return F.cross_entropy(F.linear(self.net(x), weight), y)


MIXERS: dict[str, Callable[[], nn.Module]] = {
    "simclr": SimCLR,
    "clip": Clip,
    "barlow_twins": Barlow,
    "vicreg": Vicreg,
    "triplet_mining": RandomTriplet,
    "batch_hard": Triplet,
    "supcon": SupCon,
    "hand_norm": HandNorm,
    "batch_attention": BatchAttention,
    "memory": Memory,
    "load_balancing": Router,
    "ranking": Ranking,
    "mmd": Mmd,
    "rmse": Rmse,
    "saturated": Saturated,
    "packed_tokens": Packed,
}
PLAIN: dict[str, Callable[[], nn.Module]] = {
    "classifier": Plain,
    "time_major": TimeMajor,
    "noise": Noisy,
    "mixup": Mixup,
    "batch_norm": Normed,
    "own_batch_norm": OwnNormed,
    "standardised_weight": Standardised,
    "frames": Frames,
}
