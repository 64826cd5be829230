"""`launcher=ray`: the processes of a run are workers of Ray Train, which starts, places and watches them.

A worker that fails ends the others. With `launcher.failures` Ray starts all of them again, and they go on from the last
checkpoint of the run.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

from pipepart.cli.libraries import load_libraries
from pipepart.cli.processes import first_reason, leave_reason
from pipepart.cli.restarts import go_on_hint, last_checkpoint, written
from pipepart.errors import ConfigError, PipelineError
from pipepart.secrets import clean_output, redacted

__all__ = ["check_ray", "start_workers"]

_WAIT = "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"


def check_ray(config: dict[str, Any]) -> None:
    """Refuse a run under Ray where Ray is missing."""
    if importlib.util.find_spec("ray") is None or importlib.util.find_spec("pyarrow") is None:
        raise ConfigError('launcher=ray needs Ray Train: pip install "pipepart[ray]"')


def start_workers(config: dict[str, Any], folder: Path) -> None:
    """Run a configuration on workers of Ray and wait for them; raise the first cause if they fail."""
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    launcher, logs = config["launcher"], folder / "logs"
    workers = int(config["devices"]) * int(launcher["nodes"])
    os.environ.setdefault(_WAIT, str(launcher["wait"]))
    started = not ray.is_initialized()
    if started:
        _connect(launcher["address"], workers)
    _check_room(ray.cluster_resources(), workers, launcher["address"])
    trainer = TorchTrainer(
        _work,
        train_loop_config={
            "config": config, "folder": str(folder), "from": os.getcwd(), "before": written(last_checkpoint(config, folder)),
        },
        scaling_config=ScalingConfig(num_workers=workers, use_gpu=_wants_gpu(config, ray.cluster_resources())),
        run_config=RunConfig(
            name="workers", storage_path=str(folder / "ray"), failure_config=FailureConfig(int(launcher["failures"]))
        ),
    )  # fmt: skip
    try:
        trainer.fit()
    except KeyboardInterrupt:
        hint = go_on_hint(config, folder)
        raise PipelineError(f"stopped by SIGINT; all workers have ended.{hint}") from None
    except Exception as error:
        raise PipelineError(_cause(error, logs)) from None
    finally:
        if started:
            ray.shutdown()


def _connect(address: str | None, workers: int) -> None:
    """Connect with the cluster at an address, or start one on this machine, with a place for each worker."""
    import ray

    try:
        if address or os.environ.get("RAY_ADDRESS"):
            ray.init(address=address)
        else:
            ray.init(num_cpus=max(workers, os.cpu_count() or 1), include_dashboard=False)
    except (ConnectionError, ValueError, RuntimeError) as error:
        where = f"at launcher.address={address}" if address else "(RAY_ADDRESS)"
        raise ConfigError(f"no cluster of Ray answers {where}: {str(error).splitlines()[0]}") from error


def _check_room(resources: dict[str, float], workers: int, address: str | None) -> None:
    """Say that workers will have to wait. A cluster may still grow, so that is no error."""
    if resources.get("CPU", 0.0) < workers:
        print(
            f"pipepart train: {workers} workers need a CPU each, and the cluster of Ray has {resources.get('CPU', 0):.0f}. "
            "The run begins when it has grown.",
            flush=True,
        )


def _wants_gpu(config: dict[str, Any], resources: dict[str, float]) -> bool:
    kind = config["trainer"]["accelerator"]
    return resources.get("GPU", 0.0) > 0 if kind == "auto" else kind != "cpu"


def _work(given: dict[str, Any]) -> None:
    """Run as one worker. After a failure the workers run again, and go on from the last checkpoint of this run."""
    import ray.train
    from ray.train.collective import broadcast_from_rank_zero

    config, folder = dict(given["config"]), Path(given["folder"])
    context = ray.train.get_context()
    rank, logs = context.get_world_rank(), folder / "logs"
    redacted(config)  # from here on, its secrets are hidden
    if os.path.isdir(given["from"]):
        os.chdir(given["from"])
    (logs / f"failure-rank{rank}.json").unlink(missing_ok=True)
    config["devices"] = context.get_local_world_size()
    config["launcher"] = {**config["launcher"], "nodes": 1}
    last = last_checkpoint(config, folder)
    if broadcast_from_rank_zero(written(last) not in (None, given["before"])):
        config["resume"] = str(last)
    with clean_output():
        try:
            load_libraries()
            from pipepart.cli.fit import fit

            fit(config, folder)
        except Exception as error:
            leave_reason(error, rank, logs)
            raise


def _cause(error: Exception, logs: Path) -> str:
    """The reason that the first worker has left; without one, what Ray says."""
    reason = first_reason(logs)
    if reason is not None:
        return reason
    failures = getattr(error, "worker_failures", None) or {}
    for rank, failure in sorted(failures.items()):
        return f"rank {rank} was lost, and Ray has ended the others: {str(failure).strip().splitlines()[0]}"
    return f"Ray has ended the run: {str(error).strip().splitlines()[0]}"
