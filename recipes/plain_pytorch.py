"""A plain PyTorch loop with `Pipeline`, without Lightning and without configuration files.

torchrun --nproc-per-node 2 -m recipes.plain_pytorch
torchrun --nproc-per-node 4 -m recipes.plain_pytorch --stages 2 --steps 300
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from pipepart import Pipeline
from recipes.mlp import spirals

__all__ = ["main"]


class Model(nn.Module):
    """The forward of a training model returns its loss."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Linear(2, width), nn.GELU()]
        for _ in range(depth - 2):
            layers += [nn.Linear(width, width), nn.GELU()]
        self.net = nn.Sequential(*layers, nn.Linear(width, 2))

    def forward(self, points: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.net(points), classes)


def main(words: Sequence[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=None, help="default: all processes in one pipeline")
    parser.add_argument("--schedule", default="auto", help="gpipe, 1f1b, interleaved")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--lr", type=float, default=1e-3)
    options = parser.parse_args(words)

    torch.manual_seed(0)  # the same model on every rank
    points, classes = spirals(2048)
    model = Model(options.width, options.depth)
    pipe = Pipeline(
        model,
        (points[: options.batch_size], classes[: options.batch_size]),
        stages="auto" if options.stages is None else options.stages,
        microbatches=options.microbatches,
        schedule=options.schedule,
    )
    rank = dist.get_rank() if dist.is_initialized() else 0
    if rank == 0:
        print(pipe.plan.describe(), flush=True)

    optimizer = torch.optim.Adam(pipe.parameters(), lr=options.lr)  # the parameters of this rank
    replica = rank // pipe.plan.stages
    generator = torch.Generator().manual_seed(replica)  # different batches per replica, the same for its stages
    loss = torch.tensor(0.0)
    for step in range(options.steps):
        chosen = torch.randint(len(points), (options.batch_size,), generator=generator)
        loss = pipe.step(points[chosen], classes[chosen])  # all micro-batches, forward and backward
        pipe.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and (step % 50 == 0 or step == options.steps - 1):
            print(f"step {step:4d}  loss {loss:.3f}", flush=True)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    return float(loss)


if __name__ == "__main__":
    main()
