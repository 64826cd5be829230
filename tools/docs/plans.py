"""The plans of the gallery: recipes on clusters that need not exist, so that their figures do not depend on this machine.

python -m tools.docs.plans               # writes plan.json and graph.json of each into docs/gallery
python -m tools.docs.plans unet          # of one
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

__all__ = ["EXAMPLES", "FOLDER", "Example"]

FOLDER = Path(__file__).parents[2] / "docs" / "gallery"


@dataclass(frozen=True)
class Example:
    """One report of the gallery."""

    title: str
    recipe: str
    cluster: str
    options: dict[str, Any]
    compare: str | None = None
    """Another example that the report shows beside this one."""


EXAMPLES = {
    "gpt": Example(
        "GPT on four L4, 1f1b", "gpt", "l4", {"devices": 4, "stages": 4, "microbatches": 8, "schedule": "1f1b"}
    ),
    "gpt_zb_v": Example(
        "GPT on four L4, zb_v", "gpt", "l4", {"devices": 4, "stages": 4, "microbatches": 8, "schedule": "zb_v"}, "gpt"
    ),
    "unet": Example(
        "U-Net on two V100, with skips",
        "unet",
        "v100",
        {"devices": 2, "stages": 2, "microbatches": 8, "schedule": "1f1b"},
    ),
}


def _module(recipe: str) -> tuple[LightningModule, Any]:
    import torch

    from recipes.gpt import GPTModule
    from recipes.unet import UNetModule

    if recipe == "gpt":
        tokens = torch.zeros(32, 128, dtype=torch.long)
        return GPTModule(torch.optim.AdamW, None, 256, 128, width=256, depth=8, heads=8), (tokens, tokens)
    return UNetModule(torch.optim.AdamW, None, width=16), (torch.zeros(16, 3, 64, 64), torch.zeros(16, 64, 64))


def main(names: Sequence[str]) -> None:
    from pipepart import capture, plan
    from pipepart.report import save_graph

    for name, example in ((name, EXAMPLES[name]) for name in names or EXAMPLES):
        module, batch = _module(example.recipe)
        captured = capture(module.training_step, (batch, 0))
        found = plan(captured, cluster=example.cluster, cost="analytic", **example.options)
        (FOLDER / name).mkdir(parents=True, exist_ok=True)
        found.save(FOLDER / name / "plan.json")
        save_graph(FOLDER / name / "graph.json", captured.graph)
        print(FOLDER / name, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
