"""The first example of the README as a program: its lines as they stand, with a module and data for its two names."""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["readme_example"]

_BEFORE = """\
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch.utils.data import DataLoader, TensorDataset


class MyUnmodifiedLightningModule(LightningModule):
    def __init__(self):
        super().__init__()
        layers = [torch.nn.Linear(8, 8) for _ in range(8)]
        self.net = torch.nn.Sequential(*layers)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return torch.nn.functional.mse_loss(self.net(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


class MyData(LightningDataModule):
    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.randn(64, 8), torch.randn(64, 8)), batch_size=32)


"""


def readme_example(readme: Path, devices: int = 2) -> str:
    """The program. A machine without eight devices runs it as one pipeline of `devices` processes on the CPU."""
    blocks = re.findall(r"```python\n(.*?)```", readme.read_text(encoding="utf-8"), re.DOTALL)
    block = next(text for text in blocks if "MyUnmodifiedLightningModule()" in text)
    changed = block.replace("stages=4", f"stages={devices}")
    changed = re.sub(r"devices=8,[^\n]*", f'devices={devices}, accelerator="cpu", logger=False,', changed)
    if changed.count(f"={devices}") != 2:
        raise ValueError(f"{readme} has no example with stages=4 and devices=8")
    return _BEFORE + changed
