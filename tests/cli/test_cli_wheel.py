"""Installed from a wheel in a folder elsewhere, the command works: code, recipes and configuration are all in it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from tools.bench.package.example import readme_example

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Installed:
    """An environment with the wheel, and the folder in which a run has trained."""

    python: Path
    elsewhere: Path
    shown: str
    """The output of that run."""

    def run(self, *words: str) -> str:
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        done = subprocess.run(
            [self.python, *words],
            cwd=self.elsewhere, env=environment, capture_output=True, text=True, timeout=400, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    ignore = shutil.ignore_patterns("__pycache__")
    for name in ("pipepart", "recipes", "conf"):
        shutil.copytree(ROOT / name, source / name, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(source)],
        check=True, capture_output=True, timeout=240,
    )  # fmt: skip
    (wheel,) = folder.glob("pipepart-*.whl")
    files = set(zipfile.ZipFile(wheel).namelist())
    for name in (
        "pipepart/conf/train.yaml",
        "pipepart/conf/recipe/mlp.yaml",
        "pipepart/conf/cluster/h100.yaml",
        "recipes/mlp.py",
    ):
        assert name in files

    # A fresh environment that sees the packages of this one, but not the checkout.
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "env")], check=True, timeout=120)
    python = folder / "env" / "bin" / "python"
    site = Path(
        subprocess.check_output(
            [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True
        ).strip()
    )
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)  # what installing a pure wheel does
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    shutil.rmtree(source)
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    made = Installed(python, elsewhere, "")
    assert str(folder) in made.run("-c", "import pipepart; print(pipepart.__file__)")
    words = ["recipe=mlp", "trainer.max_steps=20", "trainer.limit_val_batches=1", "trainer.val_check_interval=10"]
    return Installed(python, elsewhere, made.run("-m", "pipepart.cli", "train", *words))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_wheel_trains_in_a_folder_elsewhere(installed: Installed) -> None:
    assert {path.name for path in installed.elsewhere.iterdir()} == {"outputs"}
    latest = installed.elsewhere / "outputs" / "latest"
    for name in ("report.html", "plan.json", "checkpoints/last.ckpt", "metrics/metrics.csv", "wandb", "config.yaml"):
        assert (latest / name).exists(), name
        assert f"{name}\n" in installed.shown
    for noise in ("Warning", "deprecated", "Initializing distributed", "wandb:", str(installed.elsewhere.parent)):
        assert noise not in installed.shown


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_wheel_exports_and_runs_the_example_of_the_readme(installed: Installed) -> None:
    pytest.importorskip("onnxruntime")
    words = ["-m", "pipepart.cli", "export", "outputs/latest", "--to", "onnx"]
    assert "last.onnx" in installed.run(*words)
    assert (installed.elsewhere / "outputs" / "latest" / "checkpoints" / "last.onnx").is_file()
    (installed.elsewhere / "example.py").write_text(readme_example(ROOT / "README.md"))
    assert "stage" in installed.run("example.py")  # the table of the plan
