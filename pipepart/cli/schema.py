"""What a configuration may hold: dataclasses that Hydra checks every file and every override against.

The sections that are handed to a class (`strategy`, `trainer`) have the signature of that class as their schema, so that
there is one truth; what is built by a `_target_` is checked against its signature too (`pipepart.cli.targets`).
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

__all__ = [
    "LauncherConfig",
    "StrategyConfig",
    "TrainConfig",
    "TrainerConfig",
    "register_schemas",
    "schema_of",
]


def schema_of(name: str, function: Callable[..., Any], leave_out: Collection[str] = ()) -> type:
    """A dataclass with the parameters of a function: their names, defaults, and those of their types YAML can hold."""
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
    """The part of a type that is made of numbers, strings and None; Any if it may be something else, too."""
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
    "accelerator",
    "parallel_devices",
    "cluster_environment",
    "checkpoint_io",
    "precision_plugin",
    "example_batch",
)
StrategyConfig = schema_of("StrategyConfig", PipelineStrategy.__init__, leave_out=_LIGHTNINGS_OWN)
"""The arguments of `PipelineStrategy`."""

_SET_ELSEWHERE = ("strategy", "devices", "num_nodes", "logger", "callbacks", "plugins", "default_root_dir")
TrainerConfig = schema_of("TrainerConfig", L.Trainer.__init__, leave_out=_SET_ELSEWHERE)
"""The arguments of Lightning's `Trainer`, without those that other sections decide."""


@dataclass
class LauncherConfig:
    """How the processes of a run are started. Under torchrun or SLURM they are there already, and this is not used."""

    nodes: int = 1
    """Machines; each starts `devices` processes."""
    address: str | None = None
    """Several machines: `host:port` of one of them, the same in the command on each."""
    wait: int = 300
    """Seconds to wait for the other machines."""


@dataclass
class TrainConfig:
    """Everything that a run is made of."""

    name: str = "???"
    """The title of the run: by default the name of the recipe."""
    seed: int = 1
    devices: int | str = "auto"
    """Processes per machine. auto: stages x replicas where they are given, else 2."""
    output: str = "???"
    resume: str | None = None
    """A checkpoint to go on from (read with weights_only=True: nothing in it is ever run)."""
    allow: list[str] = field(default_factory=list)
    """Packages of yours that `_target_` may name."""
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
    """What to plan for (`pipepart plan`); training plans for the machine it runs on."""


def register_schemas() -> None:
    """Make the schema known to Hydra, for the defaults list of train.yaml."""
    ConfigStore.instance().store("train_schema", TrainConfig)
