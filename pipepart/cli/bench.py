"""`pipepart bench`: a recipe timed at several shapes and schedules, one after the other on the same machine."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipepart.cli.config import checked, compose_config
from pipepart.cli.console import bold, quiet_libraries, shown, table
from pipepart.cli.ranks import already_started, start_ranks
from pipepart.cli.train import check_run, prepare_folder, read_result, resolve_devices
from pipepart.errors import ConfigError, PipepartError
from pipepart.planning import format_seconds

__all__ = ["bench", "shapes"]


def shapes(devices: int) -> list[tuple[str, list[str]]]:
    """What is compared: one process, replicas only, what auto takes, and a pipeline with each schedule."""
    found = [("one process", ["devices=1", "strategy.stages=1"])]
    if devices > 1:
        found.append(("replicas only", [f"devices={devices}", "strategy.stages=1"]))
        found.append(("auto", [f"devices={devices}"]))
        for schedule in ("gpipe", "1f1b", "interleaved"):
            found.append(
                (schedule, [f"devices={devices}", f"strategy.stages={devices}", f"strategy.schedule={schedule}"])
            )
    return found


def bench(overrides: Sequence[str], extra: Path | None = None, steps: int = 20) -> int:
    """Train each shape for a few steps, and compare. Efficiency: against one process, per process."""
    if already_started():
        raise ConfigError("pipepart bench starts its processes itself: call it without torchrun or srun")
    if steps < 5:
        raise ConfigError(f"--steps {steps}: the first steps are warm-up; expected at least 5")
    quiet_libraries()
    base = checked(compose_config(overrides, extra=extra))
    devices, root = resolve_devices(base), Path(base["output"])
    short = [
        "logger=none", "callbacks=none", f"trainer.max_steps={steps}", "trainer.limit_val_batches=0",
        "trainer.val_check_interval=null",
    ]  # fmt: skip
    plans: list[tuple[str, dict[str, Any]]] = []
    for name, shape in shapes(devices):
        config = checked(
            compose_config([*overrides, *short, *shape, f"output={root / name.replace(' ', '_')}"], extra=extra)
        )
        config["devices"] = resolve_devices(config)
        check_run(config)
        plans.append((name, config))
    print(
        f"{bold('pipepart bench')}  recipe {base['name']}, {len(plans)} shapes, {steps} steps each, output in {shown(root)}"
    )
    results: list[tuple[str, int, dict[str, Any]]] = []
    for name, config in plans:
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


def _compared(results: Sequence[tuple[str, int, dict[str, Any]]], root: Path) -> str:
    alone = results[0][2].get("samples_per_second")
    head = ["shape", "replicas x stages", "schedule", "micro-batches", "step", "predicted", "samples/s", "efficiency"]
    rows = [head]
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
    with open(root / "bench.csv", "w", newline="") as file:
        csv.writer(file).writerows(rows)
    return table(rows, left=3) + f"\n\n{bold('table')}  {shown(root / 'bench.csv')}"
