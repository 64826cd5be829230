"""`python -m tools.bench.package [FOLDER]`: builds sdist and wheel into dist/, and runs the wheel in a new environment.

The environment is FOLDER (default: .venv-package) and is kept. It gets the torch of this environment first, since pip would
bring one for CUDA, and then the wheel with the extra `export`, with the newest versions that the package allows. In an empty
folder, it trains the recipe mlp, runs the first example of the README, and exports the checkpoint.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tools.bench.package.example import readme_example

ROOT = Path(__file__).parents[3]
_PATIENCE = 3600.0


def run(title: str, command: list[str], folder: Path) -> None:
    """Run one command, and end with its output if it fails."""
    started = time.monotonic()
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "PIP_CONSTRAINT"))}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=_PATIENCE, check=False
    )
    print(
        f"{title:<44}  {'ok' if done.returncode == 0 else 'FAILED':<6}  {time.monotonic() - started:6.1f} s", flush=True
    )
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")


def main() -> None:
    environment = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / ".venv-package").absolute()
    dist, python = ROOT / "dist", environment / "bin" / "python"
    shutil.rmtree(dist, ignore_errors=True)
    run("sdist, and the wheel from it", [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(dist)], ROOT)
    (wheel,) = dist.glob("*.whl")
    if not python.exists():
        run("a new environment", [sys.executable, "-m", "venv", str(environment)], ROOT)
    pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    with tempfile.TemporaryDirectory(prefix="pipepart-package-") as name:
        folder = Path(name)
        run("torch of this environment", [*pip, f"torch=={importlib.metadata.version('torch')}"], folder)
        run(
            "the wheel with the extra export",
            [*pip, "--upgrade-strategy", "only-if-needed", f"{wheel}[export]"],
            folder,
        )
        (folder / "example.py").write_text(readme_example(ROOT / "README.md"))
        command = str(environment / "bin" / "pipepart")
        run("pipepart train recipe=mlp", [command, "train", "recipe=mlp", "logger=none"], folder)
        run("the example of the README", [str(python), "example.py"], folder)
        for words in (
            ["--to", "onnx"],
            ["--to", "onnx", "--quantize", "int8"],
            ["--to", "safetensors"],
            ["--to", "pt2"],
        ):
            run(f"pipepart export {' '.join(words)}", [command, "export", "outputs/latest", *words], folder)
        frozen = subprocess.check_output([str(python), "-m", "pip", "freeze"], text=True).splitlines()
    print("versions: " + ", ".join(line for line in frozen if line.startswith(("torch", "lightning", "numpy", "onnx"))))


if __name__ == "__main__":
    main()
