"""The schema of a configuration: dataclasses against which Hydra checks every file and every override, and ranges.

The sections that are passed to a class (`strategy`, `trainer`) have the signature of that class as their schema. Sections
with a `_target_` are checked against its signature (`pipepart.cli.targets`).
"""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import lightning as L
from hydra.core.config_store import ConfigStore

from pipepart.lightning import PipelineStrategy
from pipepart.values import COUNT, SECONDS, Range

__all__ = ["RANGES", "StrategyConfig", "TrainerConfig", "register_schemas", "schema_of"]


def schema_of(name: str, function: Callable[..., Any], leave_out: Collection[str] = ()) -> type:
    """A dataclass with the parameters of a function: names, defaults, and the types that YAML can hold."""
    hints = typing.get_type_hints(function)
    fields: list[tuple[str, Any, Any]] = []
    for key, parameter in inspect.signature(function).parameters.items():
        if key == "self" or key in leave_out or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        plain = _plain(hints.get(key, Any))
        default = parameter.default
        if default is inspect.Parameter.empty:
            fields.append((key, Any, field(default="???")))  # OmegaConf's mark for a value that must be given
        elif isinstance(default, (list, tuple)):
            fields.append((key, Any, field(default_factory=partial(list, default))))
        else:
            fields.append((key, plain, field(default=default)))
    return dataclasses.make_dataclass(name, fields)


def _plain(annotation: Any) -> Any:
    """The part of a type that consists of numbers, strings and None; Any if there is another part."""
    if annotation in (int, float, bool, str):
        return annotation
    if typing.get_origin(annotation) is typing.Literal:
        found = {type(value) for value in typing.get_args(annotation)}
        return typing.Union[tuple(sorted(found, key=str))] if found <= {int, float, bool, str} else Any  # noqa: UP007
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        parts = []
        for part in typing.get_args(annotation):
            inner = part if part is type(None) else _plain(part)
            if typing.get_origin(part) in (list, dict, tuple) or typing.get_origin(part) in _SEQUENCES:
                return Any
            if inner is not Any:
                parts.append(inner)
        return typing.Union[tuple(parts)] if [p for p in parts if p is not type(None)] else Any  # noqa: UP007
    return Any


_SEQUENCES = tuple(
    typing.get_origin(kind) for kind in (typing.Sequence[int], typing.Iterable[int], typing.Mapping[str, int])
)

_LIGHTNINGS_OWN = (
    "accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin", "example_batch",
)  # fmt: skip
StrategyConfig = schema_of("StrategyConfig", PipelineStrategy.__init__, leave_out=_LIGHTNINGS_OWN)
"""The arguments of `PipelineStrategy`."""

_SET_ELSEWHERE = ("strategy", "devices", "num_nodes", "logger", "callbacks", "plugins", "default_root_dir")
TrainerConfig = schema_of("TrainerConfig", L.Trainer.__init__, leave_out=_SET_ELSEWHERE)
"""The arguments of Lightning's `Trainer`, without those that other sections decide."""


@dataclass
class LauncherConfig:
    """The start of the processes of a run; not used under torchrun and SLURM, which start them."""

    engine: str = "torch"
    """What starts and watches the processes: torch (its agent, on each machine) or ray (workers of Ray Train)."""
    nodes: int = 1
    """Machines; each starts `devices` processes."""
    min_nodes: int | None = None
    """Machines with which a run begins, or goes on after others were lost, until these come (back); default: all of them. Ray
    places workers itself."""
    address: str | None = None
    """Several machines: `host:port` of one of them, the same in the command on each. Ray: the address of the cluster (auto: the
    one that runs on this machine); without one, a cluster is started for the run."""
    wait: int = 300
    """Seconds to wait for the other machines, or for the workers of Ray."""
    spare_state: str | None = None
    """neighbour: each machine keeps the state of the run (weights, optimizer states, loops) in memory, its own part and that of
    the next machine, so that a failure costs at most `spare_every` steps, whatever the checkpoints on disk."""
    spare_every: int = 50
    """Optimizer steps between two states in memory."""
    lost_replica: str | None = None
    """continue: if a rank of one of several replicas on this machine fails, the other replicas go on without it, and it is
    started again and joins them, as often as `failures` allows."""
    failures: int = 0
    """Failures after which the processes are started again, from the last checkpoint of the run; -1: without a limit."""


@dataclass
class TrainConfig:
    """The configuration of a run."""

    name: str = "???"
    """The title of the run; default: the name of the recipe."""
    seed: int = 1
    devices: int | str = "auto"
    """Processes per machine; auto: stages x replicas if they are given, else 2."""
    output: str = "???"
    resume: str | None = None
    """The checkpoint (a file or a sharded folder) to resume from; it is read with weights_only=True."""
    allow: list[str] = field(default_factory=list)
    """Packages of the user that `_target_` may name; only the command line can set them."""
    model: Any = None
    data: Any = None
    optimizer: Any = None
    scheduler: Any = None
    strategy: StrategyConfig = field(default_factory=StrategyConfig)  # type: ignore[valid-type]
    trainer: TrainerConfig = field(default_factory=TrainerConfig)  # type: ignore[valid-type]
    callbacks: dict[str, Any] = field(default_factory=dict)
    logger: dict[str, Any] = field(default_factory=dict)
    launcher: LauncherConfig = field(default_factory=LauncherConfig)
    cluster: Any = None
    """The devices to plan for (`pipepart plan`); training plans for the machine it runs on."""


_NONE_OR_MORE, _ONE_OR_MORE, _NO_LIMIT = Range(0, 10**12), Range(1, 10**12), Range(-1, 10**12)
RANGES = {
    "seed": Range(0, 2**32 - 1),
    "devices": COUNT,
    "launcher.nodes": COUNT,
    "launcher.wait": SECONDS,
    "launcher.failures": _NO_LIMIT,
    "launcher.min_nodes": COUNT,
    "launcher.spare_every": COUNT,
    **dict.fromkeys(("trainer.max_steps", "trainer.max_epochs", "trainer.num_sanity_val_steps"), _NO_LIMIT),
    **dict.fromkeys(("trainer.accumulate_grad_batches", "trainer.check_val_every_n_epoch"), _ONE_OR_MORE),
    **{
        f"trainer.{name}": _NONE_OR_MORE
        for name in (
            "min_steps", "min_epochs", "limit_train_batches", "limit_val_batches", "limit_test_batches",
            "limit_predict_batches", "overfit_batches", "val_check_interval", "log_every_n_steps", "gradient_clip_val",
            "reload_dataloaders_every_n_epochs",
        )
    },
    **{f"optimizer.{name}": Range(0, 10**6) for name in ("lr", "weight_decay", "eps", "momentum")},
}  # fmt: skip
"""Ranges of numbers of the configuration by their keys; those of `strategy` are declared with its options. All other
numbers are finite."""


def register_schemas() -> None:
    """Make the schema known to Hydra, for the defaults list of train.yaml."""
    ConfigStore.instance().store("train_schema", TrainConfig)
