"""The mode in which replicas are kept in step: the option `sync`, read once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args, get_type_hints

from pipepart.errors import ConfigError, did_you_mean
from pipepart.values import shortened

__all__ = ["SyncMode", "SyncName", "SyncOption"]

SyncName = Literal["mean", "sharded", "master"]
"""The names of the modes."""

SyncOption = SyncName | Mapping[str, Any]
"""The name of a mode, or a mapping with ``mode`` and the settings of the mode."""


@dataclass(frozen=True, kw_only=True)
class SyncMode:
    """A mode with its settings."""

    mode: SyncName = "mean"
    """``mean``: every replica gets the mean of the gradients and makes the whole update. ``sharded``: every replica updates
    its share of the parameters of a stage, and sends it to the others. ``master``: one replica updates all parameters."""
    compress: Literal["bf16", "fp16"] | None = None
    """The format in which gradients travel between replicas; None: their own."""
    inside: int | None = None
    """With ``mean``: the number of neighbouring replicas that add up their gradients first; None: all at once."""

    @staticmethod
    def of(option: Any) -> SyncMode:
        """Read the option. A `ConfigError` names what is wrong."""
        if isinstance(option, str):
            option = {"mode": option}
        if not isinstance(option, Mapping):
            raise ConfigError(
                f"sync={shortened(option)}: expected the name of a mode ({_listed('mode')}), or a mapping"
            )
        for name in option:
            known = [field.name for field in fields(SyncMode)]
            if name not in known:
                raise ConfigError(f"sync.{shortened(name)} is not known: {did_you_mean(str(name), known)}")
        if "mode" not in option:
            raise ConfigError(
                f"sync={shortened(dict(option))} names no mode: expected one of {_listed('mode')} under 'mode'"
            )
        for name, value in option.items():
            if name == "inside":
                if value is not None and (type(value) is not int or value < 2):
                    raise ConfigError(
                        f"sync.inside must be a whole number of at least 2, or None, got {shortened(value)}"
                    )
                if value is not None and option["mode"] != "mean":
                    raise ConfigError(
                        f"sync.inside is a setting of the mode 'mean', got mode={shortened(option['mode'])}"
                    )
            elif not any(type(value) is type(word) and value == word for word in _words(name)):
                raise ConfigError(f"sync.{name}={shortened(value)} is not known: expected {_listed(name)}")
        return SyncMode(**option)

    def check_replicas(self, replicas: Any) -> None:
        """Refuse a number of replicas that cannot be divided into groups of `inside`. ``"auto"`` is not checked."""
        if self.inside is not None and isinstance(replicas, int) and replicas > 1 and replicas % self.inside:
            raise ConfigError(
                f"sync.inside={self.inside} does not divide {replicas} replicas into equal groups. Use a number of replicas "
                f"that is a multiple of {self.inside}, or another number."
            )

    def optimizer_share(self, replicas: int) -> float:
        """Return the largest share of the optimizer states of a stage that one replica holds."""
        return 1.0 / replicas if self.mode == "sharded" else 1.0


def _words(name: str) -> tuple[Any, ...]:
    """Return the values of a setting."""
    found: list[Any] = []
    for part in get_args(get_type_hints(SyncMode)[name]):
        found += get_args(part) or [None if part is type(None) else part]
    return tuple(found)


def _listed(name: str) -> str:
    return ", ".join(repr(word) for word in _words(name))
