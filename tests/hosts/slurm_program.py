"""A user's own script for a job of SLURM: Lightning's usual program, which knows nothing of queues.

The arguments are a folder and the number of steps. Each rank writes the steps that it has done, with the number of the start.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset


class Net(L.LightningModule):
    def __init__(self, folder: Path, pause: float) -> None:
        super().__init__()
        layers = [layer for _ in range(4) for layer in (torch.nn.Linear(16, 16), torch.nn.Tanh())]
        self.net = torch.nn.Sequential(*layers, torch.nn.Linear(16, 1)).double()
        self.folder, self.pause = folder, pause

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.net(batch[0]).pow(2).mean()

    def on_train_batch_end(self, *_: object) -> None:
        time.sleep(self.pause)
        with open(self.folder / f"steps-{self.global_rank}", "a") as file:
            file.write(f"{os.environ.get('SLURM_RESTART_COUNT', '0')} {self.global_step}\n")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def fit(folder: Path, steps: int, pause: float, **options: object) -> L.Trainer:
    """Train, and save the weights at the end."""
    L.seed_everything(3, verbose=False)
    module = Net(folder, pause)
    # One batch in each epoch: Lightning resumes an epoch with its first batch.
    data = DataLoader(TensorDataset(torch.randn(8, 16, dtype=torch.float64)), batch_size=8)
    trainer = L.Trainer(
        accelerator="cpu", max_steps=steps, logger=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=folder, enable_checkpointing=False, **options,
    )  # fmt: skip
    trainer.fit(module, data)
    trainer.save_checkpoint(folder / "end.ckpt")
    return trainer


if __name__ == "__main__":
    from pipepart import PipelineStrategy

    strategy = PipelineStrategy(stages=2, microbatches=2, schedule="1f1b", timeout=120)
    fit(Path(sys.argv[1]), int(sys.argv[2]), 0.1, strategy=strategy, devices=1, num_nodes=2)
