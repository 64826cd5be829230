"""Data sets of a user, read from files by the data modules of the recipes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from pipepart.cli.config import checked, compose_config
from pipepart.cli.fit import build_recipe
from recipes.images import ImageData, MaskData
from recipes.rnn import TagData
from recipes.seq2seq import PairData
from recipes.text import TextData, TokenData


def test_a_text_file_becomes_windows_of_its_bytes(tmp_path: Path) -> None:
    text = "Grüße aus dem Hafen. " * 40
    (tmp_path / "book.txt").write_text(text, encoding="utf-8")
    data = TextData(context=8, batch_size=4, path=str(tmp_path / "book.txt"))
    codes, following = next(iter(data.train_dataloader()))
    assert codes.shape == following.shape == (4, 8)
    assert torch.equal(codes[:, 1:], following[:, :-1])
    assert bytes(codes[0].tolist()) in text.encode()
    with pytest.raises(ValueError, match="it needs 20000"):
        TextData(context=1000, path=str(tmp_path / "book.txt"))


def test_token_numbers_are_mapped_not_read(tmp_path: Path) -> None:
    tokens = np.arange(1000, dtype=np.uint16) % 300
    tokens.tofile(tmp_path / "train.bin")
    data = TokenData(str(tmp_path / "train.bin"), context=10, batch_size=3, vocabulary=300)
    assert isinstance(data.codes, np.memmap)
    codes, following = next(iter(data.val_dataloader()))
    assert torch.equal((codes + 1) % 300, following)
    assert codes[0, 0] == 900 % 300
    with pytest.raises(ValueError, match=r"holds token 299.*vocabulary=256"):
        TokenData(str(tmp_path / "train.bin"), vocabulary=256, context=10)


def _draw(path: Path, colour: tuple[int, int, int]) -> None:
    image = pytest.importorskip("PIL.Image")
    path.parent.mkdir(parents=True, exist_ok=True)
    image.new("RGB", (20, 12), colour).save(path)


def test_a_folder_of_pictures_per_class(tmp_path: Path) -> None:
    for n in range(12):
        _draw(tmp_path / ("black" if n % 2 else "white") / f"{n}.png", (0, 0, 0) if n % 2 else (255, 255, 255))
    data = ImageData(str(tmp_path), size=8, classes=2, batch_size=5)
    pictures, classes = next(iter(data.train_dataloader()))
    assert pictures.shape == (5, 3, 8, 8)
    assert torch.equal(pictures.mean((1, 2, 3)), classes * 2.0 - 1.0)  # black is class 0
    with pytest.raises(ValueError, match=r"2 folders.*data\.classes=3"):
        ImageData(str(tmp_path), classes=3)


def test_pictures_with_masks(tmp_path: Path) -> None:
    for n in range(11):
        _draw(tmp_path / "images" / f"{n}.png", (n, n, n))
        _draw(tmp_path / "masks" / f"{n}.png", (255, 255, 255) if n % 2 else (0, 0, 0))
    _draw(tmp_path / "images" / "unmasked.png", (9, 9, 9))
    data = MaskData(str(tmp_path), size=8, batch_size=9)
    pictures, masks = next(iter(data.train_dataloader()))
    assert masks.shape == (9, 8, 8)
    number = ((pictures[:, 0, 0, 0] / 2 + 0.5) * 255).round().long()
    assert torch.equal(masks[:, 0, 0].long(), number % 2)


def test_pairs_and_tags(tmp_path: Path) -> None:
    (tmp_path / "pairs.tsv").write_text("".join(f"ask {n}\tanswer {n}\n" for n in range(20)) + "no tab here\n")
    data = PairData(length=12, batch_size=6, path=str(tmp_path / "pairs.tsv"))
    assert len(data.train) + len(data.val) == 20
    assert [len(part) for part in next(iter(data.train_dataloader()))] == [6, 6]
    (tmp_path / "tags.tsv").write_text("ab\t0 1\nabc\t1 0 2\n" * 10)
    words, tags = next(iter(TagData(batch_size=4, path=str(tmp_path / "tags.tsv"), tags=3).val_dataloader()))
    assert words.shape == tags.shape
    (tmp_path / "tags.tsv").write_text("ab\t0 7\n")
    with pytest.raises(ValueError, match=r"largest is 7; data\.tags=3"):
        TagData(path=str(tmp_path / "tags.tsv"), tags=3)


def test_the_key_of_the_configuration_reaches_the_file(tmp_path: Path) -> None:
    np.zeros(2000, dtype=np.uint16).tofile(tmp_path / "train.bin")
    words = [
        "recipe=gpt",
        "data=tokens",
        f"data.path={tmp_path / 'train.bin'}",
        "data.vocabulary=64",
        "data.context=16",
    ]
    module, data = build_recipe(checked(compose_config([*words, "model.depth=1", "model.width=16", "model.heads=2"])))
    codes, _ = next(iter(data.train_dataloader()))
    assert codes.shape == (data.batch_size, 16)
    assert any(parameter.shape == (64, 16) for parameter in module.parameters())
