"""Composing the configuration: Hydra's groups and overrides, from the conf folder of the project or of the wheel."""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    InterpolationKeyError,
    MissingMandatoryValue,
    OmegaConfBaseException,
    ValidationError,
)

from pipepart.cli.groups import conf_folder, group_options, groups
from pipepart.cli.libraries import load_libraries
from pipepart.cli.targets import check_allow, check_targets, locate
from pipepart.errors import ConfigError, PipepartError, did_you_mean
from pipepart.files import load_yaml
from pipepart.secrets import clean, is_secret, redacted, redacted_override
from pipepart.values import check_number, fits, shortened

__all__ = [
    "allow_of",
    "checked",
    "compose_config",
    "explaining",
    "initialized",
    "is_sweep",
    "parse",
    "prepared",
    "written",
]

_GIVEN_LATER = {"model": ("optimizer", "scheduler"), "optimizer": ("params",), "scheduler": ("optimizer",)}
"""Arguments that the command line adds when it builds a section."""


def parse(overrides: Sequence[str]) -> list[Override]:
    """The overrides of a command line. Their secrets are hidden from here on."""
    shown = " ".join(map(redacted_override, overrides))
    try:
        return OverridesParser.create().parse_overrides(list(overrides))
    except (HydraException, ValueError, RecursionError) as error:
        reason = clean(" ".join(str(error).split()) or shown)
        raise ConfigError(f"cannot read the overrides: {reason[:300]}. Expected key=value") from error


def _check_groups(overrides: Sequence[str], extra: Path | None, name: str) -> None:
    """Refuse unknown options of groups, and groups that a command does not have, before Hydra does."""
    known = groups(extra)
    for override in parse(overrides):
        group = override.key_or_group.split("@")[0]
        if group not in known or override.is_delete():
            continue
        if group == "cluster" and name == "train":
            raise ConfigError("cluster is for `pipepart plan`: training uses the machine it runs on, and measures it")
        values = list(override.sweep_string_iterator()) if override.is_sweep_override() else [override.value()]
        options = group_options(group, extra)
        for value in values:
            if isinstance(value, str) and value not in (*options, "null"):
                raise ConfigError(f"{group}={value}: there is no such {group}; {did_you_mean(value, options)}")


def _cluster_file(overrides: Sequence[str]) -> tuple[list[str], dict[str, Any] | None]:
    """Take ``cluster=path/to/file.yaml`` out of the overrides; return the others, and what the file says."""
    paths = {
        str(override.input_line): override.value()
        for override in parse(overrides)
        if override.key_or_group == "cluster" and str(override.value()).endswith((".yaml", ".yml"))
    }
    rest = [text for text in overrides if text not in paths]
    if not paths:
        return rest, None
    file = load_yaml(str(list(paths.values())[-1]), ConfigError)
    return rest, dict(file.entries())


def prepared(overrides: Sequence[str], extra: Path | None = None) -> list[str]:
    """Overrides for Hydra: with the user's own folder, and with `~group` for `group=null`."""
    known = groups(extra)
    place = "" if extra is None else str(extra.resolve()).replace("\\", "\\\\").replace("'", "\\'")
    return [
        *([f"hydra.searchpath=['file://{place}']"] if place else []),
        *(f"~{text[:-5]}" if text.endswith("=null") and text[:-5] in known else text for text in overrides),
    ]


@contextmanager
def explaining(extra: Path | None = None, *kinds: type[Exception]) -> Iterator[None]:
    """Turn errors of Hydra and OmegaConf, and of `kinds`, into a `ConfigError`."""
    caught: tuple[type[Exception], ...] = (HydraException, OmegaConfBaseException, *kinds)
    try:
        yield
    except PipepartError:
        raise
    except caught as error:
        raise _explained(error, groups(extra)) from error


@contextmanager
def initialized(extra: Path | None = None) -> Iterator[None]:
    """Hydra with the conf folder and the schema."""
    load_libraries()
    from pipepart.cli.schema import register_schemas  # needs Lightning

    register_schemas()
    if not OmegaConf.has_resolver("now"):  # Hydra registers its own only inside its main function
        OmegaConf.register_new_resolver("now", lambda pattern: time.strftime(pattern), use_cache=True)
    if not OmegaConf.has_resolver("gpus"):
        OmegaConf.register_new_resolver("gpus", _gpus)
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(conf_folder()), job_name="pipepart", version_base="1.3"):
        yield
    GlobalHydra.instance().clear()


def _gpus(accelerator: str, devices: int) -> int | None:
    """The GPUs that a queue must give to a run on each machine: one for each process, and none for the CPU."""
    return None if accelerator in ("cpu", "auto") else devices


def compose_config(
    overrides: Sequence[str],
    name: str = "train",
    extra: Path | None = None,
    hydra: bool = False,
    trusted: Sequence[str] | None = None,
) -> DictConfig:
    """The configuration with the overrides, with all references resolved.

    `hydra=True` keeps Hydra's own section (launcher, sweeper, choices of groups), unresolved. `trusted` are the overrides
    of the command line, if others come from a configuration file: only the command line can allow packages.
    """
    overrides, cluster = _cluster_file(overrides) if name == "plan" else (list(overrides), None)
    _check_groups(overrides, extra, name)
    allow = allow_of(overrides if trusted is None else trusted)
    with initialized(), explaining(extra, Exception):
        config = compose(name, overrides=prepared(overrides, extra), return_hydra_config=hydra)
        if cluster is not None:
            config.cluster = cluster
        if not hydra:
            OmegaConf.resolve(config)
            missing = sorted(OmegaConf.missing_keys(config))
            if missing:
                raise ConfigError(f"{missing[0]} has no value: give one with {missing[0]}=...")
            check_allow(config.allow, allow)
    return config


def allow_of(overrides: Sequence[str]) -> list[str]:
    """The packages that a command line allows."""
    found: Any = []
    for override in parse(overrides):
        if override.key_or_group == "allow":
            found = override.value()
    if not isinstance(found, list) or not all(isinstance(name, str) and "$" not in name for name in found):
        raise ConfigError(f"allow must be a list of names of packages, such as allow=[my_package], got {found}")
    return list(found)


def is_sweep(overrides: Sequence[str], extra: Path | None = None) -> bool:
    """Whether a choice among the overrides (sweep=...) asks for several runs."""
    if not any(text.lstrip("+").startswith(("sweep=", "hydra.mode=")) for text in overrides):
        return False
    found = OmegaConf.select(compose_config(overrides, extra=extra, hydra=True), "hydra.mode")
    return found is not None and found.name == "MULTIRUN"


def checked(config: DictConfig) -> dict[str, Any]:
    """The configuration as plain values, after all checks that need no built object."""
    from pipepart.cli.schema import RANGES

    with explaining():  # values of interpolations have types, too
        plain: Any = OmegaConf.to_container(config, resolve=True)
    redacted(plain)  # from here on, the values of secret names are hidden everywhere
    for name in ("name", "output"):
        if clean(str(plain[name])) != str(plain[name]):
            raise ConfigError(f"{name} contains a secret, and would be written to files: choose another {name}")
    for section in ("model", "data"):
        if not isinstance(plain.get(section), dict) or "_target_" not in plain[section]:
            raise ConfigError(
                f"{section} is empty: choose a recipe (pipepart recipes lists them), or give {section}._target_"
            )
    for section in ("optimizer", "scheduler"):
        if plain.get(section) and (not isinstance(plain[section], dict) or "_target_" not in plain[section]):
            raise ConfigError(f"{section} must be a mapping with a _target_, got {shortened(redacted(plain[section]))}")
    if not fits(plain.get("allow") or [], list[str]):
        raise ConfigError(f"allow must be a list of names of packages, got {shortened(plain['allow'])}")
    for path, value in _numbers(plain):
        check_number(path, value, RANGES.get(path))
    check_targets(plain, _GIVEN_LATER)
    if plain.get("cluster") is None:  # only planning has one
        plain.pop("cluster", None)
    return plain


def _numbers(node: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """All numbers of a configuration with their keys."""
    if isinstance(node, dict):
        for key, inner in node.items():
            yield from _numbers(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(node, list):
        for index, inner in enumerate(node):
            yield from _numbers(inner, f"{path}[{index}]")
    elif isinstance(node, (int, float)) and not isinstance(node, bool):
        yield path, node


def written(plain: dict[str, Any]) -> str:
    """The configuration as YAML, without secrets."""
    return OmegaConf.to_yaml(OmegaConf.create(redacted(plain)))


# ---- errors of Hydra and OmegaConf as one sentence with the nearest right word


def _explained(error: BaseException, known_groups: Sequence[str]) -> ConfigError:
    """The error for a user: the key, the expected value and the remedy."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file is not None:
        group, _, option = str(error.missing_cfg_file).partition("/")
        if option and error.options:
            if "submitit" in option:
                return ConfigError('this launcher needs hydra-submitit-launcher: pip install "pipepart[slurm]"')
            return ConfigError(f"{group}={option}: there is no such {group}; {did_you_mean(option, error.options)}")
        if not option:
            return ConfigError(f"there is no configuration {group!r}; --help lists the groups and their options")
    inner: BaseException | None = error
    while inner is not None and not isinstance(inner, OmegaConfBaseException):
        inner = inner.__cause__ or inner.__context__
    if isinstance(inner, InterpolationKeyError):
        return ConfigError(f"{inner.full_key}: {inner.msg}")
    if isinstance(inner, MissingMandatoryValue):
        return ConfigError(f"{inner.full_key} has no value: give one with {inner.full_key}=...")
    if isinstance(inner, (ConfigAttributeError, ConfigKeyError)) and inner.key is not None:
        return ConfigError(_unknown_key(inner, known_groups))
    if isinstance(inner, ValidationError) and inner.full_key:
        kind = "" if is_secret(inner.full_key) else str(inner.msg or inner).split("\n")[0].replace("$", "")
        return ConfigError(f"{inner.full_key}: wrong type. {clean(kind)}".rstrip())
    text = " ".join(str(error).split()) or type(error).__name__
    return ConfigError(clean(text))


def _unknown_key(error: OmegaConfBaseException, known_groups: Sequence[str]) -> str:
    full, key, parent = str(error.full_key or error.key), str(error.key), error.parent_node
    known = [str(name) for name in parent] if isinstance(parent, (DictConfig, dict)) else []
    above = full.rpartition(".")[0]
    if isinstance(parent, (DictConfig, ListConfig)) and not above:
        known += known_groups
    accepted = _accepted(parent)
    if key in accepted:
        return f"{full} is not in the configuration, but {parent['_target_']} takes it: write +{full}=..."
    named = {name for name in [*known, *accepted] if not name.startswith("_")} - {"hydra", "cluster", "self"}
    return f"{full}: there is no key {key!r}{f' in {above}' if above else ''}; {did_you_mean(key, named)}"


def _accepted(parent: Any) -> list[str]:
    """The parameters of the class that a `_target_` names."""
    if not isinstance(parent, DictConfig) or "_target_" not in parent:
        return []
    try:
        return list(inspect.signature(locate(parent["_target_"])).parameters)
    except (ConfigError, ValueError):
        return []
