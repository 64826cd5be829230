"""`pipepart train -m`: one run for every combination, through Hydra's sweepers and launchers, and a table at the end."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hydra.version
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from pipepart.cli.config import checked, compose_config, conf_folder, explaining, search_path, without_nulls
from pipepart.cli.console import bold, quiet_libraries, shown, table
from pipepart.cli.ranks import already_started, join_started, run_as_task
from pipepart.cli.secrets import redacted, redacted_override
from pipepart.cli.train import check_run, prepare_folder, read_result, resolve_devices, run
from pipepart.errors import ConfigError, PipelineError, PipepartError

__all__ = ["summary", "sweep"]


def sweep(overrides: Sequence[str], extra: Path | None = None) -> int:
    """Check all runs, then run them; one that fails does not stop the others. Returns 1 if any failed."""
    if already_started():
        raise ConfigError(
            "a sweep starts the processes of its runs itself: call `pipepart train -m` without torchrun or srun"
        )
    quiet_libraries()
    os.environ["HYDRA_FULL_ERROR"] = "1"
    jobs = _check_all(overrides, extra)
    if jobs:
        print(
            f"{bold('pipepart train -m')}  {len(jobs)} runs, one after the other unless a launcher spreads them",
            flush=True,
        )
    hydra.version.setbase("1.3")
    GlobalHydra.instance().clear()
    with explaining(extra), _queue_failures():
        main = Hydra.create_main_hydra2("pipepart", create_config_search_path(str(conf_folder())))
        returned = main.multirun(
            "train",
            job,
            overrides=[*search_path(extra), *without_nulls(overrides, extra)],
            with_log_configuration=False,
        )
    flat = [one for batch in returned for one in batch] if isinstance(returned, list) else []
    results = [(list(one.overrides or ()), one.return_value) for one in flat]
    if not results:  # sweepers that search keep the results for themselves
        return 0
    folder = Path(results[0][1]["folder"]).parent
    print("\n" + summary(results, folder))
    return 1 if any("error" in result for _, result in results) else 0


@contextmanager
def _queue_failures() -> Iterator[None]:
    """A job that the queue has ended (time, memory) has no result: what submitit says of it becomes an error of ours."""
    try:
        yield
    except Exception as error:
        if not type(error).__module__.startswith("submitit"):
            raise
        first = next(iter(str(error).splitlines()), type(error).__name__)
        raise PipelineError(f"a job of the queue ended without a result: {first}") from error


def _check_all(overrides: Sequence[str], extra: Path | None) -> list[list[str]]:
    """The overrides of every run of a plain sweep, each composed and checked before the first one starts."""
    whole = compose_config(_without_sweeps(overrides), extra=extra, hydra=True)
    sweeper = whole.hydra.sweeper
    if "submitit" in str(whole.hydra.launcher._target_) and whole.devices == "auto":
        raise ConfigError("this launcher starts one task per process and must know how many: give devices=N")
    if not str(sweeper._target_).endswith("BasicSweeper"):
        checked(compose_config(_without_sweeps(overrides), extra=extra))
        return []
    parameters = [f"{key}={value}" for key, value in (sweeper.params or {}).items()]
    parsed = OverridesParser.create().parse_overrides([*parameters, *overrides])
    jobs = BasicSweeper.split_arguments(parsed, None)[0]
    for one in jobs:
        try:
            config = checked(compose_config([text for text in one if not text.startswith("hydra.")], extra=extra))
            config["devices"] = resolve_devices(config)
            check_run(config)
        except PipepartError as error:
            raise type(error)(f"in the run {' '.join(map(redacted_override, one))}: {error}") from error
    return jobs


def _without_sweeps(overrides: Sequence[str]) -> list[str]:
    """The first value of everything that is swept over, to see what the rest of the configuration says."""
    found = []
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        if override.is_sweep_override():
            first = next(iter(override.sweep_string_iterator()))
            found.append(f"{override.get_key_element()}={first}")
        else:
            found.append(str(override.input_line))
    return found


def job(config: DictConfig) -> dict[str, Any]:
    """One run of a sweep, in the process of the sweep or in a job of a queue. A failure is part of the result."""
    settings = HydraConfig.get()
    folder = Path(settings.runtime.output_dir)
    said = list(settings.overrides.task)
    here = Path.cwd()
    config.output = str(folder.relative_to(here) if folder.is_relative_to(here) else folder)
    _redact_file(Path(settings.sweep.dir) / "multirun.yaml")
    try:
        plain = checked(config)
        if already_started():  # a task of a queue: the other ranks run this function, too
            plain["devices"], plain["launcher"]["nodes"] = join_started()
            check_run(plain)
            if os.environ["RANK"] == "0":
                prepare_folder(plain, said)
            failure = run_as_task(plain, folder.absolute())
            return read_result(folder) if failure is None else {"folder": str(folder), "error": failure}
        plain["devices"] = resolve_devices(plain)
        check_run(plain)
        print(f"\n{bold(f'run {settings.job.num}')}  {' '.join(map(redacted_override, said))}", flush=True)
        return run(plain, said)
    except PipepartError as error:
        print(f"pipepart train: {error}", flush=True)
        return {"folder": str(folder), "error": str(error)}


def _redact_file(path: Path) -> None:
    """Hydra's own copy of the configuration of a sweep, without secrets."""
    if path.is_file():
        plain = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
        clean = redacted(plain)
        for key in ("overrides",):
            hydra_part = clean.get("hydra", {}) if isinstance(clean, dict) else {}
            if isinstance(hydra_part.get(key), dict):
                hydra_part[key] = {
                    name: [redacted_override(str(t)) for t in texts] for name, texts in hydra_part[key].items()
                }
        path.write_text(OmegaConf.to_yaml(OmegaConf.create(clean)))


def summary(results: Sequence[tuple[Sequence[str], dict[str, Any]]], folder: Path) -> str:
    """A table of the runs, what was different about them first; written to summary.csv, too."""
    from pipepart.planning import format_seconds

    pairs = [dict(text.partition("=")[::2] for text in texts) for texts, _ in results]
    keys = list(dict.fromkeys(key for pair in pairs for key in pair))
    varied = [key for key in keys if len({pair.get(key) for pair in pairs}) > 1]
    metrics = list(dict.fromkeys(key for _, result in results for key in result.get("metrics", {})))
    metrics = [key for key in metrics if key.count("/") < 2 and not key.endswith(("_step", "_epoch"))]
    head = ["run", *varied, *metrics, "step", "predicted", "samples/s", "outcome"]
    rows = []
    for number, (pair, (_, result)) in enumerate(zip(pairs, results)):
        values = result.get("metrics", {})
        rows.append(
            [
                str(number),
                *(pair.get(key, "-") for key in varied),
                *(f"{values[key]:.4g}" if key in values else "-" for key in metrics),
                format_seconds(result["measured_step"]) if "measured_step" in result else "-",
                format_seconds(result["predicted_step"]) if "predicted_step" in result else "-",
                f"{result['samples_per_second']:.0f}" if "samples_per_second" in result else "-",
                "failed: " + result["error"].splitlines()[0][:60] if "error" in result else "ok",
            ]
        )
    with open(folder / "summary.csv", "w", newline="") as file:
        csv.writer(file).writerows([head, *rows])
    return table([head, *rows], left=1 + len(varied)) + f"\n\n{bold('summary')}  {shown(folder / 'summary.csv')}"
