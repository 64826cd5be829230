"""Installed from a wheel in a folder elsewhere, the command works: code, recipes and configuration are all in it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_wheel_trains_in_a_folder_elsewhere(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    source = tmp_path / "source"
    ignore = shutil.ignore_patterns("__pycache__")
    for name in ("pipepart", "recipes", "conf"):
        shutil.copytree(ROOT / name, source / name, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(source)],
        check=True, capture_output=True, timeout=240,
    )  # fmt: skip
    (wheel,) = tmp_path.glob("pipepart-*.whl")
    files = set(zipfile.ZipFile(wheel).namelist())
    for name in (
        "pipepart/conf/train.yaml",
        "pipepart/conf/recipe/mlp.yaml",
        "pipepart/conf/cluster/h100.yaml",
        "recipes/mlp.py",
    ):
        assert name in files

    # A fresh environment that sees the packages of this one, but not the checkout.
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "env")], check=True, timeout=120)
    python = tmp_path / "env" / "bin" / "python"
    site = Path(
        subprocess.check_output(
            [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True
        ).strip()
    )
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)  # what installing a pure wheel does
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    shutil.rmtree(source)

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    where = subprocess.check_output(
        [python, "-c", "import pipepart; print(pipepart.__file__)"], cwd=elsewhere, env=environment, text=True
    )
    assert str(tmp_path) in where
    words = ["recipe=mlp", "trainer.max_steps=20", "trainer.limit_val_batches=1", "trainer.val_check_interval=10"]
    run = subprocess.run(
        [python, "-m", "pipepart.cli", "train", *words],
        cwd=elsewhere, env=environment, capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    assert {path.name for path in elsewhere.iterdir()} == {"outputs"}
    latest = elsewhere / "outputs" / "latest"
    for name in ("report.html", "plan.json", "checkpoints/last.ckpt", "metrics/metrics.csv", "wandb", "config.yaml"):
        assert (latest / name).exists(), name
        assert f"{name}\n" in run.stdout
    for noise in ("Warning", "deprecated", "Initializing distributed", "wandb:", str(tmp_path)):
        assert noise not in run.stdout + run.stderr
