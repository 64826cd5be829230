"""What Hydra and OmegaConf say about a wrong configuration, as one clear sentence with the nearest right word."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hydra.errors import MissingConfigException
from omegaconf import DictConfig, ListConfig
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    InterpolationKeyError,
    MissingMandatoryValue,
    OmegaConfBaseException,
    ValidationError,
)

from pipepart.errors import ConfigError, did_you_mean

__all__ = ["explained"]


def explained(error: BaseException, groups: Sequence[str]) -> ConfigError:
    """The same error for a user: which key, what was expected, what to do."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file is not None:
        group, _, option = str(error.missing_cfg_file).partition("/")
        if option and error.options:
            return ConfigError(f"{group}={option}: there is no such {group}; {did_you_mean(option, error.options)}")
        if not option:
            return ConfigError(f"there is no configuration {group!r}")
    inner = _omegaconf(error)
    if isinstance(inner, InterpolationKeyError):
        return ConfigError(f"{inner.full_key}: {inner.msg}")
    if isinstance(inner, MissingMandatoryValue):
        return ConfigError(f"{inner.full_key} has no value: give one with {inner.full_key}=...")
    if isinstance(inner, (ConfigAttributeError, ConfigKeyError)) and inner.key is not None:
        return ConfigError(_unknown_key(inner, groups))
    if isinstance(inner, ValidationError) and inner.full_key:
        kind = str(inner.msg or inner).split("\n")[0].replace("$", "")
        return ConfigError(f"{inner.full_key}: wrong type. {kind}")
    return ConfigError(" ".join(str(error).split()))


def _omegaconf(error: BaseException | None) -> OmegaConfBaseException | None:
    while error is not None:
        if isinstance(error, OmegaConfBaseException):
            return error
        error = error.__cause__ or error.__context__
    return None


def _unknown_key(error: OmegaConfBaseException, groups: Sequence[str]) -> str:
    full, key, parent = str(error.full_key or error.key), str(error.key), error.parent_node
    known = [str(name) for name in parent] if isinstance(parent, (DictConfig, dict)) else []
    above = full.rpartition(".")[0]
    if isinstance(parent, (DictConfig, ListConfig)) and not above:
        known += [group for group in groups if group not in known]
    extra = _accepted(parent)
    if key in extra:
        return f"{full} is not in the configuration, but {parent['_target_']} takes it: write +{full}=..."
    known += [name for name in extra if name not in known and name != "self"]
    named = [name for name in known if not name.startswith("_") and name not in ("hydra", "cluster")]
    return f"{full}: there is no key {key!r}{f' in {above}' if above else ''}; {did_you_mean(key, named)}"


def _accepted(parent: Any) -> list[str]:
    """What the class of a `_target_` takes besides what the file says."""
    import inspect

    from pipepart.cli.targets import locate

    if not isinstance(parent, DictConfig) or "_target_" not in parent:
        return []
    try:
        return list(inspect.signature(locate(parent["_target_"])).parameters)
    except (ConfigError, ValueError):
        return []
