"""`pipepart plan` and `pipepart verify`: the plan of a recipe or of any module, and its comparison with one process.

Neither of them trains. `plan` starts no process.
"""

from __future__ import annotations

import importlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from pipepart.build import Example, Job, Recorded, Step, record_example
from pipepart.cli.config import checked, compose_config
from pipepart.cli.console import bold, quiet_libraries, shown
from pipepart.cli.processes import refuse_inside_job, start_ranks
from pipepart.cli.train import SHORT, ready, resolve_devices
from pipepart.cost.cluster import Cluster, cluster_from
from pipepart.errors import ConfigError
from pipepart.lightning.strategy_options import StrategyOptions
from pipepart.options import Options
from pipepart.pipeline import Pipeline
from pipepart.planning import Plan
from pipepart.planning.entry import Target, layout_of, plan_for
from pipepart.planning.sync_prices import describe_sync, sync_prices
from pipepart.recording import Recording, record
from pipepart.runtime import Mesh, fit_mesh

__all__ = ["plan", "verify", "verify_here"]

_HERE = torch.device("cpu")
_DTYPES = {"bf16": "bfloat16", "16": "float16", "64": "float64"}


def plan(
    words: Sequence[str],
    extra: Path | None = None,
    as_json: bool = False,
    output: Path | None = None,
    target: Literal["megatron", "torchtitan", "torch"] | None = None,
    snap: bool = False,
) -> int:
    """Plan a recipe or a `module:callable`; print the plan and write it to `output`.

    It is printed as a table, as JSON, or in the form of another library (``target``, with notes on standard error).
    """
    if as_json and target is not None:
        raise ConfigError("--json and --export both say how to print the plan; use one of them")
    if snap and target is None:
        raise ConfigError("--snap moves cuts for --export; use both, or neither")
    quiet_libraries()
    named, overrides = _divided(words)
    config = checked(compose_config(overrides, "plan", extra))
    options = StrategyOptions.among({**config["strategy"], "plan": None})  # this command makes one
    cluster = None if config["cluster"].get("measured") else cluster_from(config["cluster"])
    found, notes, prices = _made(config, options, cluster, named)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        found.save(output)
    if as_json:
        print(found.to_json())
        return 0
    if target is not None:
        exported = found.export(target, snap=snap)
        print(exported.text)
        for note in exported.notes:
            print(f"note: {note}", file=sys.stderr)
        return 0
    title = named or f"recipe {config['name']}"
    print(f"pipepart plan  {title} for {'this machine' if cluster is None else cluster.name}\n\n{found.describe()}")
    for note in notes:
        print(f"note       {note}")
    if prices:
        print(f"\n{prices}")
    if output is not None:
        print(f"\nplan  {shown(output)}")
    return 0


def _divided(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """The `module:callable` among the words of a command line, and the overrides."""
    named = [word for word in words if ":" in word and "=" not in word]
    if len(named) > 1:
        raise ConfigError(f"one module:callable at a time, got {' and '.join(named)}")
    return named[0] if named else None, [word for word in words if word not in named]


def _devices(config: dict[str, Any], cluster: Cluster | None) -> int:
    stages, replicas = config["strategy"]["stages"], config["strategy"]["replicas"]
    fixed = isinstance(stages, int) and isinstance(replicas, int)
    if cluster is not None and config["devices"] == "auto" and not fixed:
        return cluster.size
    return resolve_devices(config) * int(config["launcher"]["nodes"])


def _made(
    config: dict[str, Any], options: Options, cluster: Cluster | None, named: str | None
) -> tuple[Plan, Sequence[str], str]:
    """The plan, the notes of the recorded step, and the prices of the modes of replicas."""
    devices = _devices(config, cluster)
    mesh = fit_mesh(devices, options.stages, options.replicas)  # refuses impossible meshes
    fixed = replace(options, stages=mesh.stages, replicas=mesh.replicas)
    step = _recipe_step(config, fixed, mesh) if named is None else _callable(named, fixed, mesh)
    precision = str(config["trainer"]["precision"])
    target = Target(
        cluster,
        devices,
        batch_size=step.batch_size,
        dtype=next((name for key, name in _DTYPES.items() if precision.startswith(key)), None),
        each_replica=True,  # every replica has a loader of its own
    )
    made = plan_for(step.recording, step.args, step.kwargs, options, target)
    prices = sync_prices(made, layout_of(made, options, target), target.optimizer_factor)
    return made, step.recording.notes, describe_sync(prices, made.memory_limit)


@dataclass(frozen=True)
class _Step:
    recording: Recording
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    batch_size: int
    """Samples of the whole batch; the arguments are one micro-batch of it."""


def _recipe_step(config: dict[str, Any], options: Options, mesh: Mesh) -> _Step:
    import lightning as L

    from pipepart.cli.fit import build_recipe
    from pipepart.lightning.effects import record_with_effects

    L.seed_everything(int(config["seed"]), verbose=False)
    module, data = build_recipe(config)
    module.prepare_data()
    module.configure_model()
    data.prepare_data()
    data.setup("fit")
    batch = next(iter(data.train_dataloader()), None)
    if batch is None:
        raise ConfigError(
            "data: the training loader gives no batch, and planning needs one to know the shapes. Use more data or a smaller "
            "batch."
        )

    def record_as_in_a_run(found: Example) -> Recorded:
        recording, *_ = record_with_effects(
            module, "training_step", found.batch, batching=found.batching, others=found.others
        )
        return Recorded(recording)

    return _step(Job(module, options, mesh, None, _HERE), record_as_in_a_run, batch)


def _made_by(name: str) -> tuple[nn.Module, tuple[Any, ...]]:
    """The module and the arguments of one batch, from the callable that the command line names."""
    path, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        function = getattr(importlib.import_module(path), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{name}: {error}. Expected package.module:function") from error
    made = function()
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
        raise ConfigError(f"{name} returned {type(made).__name__}; expected (module, tuple of example arguments)")
    module, arguments = made
    return module, tuple(arguments) if isinstance(arguments, (tuple, list)) else (arguments,)


def _callable(name: str, options: Options, mesh: Mesh) -> _Step:
    module, given = _made_by(name)

    def recorded(found: Example) -> Recorded:
        return Recorded(record(module, *found.batch, batching=found.batching, others=found.others))

    return _step(Job(module, options, mesh, None, _HERE, call=True), recorded, (given, {}))


def _step(job: Job, how: Callable[[Example], Recorded], batch: Any) -> _Step:
    example, recorded = record_example(job, Step("step", how, mode=job.root.train), batch)
    return _Step(recorded.recording, *job.arguments(example.batch), example.sizes.batch_size)


def verify(words: Sequence[str], extra: Path | None = None) -> int:
    """Compare one process with the pipeline, for a recipe or a `module:callable`, and print the table."""
    refuse_inside_job("pipepart verify")
    quiet_libraries()
    named, overrides = _divided(words)
    short = [*SHORT, "strategy.verify=true", "trainer.max_steps=0"]
    config = checked(compose_config([*overrides, *short], extra=extra))
    if int(config["launcher"]["nodes"]) > 1:
        raise ConfigError("pipepart verify runs on one machine: use strategy.verify=true in a run on several")
    ready(config)
    title = named or f"recipe {config['name']}"
    print(f"{bold('pipepart verify')}  {title}, {config['devices']} processes", flush=True)
    if named:
        _made_by(named)  # refuses a wrong name before any process is started
    folder = Path(tempfile.mkdtemp(prefix="pipepart-verify-"))
    start_ranks(config, folder, named)
    shutil.rmtree(folder, ignore_errors=True)  # kept if it failed, for the tracebacks
    return 0


def verify_here(config: dict[str, Any], named: str) -> None:
    """Run this process as one rank of `pipepart verify module:callable`."""
    module, arguments = _made_by(named)
    options = {name: config["strategy"][name] for name in Options.names() if name != "plan"}
    pipe = Pipeline(module, arguments, **options)
    if os.environ.get("RANK", "0") == "0":
        print(pipe.plan.describe(), flush=True)
