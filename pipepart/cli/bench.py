"""`pipepart bench`: a recipe timed at several shapes and schedules; `pipepart bench schedules`: simulated schedules."""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipepart.cli.config import checked, compose_config
from pipepart.cli.console import bold, quiet_libraries, shown, table
from pipepart.cli.processes import refuse_inside_job, start_ranks
from pipepart.cli.train import SHORT, prepare_folder, read_result, ready
from pipepart.errors import ConfigError, PipepartError
from pipepart.files import may_fail
from pipepart.planning import format_seconds
from pipepart.schedule import picture
from pipepart.schedule import table as schedule_table

__all__ = ["bench", "bench_schedules"]

_Result = tuple[str, int, dict[str, Any]]
"""A shape, its number of processes, and the result of its run."""


def _shapes(devices: int) -> dict[str, list[str]]:
    """The overrides of each shape: one process, replicas only, the automatic choice, and a pipeline of each schedule."""
    found = {"one process": ["devices=1", "strategy.stages=1"]}
    if devices > 1:
        found["replicas only"] = [f"devices={devices}", "strategy.stages=1"]
        found["auto"] = [f"devices={devices}"]
        for schedule in ("gpipe", "1f1b", "interleaved"):
            found[schedule] = [f"devices={devices}", f"strategy.stages={devices}", f"strategy.schedule={schedule}"]
    return found


def bench(overrides: Sequence[str], extra: Path | None = None, steps: int = 20) -> int:
    """Train each shape for a few steps, and compare them with one process; the efficiency is per process."""
    refuse_inside_job("pipepart bench")
    if steps < 5:
        raise ConfigError(f"--steps {steps}: the first steps are warm-up; expected at least 5")
    quiet_libraries()
    base = ready(checked(compose_config(overrides, extra=extra)))
    root = Path(base["output"])
    runs: dict[str, dict[str, Any]] = {}
    for name, shape in _shapes(base["devices"]).items():
        words = [*SHORT, f"trainer.max_steps={steps}", *shape, f"output={root / name.replace(' ', '_')}"]
        runs[name] = ready(checked(compose_config([*overrides, *words], extra=extra)))
    title = f"recipe {base['name']}, {len(runs)} shapes, {steps} steps each, output in {shown(root)}"
    print(f"{bold('pipepart bench')}  {title}")
    results: list[_Result] = []
    for name, config in runs.items():
        print(f"\n{bold(name)}", flush=True)
        folder = prepare_folder(config, overrides)
        try:
            start_ranks(config, folder)
            results.append((name, config["devices"], read_result(folder)))
        except PipepartError as error:
            print(f"pipepart bench: {error}", flush=True)
            results.append((name, config["devices"], {"error": str(error)}))
    print("\n" + _compared(results, root))
    return 1 if any("error" in result for _, _, result in results) else 0


def _compared(results: Sequence[_Result], root: Path) -> str:
    """The table of the shapes, which is also written to bench.csv."""
    alone = results[0][2].get("samples_per_second")
    rows = [["shape", "replicas x stages", "schedule", "micro-batches", "step", "predicted", "samples/s", "efficiency"]]
    for name, devices, result in results:
        if "samples_per_second" not in result:
            rows.append([name, "-", "-", "-", "-", "-", "-", "failed"])
            continue
        rate = result["samples_per_second"]
        rows.append(
            [
                name,
                f"{result['replicas']} x {result['stages']}",
                result["schedule"],
                str(result["microbatches"]),
                format_seconds(result["measured_step"]),
                format_seconds(result["predicted_step"]),
                f"{rate:.1f}",
                f"{rate / alone / devices:.2f}" if alone else "-",
            ]
        )
    with may_fail(shown(root / "bench.csv")), open(root / "bench.csv", "w", newline="") as file:
        csv.writer(file).writerows(rows)
    return table(rows, left=3) + f"\n\n{bold('table')}  {shown(root / 'bench.csv')}"


def bench_schedules(words: Sequence[str]) -> int:
    """Print bubble and memory of every schedule on equal stages, or the picture of one. No process is started."""
    parser = argparse.ArgumentParser(
        prog="pipepart bench schedules",
        description="Bubble and memory of every schedule against the bound, or the picture of one of them.",
    )
    parser.add_argument("--stages", type=int, nargs="+", default=[4, 8], help="numbers of stages (p)")
    parser.add_argument("--microbatches", type=int, nargs="+", default=[8, 24], help="numbers of micro-batches (m)")
    parser.add_argument("--chunks", type=int, nargs="+", help="chunks per stage (v); default: 1 2 4")
    parser.add_argument("--gantt", metavar="NAME", help="draw this schedule (or .csv file) instead of the table")
    given = parser.parse_args(list(words))
    for name in ("stages", "microbatches", "chunks"):
        for value in getattr(given, name) or ():
            if not 1 <= value <= 1024:
                raise ConfigError(f"--{name} must be a whole number from 1 to 1024, got {value}")
    if given.gantt:
        from_file = given.gantt.endswith(".csv")
        text = picture(
            given.gantt,
            stages=None if from_file else given.stages[0],
            microbatches=None if from_file else given.microbatches[0],
            chunks=given.chunks[0] if given.chunks else None,
            color=sys.stdout.isatty(),
        )
        print(text)
    else:
        print(schedule_table(given.stages, given.microbatches, given.chunks or [1, 2, 4]))
    return 0
