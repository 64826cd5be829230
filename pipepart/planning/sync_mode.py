"""The mode in which replicas are kept in step: the option `sync`, read once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args, get_type_hints

from pipepart.errors import ConfigError, did_you_mean
from pipepart.values import shortened

__all__ = ["SyncMode", "SyncName", "SyncOption"]

SyncName = Literal["mean", "sharded", "fsdp", "master", "local", "ring", "auto"]
"""The names of the modes."""

SyncOption = SyncName | Mapping[str, Any]
"""The name of a mode, or a mapping with ``mode`` and the settings of the mode."""

_MODES_OF: Mapping[str, tuple[str, ...]] = {
    "compress": ("mean", "sharded", "fsdp", "master"),
    "gather": ("fsdp",),
    "every": ("local",),
    "outer": ("local",),
    "outer_lr": ("local",),
    "outer_momentum": ("local",),
    "staleness": ("ring",),
}
"""The modes that have each setting."""


@dataclass(frozen=True, kw_only=True)
class SyncMode:
    """A mode with its settings."""

    mode: SyncName = "mean"
    """``mean``: every replica gets the mean of the gradients and makes the whole update. ``sharded``: every replica updates
    its share of the parameters of a stage, and sends it to the others. ``fsdp``: every replica keeps and updates its share,
    and borrows the other parameters while it works. ``master``: one replica updates all parameters.
    ``local``: every replica makes its own updates with its own gradients, and after each ``every`` of them replicas
    average their parameters. ``ring``: every replica makes its own updates, and adds them to a token with the newest
    parameters, which goes around. ``auto``: the plan chooses among ``mean``, with or without groups, ``sharded`` and
    ``fsdp``."""
    compress: Literal["bf16", "fp16"] | None = None
    """The format in which gradients travel between replicas; None: their own."""
    gather: Literal["step", "microbatch", "auto"] = "auto"
    """With ``fsdp``: how often parameters of other replicas come in a step. ``step``: once, and they stay until their last use;
    ``microbatch``: for each run of actions of one chunk, so that at most two chunks of a stage are whole; ``auto``: ``step`` if
    it fits into the memory limit of the plan."""
    inside: int | Literal["mean"] | None = None
    """With ``mean``: the number of neighbouring replicas that add up their gradients first; None: all at once. With
    ``between``: the mode in each group of neighbouring replicas."""
    size: int | None = None
    """With ``between``: the replicas of a group."""
    between: Literal["local"] | None = None
    """The mode between groups of replicas, in the place of ``mode``."""
    every: int = 32
    """With ``local``: the updates of a round, after which replicas average their parameters."""
    outer: Literal["nesterov"] | None = None
    """With ``local``: the outer optimizer. ``nesterov``: SGD with Nesterov momentum on the difference of a round (DiLoCo);
    None: the mean itself."""
    outer_lr: float = 0.7
    """The learning rate of the outer optimizer."""
    outer_momentum: float = 0.9
    """The momentum of the outer optimizer."""
    staleness: int = 1
    """With ``ring``: the rounds of the token that the parameters of an update may be old. A round has as many updates as
    there are replicas."""

    @staticmethod
    def of(option: Any) -> SyncMode:
        """Read the option. A `ConfigError` names what is wrong."""
        if isinstance(option, str):
            option = {"mode": option}
        if not isinstance(option, Mapping):
            raise ConfigError(
                f"sync={shortened(option)}: expected the name of a mode ({_listed('mode')}), or a mapping"
            )
        known = [field.name for field in fields(SyncMode)]
        for name in option:
            if name not in known:
                raise ConfigError(f"sync.{shortened(name)} is not known: {did_you_mean(str(name), known)}")
        if option.get("between") is not None:
            option = _between(option)
        if "mode" not in option:
            raise ConfigError(
                f"sync={shortened(dict(option))} names no mode: expected one of {_listed('mode')} under 'mode'"
            )
        for name, value in option.items():
            _check_value(name, value)
        _check_levels(option)
        for name, value in option.items():
            modes = _MODES_OF.get(name, (option["mode"],))
            if name == "compress" and option.get("between") is not None:
                continue  # of the level inside
            if value is not None and option["mode"] not in modes:
                raise ConfigError(
                    f"sync.{name} is a setting of the mode{'s' if len(modes) > 1 else ''} "
                    f"{', '.join(map(repr, modes))}, got mode={shortened(option['mode'])}"
                )
        if option.get("outer") is None and {"outer_lr", "outer_momentum"} & {
            n for n, v in option.items() if v is not None
        }:
            raise ConfigError(
                "sync.outer_lr and sync.outer_momentum need an outer optimizer: set sync.outer='nesterov'"
            )
        return SyncMode(**{name: value for name, value in option.items() if value is not None})

    def check_replicas(self, replicas: Any) -> None:
        """Refuse a number of replicas that cannot be divided into groups of `inside`. ``"auto"`` is not checked."""
        name, size = ("size", self.size) if self.size is not None else ("inside", self.inside)
        if isinstance(size, int) and isinstance(replicas, int) and replicas > 1 and replicas % size:
            raise ConfigError(
                f"sync.{name}={size} does not divide {replicas} replicas into equal groups. Use a number of replicas that is a "
                f"multiple of {size}, or another number."
            )

    @property
    def apart(self) -> bool:
        """Whether replicas make updates of their own, so that their parameters differ between exchanges."""
        return self.mode in ("local", "ring")

    def together(self, replicas: int) -> int:
        """Return the number of neighbouring replicas whose gradients are combined in each step."""
        return (self.size or 1) if self.apart else replicas

    @property
    def sums_gradients(self) -> bool:
        """Whether replicas combine gradients in each step."""
        return not self.apart or self.size is not None

    def copies(self, replicas: int) -> int:
        """Return the copies of the parameters of a stage that a rank keeps for its exchanges."""
        if replicas == 1:
            return 0
        return 3 if self.mode == "ring" else 2 if self.outer is not None else 0

    def weight_share(self, replicas: int) -> float:
        """Return the share of the parameters that one replica holds, apart from those of chunks that it works on."""
        return 1.0 / replicas if self.mode == "fsdp" and self.gather != "step" else 1.0

    def optimizer_share(self, replicas: int) -> float:
        """Return the largest share of the optimizer states of a stage that one replica holds."""
        return 1.0 / replicas if self.mode in ("sharded", "fsdp") else 1.0


def _between(option: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the option with the mode between groups as its mode."""
    _check_value("between", option["between"])
    if option.get("mode") is not None:
        raise ConfigError(
            f"sync has mode={shortened(option['mode'])} and between={shortened(option['between'])}: name the modes of two "
            "levels by 'inside' and 'between', without 'mode'"
        )
    if option.get("inside") != "mean":
        raise ConfigError(
            f"sync.inside={shortened(option.get('inside'))} is not the name of a mode inside a group: expected 'mean', with "
            "the replicas of a group in 'size'"
        )
    if type(option.get("size")) is not int:
        raise ConfigError("sync.between needs the replicas of a group in sync.size, a whole number of at least 2")
    return {**option, "mode": option["between"]}


def _check_levels(option: Mapping[str, Any]) -> None:
    """Refuse settings of two levels that do not belong together."""
    inside, two = option.get("inside"), option.get("between") is not None
    if two:
        return
    if option.get("size") is not None or inside == "mean":
        raise ConfigError(
            "sync.inside='mean' and sync.size are the level inside groups: name the mode between them in sync.between"
        )
    if inside is not None and option["mode"] != "mean":
        raise ConfigError(f"sync.inside is a setting of the mode 'mean', got mode={shortened(option['mode'])}")


def _check_value(name: str, value: Any) -> None:
    if name in ("inside", "size"):
        if value is not None and value != "mean" and (type(value) is not int or value < 2):
            raise ConfigError(f"sync.{name} must be a whole number of at least 2, or None, got {shortened(value)}")
    elif name in ("every", "staleness"):
        if value is not None and (type(value) is not int or value < 1):
            raise ConfigError(f"sync.{name} must be a whole number of at least 1, got {shortened(value)}")
    elif name in ("outer_lr", "outer_momentum"):
        number = type(value) in (int, float) and math.isfinite(value)
        if value is not None and not (number and (value > 0 if name == "outer_lr" else 0 <= value < 1)):
            limits = "above 0" if name == "outer_lr" else "from 0 to below 1"
            raise ConfigError(f"sync.{name} must be a number {limits}, got {shortened(value)}")
    elif not any(type(value) is type(word) and value == word for word in _words(name)):
        raise ConfigError(f"sync.{name}={shortened(value)} is not known: expected {_listed(name)}")


def _words(name: str) -> tuple[Any, ...]:
    """Return the values of a setting."""
    found: list[Any] = []
    for part in get_args(get_type_hints(SyncMode)[name]):
        found += get_args(part) or [None if part is type(None) else part]
    return tuple(found)


def _listed(name: str) -> str:
    return ", ".join(repr(word) for word in _words(name))
