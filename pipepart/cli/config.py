"""Composing the configuration: Hydra's groups and overrides, from the conf folder of the project or of the wheel."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pipepart.cli.explain import explained
from pipepart.cli.folders import conf_folder, group_options, groups
from pipepart.cli.secrets import redacted
from pipepart.cli.targets import check_targets
from pipepart.errors import ConfigError, did_you_mean

__all__ = [
    "check_groups",
    "checked",
    "compose_config",
    "conf_folder",
    "explaining",
    "group_options",
    "groups",
    "is_sweep",
    "search_path",
    "without_nulls",
    "written",
]

_GIVEN_LATER = {"model": ("optimizer", "scheduler"), "optimizer": ("params",), "scheduler": ("optimizer",)}


def search_path(extra: Path | None) -> list[str]:
    """The override that adds a user's own folder of configuration; `recipe=mine` is found there, too."""
    return [] if extra is None else [f"hydra.searchpath=[file://{extra.resolve()}]"]


def check_groups(overrides: Sequence[str], extra: Path | None = None, name: str = "train") -> None:
    """Unknown options of groups, and groups that a command does not have, by name and before Hydra."""
    known = groups(extra)
    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
    except HydraException as error:
        raise ConfigError(f"cannot read the overrides: {' '.join(str(error).split())}. Expected key=value") from error
    for override in parsed:
        group = override.key_or_group.split("@")[0]
        if group not in known or override.is_delete():
            continue
        if group == "cluster" and name == "train":
            raise ConfigError("cluster is for `pipepart plan`: training uses the machine it runs on, and measures it")
        values = list(override.sweep_string_iterator()) if override.is_sweep_override() else [override.value()]
        options = group_options(group, extra)
        for value in values:
            if value is not None and isinstance(value, str) and value not in (*options, "null"):
                raise ConfigError(f"{group}={value}: there is no such {group}; {did_you_mean(value, options)}")


def without_nulls(overrides: Sequence[str], extra: Path | None = None) -> list[str]:
    """`group=null` as Hydra wants it: `~group`."""
    known = groups(extra)
    return [f"~{text[:-5]}" if text.endswith("=null") and text[:-5] in known else text for text in overrides]


@contextmanager
def explaining(extra: Path | None = None) -> Iterator[None]:
    """Errors of Hydra and OmegaConf inside come out as one of ours."""
    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        raise explained(error, groups(extra)) from error


def compose_config(
    overrides: Sequence[str], name: str = "train", extra: Path | None = None, hydra: bool = False
) -> DictConfig:
    """The configuration with the overrides of the command line, with all references resolved.

    `hydra=True` keeps Hydra's own section (launcher, sweeper, choices of groups), unresolved.
    """
    check_groups(overrides, extra, name)
    from pipepart.cli.schema import register_schemas  # needs Lightning, which takes seconds to import

    register_schemas()
    if not OmegaConf.has_resolver("now"):  # Hydra's own is there only inside its main function
        OmegaConf.register_new_resolver("now", lambda pattern: time.strftime(pattern), use_cache=True)
    GlobalHydra.instance().clear()
    with explaining(extra), initialize_config_dir(str(conf_folder()), version_base="1.3"):
        config = compose(
            name, overrides=[*search_path(extra), *without_nulls(overrides, extra)], return_hydra_config=hydra
        )
        if not hydra:
            OmegaConf.resolve(config)
            missing = sorted(OmegaConf.missing_keys(config))
            if missing:
                raise ConfigError(f"{missing[0]} has no value: give one with {missing[0]}=...")
    GlobalHydra.instance().clear()
    return config


def is_sweep(overrides: Sequence[str], extra: Path | None = None) -> bool:
    """Whether a choice among the overrides (sweep=...) asks for several runs."""
    if not any(text.lstrip("+").startswith(("sweep=", "hydra.mode=")) for text in overrides):
        return False
    found = OmegaConf.select(compose_config(overrides, extra=extra, hydra=True), "hydra.mode")
    return found is not None and found.name == "MULTIRUN"


def checked(config: DictConfig) -> dict[str, Any]:
    """The configuration as plain values, after checking everything that can be checked without building it."""
    plain: Any = OmegaConf.to_container(config, resolve=True)
    for section in ("model", "data"):
        if not isinstance(plain.get(section), dict) or "_target_" not in plain[section]:
            raise ConfigError(
                f"{section} is empty: choose a recipe (pipepart recipes lists them), or give {section}._target_"
            )
    check_targets(plain, _GIVEN_LATER)
    if plain.get("cluster") is None:  # only planning has one
        plain.pop("cluster", None)
    return plain


def written(plain: dict[str, Any]) -> str:
    """YAML for people and files: without secrets."""
    return OmegaConf.to_yaml(OmegaConf.create(redacted(plain)))
