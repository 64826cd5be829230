"""The folder of a run of a recipe with a checkpoint, as `pipepart train` leaves it, without training."""

from __future__ import annotations

from pathlib import Path

import torch

from pipepart.cli.config import checked, compose_config, written
from pipepart.cli.fit import build_recipe

__all__ = ["saved_run"]


def saved_run(folder: Path, *overrides: str) -> torch.nn.Module:
    """Write config.yaml and checkpoints/last.ckpt, with values that no initialisation gives; return the module."""
    config = checked(compose_config([*overrides, f"output={folder}"]))
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.yaml").write_text(written(config))
    torch.manual_seed(1)
    module, _ = build_recipe(config)
    with torch.no_grad():
        for name, value in module.state_dict().items():
            if value.is_floating_point():
                value.add_(0.05 * (torch.rand_like(value) if "running" in name else torch.randn_like(value)))
    torch.save({"state_dict": module.state_dict(), "epoch": 0}, folder / "checkpoints" / "last.ckpt")
    return module.eval()
