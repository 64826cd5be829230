"""Text for language models: your own file, a file of token numbers, or generated stories that need no download."""

from __future__ import annotations

import random
from pathlib import Path

import lightning as L
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

__all__ = ["TextData", "TokenData", "Windows", "story"]


class Windows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Windows of a long sequence of codes as (codes, next codes). The sequence may be a file that is read as needed."""

    def __init__(self, codes: np.ndarray, context: int) -> None:
        self.codes, self.context = codes, context

    def __len__(self) -> int:
        return (len(self.codes) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = index * self.context
        window = torch.from_numpy(self.codes[start : start + self.context + 1].astype(np.int64))
        return window[:-1], window[1:]


class _CodeData(L.LightningDataModule):
    """The first nine tenths for training, the rest for validation."""

    codes: np.ndarray

    def __init__(self, context: int, batch_size: int) -> None:
        super().__init__()
        self.context, self.batch_size = context, batch_size

    def check(self) -> None:
        if len(self.codes) < 20 * self.context:
            raise ValueError(
                f"the text has {len(self.codes)} codes; with context={self.context} it needs {20 * self.context}"
            )

    def train_dataloader(self) -> DataLoader:
        codes = self.codes[: len(self.codes) * 9 // 10]
        return DataLoader(Windows(codes, self.context), self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(Windows(self.codes[len(self.codes) * 9 // 10 :], self.context), self.batch_size)


class TextData(_CodeData):
    """The bytes of a text file (any language, any alphabet), or of a generated story of `characters` characters."""

    def __init__(
        self,
        context: int = 64,
        batch_size: int = 32,
        path: str | None = None,
        characters: int = 300_000,
        vocabulary: int = 256,
    ) -> None:
        super().__init__(context, batch_size)
        if vocabulary < 256:
            raise ValueError(f"vocabulary={vocabulary}: bytes have 256 values")
        content = story(characters).encode() if path is None else Path(path).read_bytes()
        self.codes = np.frombuffer(content, dtype=np.uint8)
        self.check()


class TokenData(_CodeData):
    """Token numbers in a binary file of any size, which is mapped into memory."""

    def __init__(
        self, path: str, context: int = 64, batch_size: int = 32, dtype: str = "uint16", vocabulary: int = 50257
    ) -> None:
        super().__init__(context, batch_size)
        if dtype not in ("uint8", "uint16", "uint32", "int32", "int64"):
            raise ValueError(f"dtype={dtype!r}: expected uint8, uint16, uint32, int32 or int64")
        self.codes = np.memmap(path, dtype=np.dtype(dtype), mode="r")
        self.check()
        largest = int(self.codes[:1_000_000].max())
        if largest >= vocabulary:
            raise ValueError(
                f"{path} holds token {largest}, but vocabulary={vocabulary}: set data.vocabulary or data.dtype"
            )


_PEOPLE = ["Ada", "Bruno", "Chiara", "Dimitri", "Esi", "Farid", "Greta", "Hana", "Ivo", "Jun"]
_THINGS = ["lantern", "kettle", "ladder", "violin", "map", "wheel", "basket", "mirror", "rope", "clock"]
_PLACES = ["harbour", "orchard", "library", "mill", "station", "garden", "tower", "market"]
_DEEDS = ["carried", "mended", "painted", "hid", "found", "sold", "polished", "borrowed"]
_MOODS = ["slowly", "gladly", "in silence", "without a word", "before noon", "once again", "by candlelight"]


def _sentence(rng: random.Random, who: str) -> str:
    thing, place = rng.choice(_THINGS), rng.choice(_PLACES)
    forms = [
        f"{who} {rng.choice(_DEEDS)} the {thing} in the {place} {rng.choice(_MOODS)}.",
        f"In the {place}, {who} {rng.choice(_DEEDS)} a {thing}.",
        f"'Where is my {thing}?' asked {who}. '{rng.choice(_PEOPLE)} has it,' said {rng.choice(_PEOPLE)}.",
        f"The {thing} of {who} stood in the {place} for {rng.randint(2, 40)} days.",
    ]
    return rng.choice(forms)


def story(characters: int, seed: int = 0) -> str:
    """A story of about that many characters, with one person per paragraph."""
    rng = random.Random(seed)
    parts: list[str] = []
    length = 0
    while length < characters:
        who = rng.choice(_PEOPLE)
        paragraph = " ".join(_sentence(rng, who) for _ in range(rng.randint(2, 6))) + "\n"
        parts.append(paragraph)
        length += len(paragraph)
    return "".join(parts)[:characters]
