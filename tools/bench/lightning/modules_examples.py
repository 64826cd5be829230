"""The example programs of Lightning's repository, unmodified, from a copy of its folder `examples`.

They would download MNIST and a text. Small data of the same form is made where they look for it, and torchvision, which they
use to convert and draw images, is replaced by the few functions that they call.
"""

from __future__ import annotations

import os
import runpy
import shutil
import sys
import tempfile
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.bench.lightning.modules_case import Cases
from tools.bench.lightning.modules_list import EXAMPLES

__all__ = ["CASES", "load"]

CASES = Cases()
_LIMITS: dict[str, Any] = {"max_epochs": 1, "limit_train_batches": 4}


def load() -> None:
    """Import what the programs need beside Lightning."""
    import jsonargparse  # noqa: F401

    _stand_in_for_torchvision()


def _run(program: str, arguments: Sequence[str] = ()) -> None:
    """Run a program of the examples as its user does, in a copy of the folder with data beside it."""
    folder = Path(tempfile.mkdtemp(dir=".")).resolve()
    shutil.copytree(Path(os.environ[EXAMPLES]) / "pytorch", folder / "pytorch")
    script = folder / "pytorch" / program
    _images(folder / "Datasets")
    _images(Path("data"))
    _text(Path("data") / "wikitext-2.txt")
    os.environ["PL_USE_MOCKED_MNIST"] = "1"
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")


def _images(folder: Path) -> None:
    """Images and labels in the files that the data set of Lightning's demos reads."""
    import torch

    target = folder / "MNIST" / "complete"
    if target.exists():  # made by the other rank, before it or at the same time: renaming is atomic
        return
    made = torch.Generator().manual_seed(0)
    with tempfile.TemporaryDirectory(dir=".") as unfinished:
        for name, count in (("training.pt", 60_000), ("test.pt", 1_000)):
            images = torch.randint(0, 256, (count, 28, 28), dtype=torch.uint8, generator=made)
            torch.save((images, torch.arange(count) % 10), os.path.join(unfinished, name))
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.rename(unfinished, target)
        except OSError:  # the other rank was faster
            return
        os.mkdir(unfinished)


def _text(path: Path) -> None:
    """A text whose words follow each other by chance, long enough to be split as the program does."""
    import random

    draw = random.Random(0)
    path.parent.mkdir(exist_ok=True)
    lines = [" ".join(draw.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(35)) for _ in range(4200)]
    unfinished = path.with_suffix(f".{os.getpid()}")
    unfinished.write_text("\n".join(lines))
    unfinished.replace(path)


def _stand_in_for_torchvision() -> None:
    """Modules with the functions of torchvision that the programs call."""
    from lightning.pytorch.demos import mnist_datamodule
    from lightning.pytorch.utilities import imports

    package, transforms, utils = (types.ModuleType(f"torchvision{part}") for part in ("", ".transforms", ".utils"))

    class ToTensor:
        """A transformation that the data set of the demos does not call, since it makes tensors itself."""

    def make_grid(tensor: Any, **options: Any) -> Any:
        return tensor.detach().cpu().double().mean(dim=0)

    def save_image(tensor: Any, path: str) -> None:
        import torch

        torch.save(tensor, path)

    transforms.ToTensor = ToTensor  # type: ignore[attr-defined]
    utils.make_grid, utils.save_image = make_grid, save_image  # type: ignore[attr-defined]
    package.transforms, package.utils = transforms, utils  # type: ignore[attr-defined]
    sys.modules.update({module.__name__: module for module in (package, transforms, utils)})
    imports._TORCHVISION_AVAILABLE = True  # type: ignore[assignment]
    mnist_datamodule._TORCHVISION_AVAILABLE = False  # type: ignore[assignment]


@CASES.add("examples.bug_report_model", trainer={"max_epochs": 1})
def _bug_report() -> None:
    _run("bug_report/bug_report_model.py")


@CASES.add("examples.transformer", trainer=_LIMITS, draws=True, remark="without dropout")
def _transformer() -> None:
    _run("basics/transformer.py")


@CASES.add("examples.backbone_image_classifier", trainer=_LIMITS)
def _backbone() -> None:
    _run("basics/backbone_image_classifier.py")


@CASES.add("examples.autoencoder", trainer={**_LIMITS, "precision": "32-true"}, relative=1e-4)
def _autoencoder() -> None:
    _run("basics/autoencoder.py")


@CASES.add(
    "examples.gan", trainer=_LIMITS, microbatches=1, draws=True, remark="draws fixed; microbatches=1: batch norm"
)
def _gan() -> None:
    _run("domain_templates/generative_adversarial_net.py")
