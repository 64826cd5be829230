"""`python -m tools.bench.prediction [gpt resnet ...] [--runs 5] [-- trainer.max_steps=60 ...]`.

Every run is a real `pipepart train` of the recipe as it is, or with the options after `--`. Recipes take turns, so that a
slow quarter of an hour of the machine hits all of them. Very short runs measure little but their own beginning.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tools.bench.auto.models import RECIPES

_TIMEOUT = 600.0


def train(recipe: str, more: list[str]) -> dict[str, Any]:
    """What one run says of itself: seconds of a step as predicted, by the costs of its ops, and as measured."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pipepart.cli", "train", f"recipe={recipe}", "logger=none"]
        command += [f"output={folder}", *more]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT)
        if done.returncode:
            raise SystemExit(f"{' '.join(command[2:])} failed:\n{done.stderr[-2000:]}")
        found: dict[str, Any] = json.loads((Path(folder) / "result.json").read_text())
    return found


def row(recipe: str, found: list[dict[str, Any]]) -> str:
    def errors(name: str) -> list[float]:
        return sorted(result[name] / result["measured_step"] - 1 for result in found)

    predicted, simulated = errors("predicted_step"), errors("simulated_step")
    measured = [result["measured_step"] for result in found]
    spread = f"{predicted[0]:+.0%} to {predicted[-1]:+.0%}"
    return (
        f"{recipe:10} {statistics.median(measured) * 1e3:8.1f} ms {max(measured) / min(measured) - 1:>8.0%} "
        f"{statistics.median(predicted):>+10.0%} {spread:>18} {statistics.median(simulated):>+14.0%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.prediction", description=__doc__)
    parser.add_argument("recipes", nargs="*", default=list(RECIPES))
    parser.add_argument("--runs", type=int, default=5)
    arguments, more = sys.argv[1:], []
    if "--" in arguments:
        arguments, more = arguments[: arguments.index("--")], arguments[arguments.index("--") + 1 :]
    given = parser.parse_args(arguments)
    found: dict[str, list[dict[str, Any]]] = {recipe: [] for recipe in given.recipes}
    for run in range(given.runs):
        for recipe in given.recipes:
            result = train(recipe, more)
            found[recipe].append(result)
            error = result["predicted_step"] / result["measured_step"] - 1
            print(f"run {run + 1} of {given.runs}: {recipe} {error:+.0%}", file=sys.stderr, flush=True)
    print(f"{'recipe':10} {'step':>11} {'varies':>8} {'predicted':>10} {'of single runs':>18} {'by costs alone':>14}")
    for recipe, results in found.items():
        print(row(recipe, results))
    worst = max(
        abs(statistics.median(r["predicted_step"] / r["measured_step"] - 1 for r in rs)) for rs in found.values()
    )
    print(f"median of {given.runs} run(s) each; the worst one is off by {worst:.0%}")


if __name__ == "__main__":
    main()
