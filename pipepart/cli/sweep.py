"""`pipepart train -m`: one run for every combination, through Hydra's sweepers and launchers, and a table at the end."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf

from pipepart.cli.config import (
    allow_of,
    checked,
    compose_config,
    explaining,
    initialized,
    parse,
    prepared,
    written,
)
from pipepart.cli.console import bold, quiet_libraries, shown, table
from pipepart.cli.processes import already_started, join_started, refuse_inside_job, run_as_task
from pipepart.cli.targets import check_allow, check_hydra_section
from pipepart.cli.train import check_run, prepare_folder, read_result, ready, run
from pipepart.errors import ConfigError, PipelineError, PipepartError
from pipepart.files import may_fail
from pipepart.secrets import clean, redacted_override, write_private

__all__ = ["summary", "sweep"]


def sweep(overrides: Sequence[str], extra: Path | None = None) -> int:
    """Check all runs, then run them; one that fails does not stop the others. Returns 1 if any failed."""
    refuse_inside_job("a sweep (pipepart train -m)")
    quiet_libraries()
    first = _without_sweeps(overrides)
    compose_config(first, extra=extra, hydra=True)  # refuses unknown options of groups
    with initialized(), explaining(extra), _queue_failures():
        loader = _GatedLoader(GlobalHydra.instance().config_loader(), overrides)
        config = loader.load_configuration("train", prepared(overrides, extra), RunMode.MULTIRUN)
        sweeper = Plugins.instance().instantiate_sweeper(
            config=config,
            hydra_context=HydraContext(config_loader=loader, callbacks=_NoCallbacks()),  # type: ignore[arg-type]
            task_function=partial(job, allow=allow_of(overrides)),
        )
    plain = hasattr(sweeper, "split_arguments")  # Hydra's own; sweepers that search choose each run by earlier results
    if plain:
        count = _check_all(sweeper, overrides, extra, _is_queue(config))
        print(
            f"{bold('pipepart train -m')}  {count} runs, one after the other unless a launcher runs several", flush=True
        )
    else:
        checked(compose_config(first, extra=extra, trusted=overrides))
    with initialized(), explaining(extra), _queue_failures():
        _make_private(config)
        words = parse(prepared(overrides, extra))  # not the overrides in `config`, to which a file could add
        returned = sweeper.sweep(arguments=[str(word.input_line) for word in words if not word.is_hydra_override()])
    flat = [one for batch in returned for one in batch] if isinstance(returned, list) else []
    results = [(list(one.overrides or ()), one.return_value) for one in flat]
    if not results:  # sweepers that search keep the results for themselves
        return 0
    print("\n" + summary(results, Path(results[0][1]["folder"]).parent))
    return 1 if any("error" in result for _, result in results) else 0


class _GatedLoader:
    """Hydra's loader of configurations. Every configuration of a run passes the gate before Hydra acts on its section."""

    def __init__(self, loader: ConfigLoader, overrides: Sequence[str]) -> None:
        self.loader, self.overrides, self.hidden = loader, list(overrides), False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "loader":  # not set yet, while a task of a queue unpickles this object
            raise AttributeError(name)
        return getattr(self.loader, name)

    def load_configuration(self, config_name: str, overrides: list[str], run_mode: RunMode) -> DictConfig:
        return self._passed(self.loader.load_configuration(config_name, overrides, run_mode))

    def load_sweep_config(self, master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
        if not self.hidden:
            _hide_secrets(Path(master_config.hydra.sweep.dir) / "multirun.yaml")
            self.hidden = True
        return self._passed(self.loader.load_sweep_config(master_config, sweep_overrides))

    def _passed(self, config: DictConfig) -> DictConfig:
        """The configuration, if it sets nothing that only the package and the command line may set."""
        chosen = config.hydra.runtime.choices
        given = [override for override in parse(self.overrides) if override.is_hydra_override()]
        own = [str(override.input_line) for override in given if override.key_or_group != "hydra.searchpath"]
        for group in ("launcher", "sweep", "hydra/launcher", "hydra/sweeper"):
            option = chosen.get(group)
            if option and not any(text.startswith(f"{group}=") for text in own) and self._is_known(group, option):
                own.append(f"{group}={option}")
        plain = self.loader.load_configuration("train", own, RunMode.MULTIRUN)
        found, known = (OmegaConf.to_container(c.hydra, resolve=False) for c in (config, plain))
        _check_launcher(config)
        launcher = OmegaConf.to_container(config.hydra.launcher, resolve=True)
        check_hydra_section(found, known, launcher)  # type: ignore[arg-type]
        return config

    def _is_known(self, group: str, option: str) -> bool:
        """Whether the package or an installed plugin has an option of a group."""
        if option in self.loader.get_group_options(group):
            return True
        if group.startswith("hydra/"):
            known = ", ".join(self.loader.get_group_options(group))
            raise ConfigError(f"{group}={option}: there is no such {group}; known: {known}")
        return False  # from the user's own folder: its values are compared with the defaults


class _NoCallbacks:
    """In place of Hydra's callbacks, which a configuration could name."""

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("on_"):
            raise AttributeError(name)
        return _nothing


def _nothing(**_: Any) -> None: ...


@contextmanager
def _queue_failures() -> Iterator[None]:
    """Turn the error of submitit about a job that the queue has ended (time, memory) into a `PipelineError`."""
    try:
        yield
    except Exception as error:
        if not type(error).__module__.startswith("submitit"):
            raise
        first = next(iter(str(error).splitlines()), type(error).__name__)
        raise PipelineError(f"a job of the queue ended without a result: {first}") from error


def _is_queue(config: DictConfig) -> bool:
    """Whether the launcher gives the runs to a queue, which starts their processes."""
    return "submitit" in str(config.hydra.launcher._target_)


def _check_launcher(config: DictConfig) -> None:
    if _is_queue(config) and config.devices == "auto":
        raise ConfigError("this launcher starts one task per process and must know how many: give devices=N")


def _check_all(sweeper: Any, overrides: Sequence[str], extra: Path | None, queued: bool) -> int:
    """Compose and check all runs of a plain sweep before the first one starts; returns their number."""
    parameters = [f"{key}={value}" for key, value in (sweeper.params or {}).items()]
    runs = sweeper.split_arguments(parse([*parameters, *overrides]), None)[0]
    for one in runs:
        try:
            words = [text for text in one if not text.lstrip("+~").startswith(("hydra.", "hydra/"))]
            ready(checked(compose_config(words, extra=extra, trusted=overrides)), queued)
        except PipepartError as error:
            raise type(error)(f"in the run {' '.join(map(redacted_override, one))}: {error}") from error
    return len(runs)


def _without_sweeps(overrides: Sequence[str]) -> list[str]:
    """The overrides with the first value of each sweep, to compose the rest of the configuration."""
    return [
        f"{o.get_key_element()}={next(iter(o.sweep_string_iterator()))}" if o.is_sweep_override() else str(o.input_line)
        for o in parse(overrides)
    ]


def _make_private(config: DictConfig) -> None:
    """Make files that Hydra and submitit will write with the whole configuration readable for their owner only."""
    folder = Path(config.hydra.sweep.dir)
    folder.mkdir(parents=True, exist_ok=True)
    write_private(folder / "multirun.yaml", "")
    if _is_queue(config):
        (folder / ".submitit").mkdir(mode=0o700, exist_ok=True)


def _hide_secrets(path: Path) -> None:
    """Write Hydra's copy of the configuration of a sweep again, without secrets."""
    if path.is_file():
        plain: Any = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
        given = plain.get("hydra", {}).get("overrides", {})
        for name in given:
            given[name] = [redacted_override(str(text)) for text in given[name]]
        write_private(path, written(plain))


def job(config: DictConfig, allow: Sequence[str] = ()) -> dict[str, Any]:
    """One run of a sweep, in the process of the sweep or in a job of a queue. A failure is part of the result."""
    settings = HydraConfig.get()
    folder = Path(settings.runtime.output_dir)
    said = list(settings.overrides.task)
    config.output = os.path.relpath(folder) if folder.is_relative_to(Path.cwd()) else str(folder)
    try:
        check_allow(config.allow, allow)
        plain = checked(config)
        if already_started():  # a task of a queue: the other ranks run this function, too
            plain["devices"], plain["launcher"]["nodes"] = join_started()
            check_run(plain)
            if os.environ["RANK"] == "0":
                prepare_folder(plain, said)
            failure = run_as_task(plain, folder.absolute())
            return read_result(folder) if failure is None else {"folder": str(folder), "error": failure}
        print(f"\n{bold(f'run {settings.job.num}')}  {' '.join(map(redacted_override, said))}", flush=True)
        return run(ready(plain), said)
    except PipepartError as error:
        print(f"pipepart train: {error}", flush=True)
        return {"folder": str(folder), "error": str(error)}


def summary(results: Sequence[tuple[Sequence[str], dict[str, Any]]], folder: Path) -> str:
    """A table of the runs, with their different overrides first; it is also written to summary.csv."""
    from pipepart.planning import format_seconds  # imports torch, which takes seconds

    pairs = [dict(redacted_override(text).partition("=")[::2] for text in texts) for texts, _ in results]
    keys = list(dict.fromkeys(key for pair in pairs for key in pair))
    varied = [key for key in keys if len({pair.get(key) for pair in pairs}) > 1]
    metrics = list(dict.fromkeys(key for _, result in results for key in result.get("metrics", {})))
    metrics = [key for key in metrics if key.count("/") < 2 and not key.endswith(("_step", "_epoch"))]
    rows = [["run", *varied, *metrics, "step", "predicted", "samples/s", "outcome"]]
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
                "failed: " + clean(result["error"]).splitlines()[0][:60] if "error" in result else "ok",
            ]
        )
    with may_fail(shown(folder / "summary.csv")), open(folder / "summary.csv", "w", newline="") as file:
        csv.writer(file).writerows(rows)
    return table(rows, left=1 + len(varied)) + f"\n\n{bold('summary')}  {shown(folder / 'summary.csv')}"
