"""Every recipe trains on two replicas of two stages, two of them also on one replica, and its loss falls."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from support.ranks import run_ranks

from pipepart.cli.config import checked, compose_config
from pipepart.cli.groups import group_options

SHORT = {  # steps, and what keeps a short run small
    "gpt": (12, ["model.depth=2", "model.width=32", "data.context=16", "data.characters=20000"]),
    "llama_hf": (12, ["model.depth=2", "model.width=32", "data.context=16", "data.characters=20000"]),
    "finetune_hf": (12, ["data.length=48", "data.batch_size=8"]),
    "moe": (12, ["model.depth=2", "model.width=32", "data.context=16", "data.characters=20000"]),
    "vit": (30, ["model.depth=2", "model.width=32", "data.size=16", "data.samples=256"]),
    "resnet": (12, ["model.width=8", "data.size=16", "data.samples=256"]),
    "unet": (12, ["data.size=16", "data.samples=128"]),
    "seq2seq": (12, ["data.samples=512", "data.length=16", "model.width=32"]),
    "rnn": (16, ["data.samples=512", "model.width=32", "data.longest=12"]),
    "mlp": (80, ["model.width=32"]),
}
RECIPES = group_options("recipe")


def _train(recipe: str, shape: list[str], folder: Path) -> dict[str, Any]:
    steps, small = SHORT[recipe]
    overrides = [
        f"recipe={recipe}", *shape, *small, f"output={folder}", "logger=csv", "callbacks=none", f"trainer.max_steps={steps}",
        "trainer.limit_val_batches=1", f"trainer.val_check_interval={min(steps, 8)}", "trainer.log_every_n_steps=1",
    ]  # fmt: skip
    config = checked(compose_config(overrides))
    ranks = config["strategy"]["stages"] * (2 if config["strategy"]["replicas"] == 2 else 1)
    config["devices"] = ranks
    folder.mkdir(parents=True, exist_ok=True)
    run_ranks(ranks, _fit, config, folder, timeout=360)
    return json.loads((folder / "result.json").read_text())


def _fit(config: dict[str, Any], folder: Path) -> None:
    from pipepart.cli.fit import fit

    fit(config, folder)


def _losses(folder: Path) -> list[float]:
    rows = list(csv.DictReader((folder / "metrics" / "metrics.csv").open()))
    return [float(row["train/loss"]) for row in rows if row.get("train/loss")]


def _check(recipe: str, folder: Path, result: dict[str, Any]) -> None:
    losses = _losses(folder)
    assert len(losses) == SHORT[recipe][0]
    assert sum(losses[-3:]) < sum(losses[:3]), losses
    assert "val/loss" in result["metrics"]
    for name in ("plan.json", "report.html", "trace.json"):
        assert (folder / name).stat().st_size > 0


def test_all_recipes_are_tried() -> None:
    assert set(SHORT) == set(RECIPES)


@pytest.mark.timeout(420)
@pytest.mark.parametrize("recipe", ["mlp", pytest.param("gpt", marks=pytest.mark.slow)])
def test_two_stages(recipe: str, tmp_path: Path) -> None:
    result = _train(recipe, ["strategy.stages=2", "strategy.schedule=1f1b"], tmp_path / "run")
    assert (result["replicas"], result["stages"]) == (1, 2)
    _check(recipe, tmp_path / "run", result)


@pytest.mark.slow
@pytest.mark.timeout(420)
@pytest.mark.parametrize("recipe", RECIPES)
def test_two_replicas_of_two_stages(recipe: str, tmp_path: Path) -> None:
    if recipe.endswith("_hf"):
        pytest.importorskip("transformers")
    result = _train(recipe, ["strategy=hybrid", "strategy.schedule=1f1b"], tmp_path / "run")
    assert (result["replicas"], result["stages"]) == (2, 2)
    _check(recipe, tmp_path / "run", result)


def _plain(words: list[str]) -> float:
    from recipes.plain_pytorch import main

    return main(words)


@pytest.mark.slow
@pytest.mark.timeout(420)
@pytest.mark.parametrize(("ranks", "stages"), [(2, 2), (4, 2)])
def test_the_plain_loop(ranks: int, stages: int) -> None:
    words = ["--steps", "60", "--stages", str(stages), "--schedule", "1f1b"]
    losses = run_ranks(ranks, _plain, words, timeout=360)
    assert all(loss < 0.6 for loss in losses), losses
    assert len({round(loss, 6) for loss in losses[:stages]}) == 1
