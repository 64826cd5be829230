"""Images: your own folders, or drawn shapes that need no download."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

__all__ = ["ImageData", "MaskData", "draw_masks", "draw_shapes"]

_ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tif", ".tiff")


def _masks(kinds: torch.Tensor, size: int, generator: torch.Generator) -> torch.Tensor:
    """One shape per image as 0 and 1: disc, square, ring or cross."""
    count = len(kinds)
    centre = size * (0.3 + 0.4 * torch.rand(count, 2, generator=generator))
    radius = (size * (0.15 + 0.12 * torch.rand(count, generator=generator)))[:, None, None]
    grid = torch.arange(size) + 0.5
    dy = (grid[None, :, None] - centre[:, 0, None, None]).expand(count, size, size)
    dx = (grid[None, None, :] - centre[:, 1, None, None]).expand(count, size, size)
    round_, square = (dx.square() + dy.square()).sqrt(), torch.maximum(dx.abs(), dy.abs())
    shapes = torch.stack(
        [
            round_ < radius,
            square < radius,
            (round_ < radius) & (round_ > 0.55 * radius),
            (square < radius) & (torch.minimum(dx.abs(), dy.abs()) < 0.3 * radius),
        ]
    )
    return shapes[kinds % 4, torch.arange(count)].float()


def draw_shapes(samples: int, size: int, classes: int = 4, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Noisy images with one shape each, and the class of the shape."""
    if not 2 <= classes <= 4:
        raise ValueError(
            f"classes={classes}: there are 4 drawn shapes; expected 2 to 4, or a folder of yours (data.path)"
        )
    generator = torch.Generator().manual_seed(seed)
    kinds = torch.randint(classes, (samples,), generator=generator)
    colour = torch.rand(samples, 3, 1, 1, generator=generator) + 0.5
    pictures = _masks(kinds, size, generator)[:, None] * colour
    return pictures + 0.3 * torch.randn(pictures.shape, generator=generator), kinds


def draw_masks(samples: int, size: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Noisy images with three shapes each, and their masks."""
    generator = torch.Generator().manual_seed(seed)
    layers = [_masks(torch.randint(4, (samples,), generator=generator), size, generator) for _ in range(3)]
    masks = torch.stack(layers).amax(0)
    noise = 0.8 * torch.randn(samples, 3, size, size, generator=generator)
    return masks[:, None] * torch.tensor([1.0, 0.8, 0.6])[:, None, None] + noise, masks


def read_image(path: Path, size: int, grey: bool = False) -> torch.Tensor:
    """An image file as numbers from 0 to 1, [channels, size, size]."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError("reading picture files needs Pillow: pip install pillow") from error
    with Image.open(path) as picture:
        resized = picture.convert("L" if grey else "RGB").resize((size, size))
        numbers = torch.from_numpy(np.asarray(resized, dtype=np.float32) / 255.0)
    return numbers[None] if grey else numbers.permute(2, 0, 1)


class Files(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Images that are read when they are needed, with their classes or masks."""

    def __init__(self, items: Sequence[tuple[Path, Any]], size: int, answer: Callable[[Any], torch.Tensor]) -> None:
        self.items, self.size, self.answer = items, size, answer

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        path, what = self.items[index]
        return (read_image(path, self.size) - 0.5) * 2, self.answer(what)


def _pictures(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix.lower() in _ENDINGS)


class _PictureData(L.LightningDataModule):
    train: Dataset
    val: Dataset

    def __init__(self, batch_size: int, workers: int) -> None:
        super().__init__()
        self.batch_size, self.workers = batch_size, workers

    def split(
        self, items: list[tuple[Path, Any]], size: int, answer: Callable[[Any], torch.Tensor], folder: str
    ) -> None:
        """Every tenth image is for validation."""
        if len(items) < 10:
            raise ValueError(
                f"{folder} holds {len(items)} usable pictures ({', '.join(_ENDINGS)}); expected at least 10"
            )
        self.train = Files([item for i, item in enumerate(items) if i % 10], size, answer)
        self.val = Files(items[::10], size, answer)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, self.batch_size, shuffle=True, drop_last=True, num_workers=self.workers)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val, self.batch_size, num_workers=self.workers)


class ImageData(_PictureData):
    """A folder with one folder of images per class (`path/cat/1.png`), or drawn shapes."""

    def __init__(
        self,
        path: str | None = None,
        size: int = 32,
        classes: int = 4,
        batch_size: int = 32,
        samples: int = 2048,
        workers: int = 0,
    ) -> None:
        super().__init__(batch_size, workers)
        if path is None:
            self.train = TensorDataset(*draw_shapes(samples, size, classes))
            self.val = TensorDataset(*draw_shapes(samples // 8, size, classes, seed=1))
            return
        folders = sorted(folder for folder in Path(path).iterdir() if folder.is_dir())
        if len(folders) != classes:
            raise ValueError(f"{path} has {len(folders)} folders, one per class, but data.classes={classes}")
        items = [(file, index) for index, folder in enumerate(folders) for file in _pictures(folder)]
        self.split(items, size, torch.tensor, path)


class MaskData(_PictureData):
    """A folder with `images/` and `masks/` of the same names (white is the object), or drawn shapes."""

    def __init__(
        self, path: str | None = None, size: int = 32, batch_size: int = 16, samples: int = 1024, workers: int = 0
    ) -> None:
        super().__init__(batch_size, workers)
        if path is None:
            self.train = TensorDataset(*draw_masks(samples, size))
            self.val = TensorDataset(*draw_masks(samples // 8, size, seed=1))
            return
        masks = {file.stem: file for file in _pictures(Path(path) / "masks")}
        items = [(file, masks[file.stem]) for file in _pictures(Path(path) / "images") if file.stem in masks]
        self.split(items, size, lambda file: (read_image(file, size, grey=True)[0] > 0.5).float(), path)
