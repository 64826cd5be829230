"""The gate of the configuration: the classes that it may build, and the keys of Hydra's own section that it may set.

Configuration files come from other people, so a file must not be able to run code. A `_target_` has to name a class that an
allowed package defines (`recipes.gpt.torch.load` is not defined there). Only the command line adds packages, and only it
sets those parts of Hydra's section that run commands. Keys and types are checked before any process is started.
"""

from __future__ import annotations

import importlib
import inspect
import re
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from pipepart.errors import ConfigError, did_you_mean
from pipepart.secrets import redacted
from pipepart.values import fits, printable, shortened

__all__ = ["ALLOWED", "build", "check_allow", "check_hydra_section", "check_targets", "locate"]

ALLOWED = ("pipepart", "recipes", "torch.optim", "lightning")
"""Packages that `_target_` may name; `allow=[my_package]` on the command line adds to them."""

_OWN = ("_target_", "_partial_")
_MOVED = {
    "pipepart.strategy.": "pipepart.lightning.",
    "pipepart.report.tracking.": "pipepart.lightning.tracking.",
    "pipepart.cli.progress.": "pipepart.cli.fit.",
}
"""Old beginning of a name -> new one, for configurations that were written before."""


def check_allow(composed: Sequence[str], given: Sequence[str]) -> None:
    """Refuse packages that a configuration file allows; `given` are those of the command line."""
    if list(composed or ()) != list(given):
        names = ", ".join(map(str, composed or ()))
        raise ConfigError(
            f"allow=[{names}] is set by a configuration file, but only the command line can allow packages. If you trust "
            f"them, give allow=[{names}] on the command line, and remove it from the file"
        )


def _kinds() -> tuple[type, ...]:
    """Bases of the classes that may be built from libraries and from pipepart."""
    import lightning.pytorch as pl
    import torch
    from lightning.pytorch.loggers import Logger
    from lightning.pytorch.profilers import Profiler

    schedulers = torch.optim.lr_scheduler
    plateau = schedulers.ReduceLROnPlateau
    return (
        torch.nn.Module, pl.LightningDataModule, pl.Callback, Logger, Profiler, torch.optim.Optimizer,
        schedulers.LRScheduler, plateau,
    )  # fmt: skip


def locate(name: str, allow: Sequence[str] = (), where: str = "_target_") -> Callable[..., Any]:
    """The class of that name, if an allowed package defines it; of a package in `allow` also a function."""
    packages = (*ALLOWED, *allow)
    for old, new in _MOVED.items():
        if isinstance(name, str) and name.startswith(old):
            name = new + name.removeprefix(old)
    if not isinstance(name, str) or not any(_inside(name, package) for package in packages):
        raise ConfigError(
            f"{where} is {shortened(name)}, which lies in none of the allowed packages ({', '.join(packages)}). "
            f"If it is yours, give its package on the command line: allow=[{printable(str(name).split('.')[0])}]"
        )
    found = _import(name, where)
    home = str(getattr(found, "__module__", None) or "")
    if not callable(found) or not any(_inside(home, package) for package in packages):
        raise ConfigError(
            f"{where} is {name!r}, which is not defined in an allowed package ({home or 'no class'}); expected a class of "
            f"{', '.join(packages)}"
        )
    if any(_inside(home, package) for package in allow):
        return found
    if not inspect.isclass(found):
        raise ConfigError(
            f"{where} is {name!r}, which is not a class; only classes of {home.split('.')[0]} can be built"
        )
    if not _inside(home, "recipes") and not issubclass(found, _kinds()):
        raise ConfigError(
            f"{where} is {name!r}; expected a module, data module, callback, logger, profiler, optimizer or scheduler"
        )
    return found


def _inside(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def _import(name: str, where: str) -> Any:
    """`a.b.C` by importing the longest part that is a module. The error for a missing name lists the known names."""
    parts = name.split(".")
    if not all(part.isidentifier() and not part.startswith("_") for part in parts):
        raise ConfigError(f"{where} is {name!r}; expected package.module.Class without leading underscores")
    for count in range(len(parts), 0, -1):
        path = ".".join(parts[:count])
        try:
            found: Any = importlib.import_module(path)
        except ModuleNotFoundError as error:
            if error.name is not None and not _inside(
                path, error.name
            ):  # the module exists, but one that it imports does not
                raise ConfigError(
                    f"{where} is {name!r}, which needs the package {error.name!r}: pip install {error.name}"
                ) from error
            continue
        for part in parts[count:]:
            if not hasattr(found, part):
                known = getattr(found, "__all__", None) or [word for word in vars(found) if not word.startswith("_")]
                raise ConfigError(f"{where} is {name!r}, but there is no {part!r}: {did_you_mean(part, known)}")
            found = getattr(found, part)
        return found
    raise ConfigError(f"{where} is {name!r}, but there is no package {parts[0]!r} here")


def _targets(node: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """All mappings with a `_target_`, with their keys."""
    if isinstance(node, dict):
        if "_target_" in node:
            yield path, node
        for key, inner in node.items():
            yield from _targets(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(node, list):
        for index, inner in enumerate(node):
            yield from _targets(inner, f"{path}[{index}]")


def check_targets(config: Mapping[str, Any], later: Mapping[str, Sequence[str]] | None = None) -> None:
    """Refuse targets that cannot be built, before anything is started. `later` names arguments that are given when building."""
    allow = tuple(config.get("allow") or ())
    for path, node in _targets(dict(config)):
        function = locate(node["_target_"], allow, f"{path}._target_")
        given = {key: value for key, value in node.items() if key not in _OWN}
        _check_call(function, given, path, (later or {}).get(path, ()), partly=bool(node.get("_partial_")))


def _check_call(
    function: Callable[..., Any], given: Mapping[str, Any], path: str, filled: Sequence[str] = (), partly: bool = False
) -> None:
    """Check keyword arguments against a signature. `filled` are supplied later; with `partly`, positional ones too."""
    parameters = inspect.signature(function).parameters
    hints = _hints(function)
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    named = {key: p for key, p in parameters.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    title = getattr(function, "__name__", str(function))
    for key, value in given.items():
        if key not in named:
            if open_ended:
                continue
            raise ConfigError(f"{path}.{key}: {title} takes no {key!r}; {did_you_mean(key, named)}")
        if isinstance(value, dict) and "_target_" in value:
            continue
        if not fits(value, hints.get(key, Any)):
            got = f"{shortened(redacted(value, str(key)))} ({type(value).__name__})"
            raise ConfigError(f"{path}.{key}: expected {_shown(hints[key])}, got {got}")
    if partly:
        return
    missing = [key for key, p in named.items() if p.default is p.empty and key not in given and key not in filled]
    if missing:
        raise ConfigError(f"{path}.{missing[0]} is missing: {title} needs it")


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function.__init__ if inspect.isclass(function) else function)  # type: ignore[misc]
    except Exception:  # annotations that only a type checker can read
        return {}


def _shown(annotation: Any) -> str:
    return annotation.__name__ if inspect.isclass(annotation) else str(annotation).replace("typing.", "")


def build(node: Mapping[str, Any], allow: Sequence[str] = (), path: str = "", **more: Any) -> Any:
    """Build the object of a checked mapping, inner ones first; with `_partial_: true` a function of its other arguments."""
    function = locate(node["_target_"], allow, f"{path}._target_")
    arguments = {key: _built(value, allow, f"{path}.{key}") for key, value in node.items() if key not in _OWN}
    arguments.update(more)
    return partial(function, **arguments) if node.get("_partial_") else function(**arguments)


def _built(value: Any, allow: Sequence[str], path: str) -> Any:
    if isinstance(value, dict):
        if "_target_" in value:
            return build(value, allow, path)
        return {key: _built(inner, allow, f"{path}.{key}") for key, inner in value.items()}
    if isinstance(value, list):
        return [_built(inner, allow, f"{path}[{index}]") for index, inner in enumerate(value)]
    return value


# ---- Hydra's own section

_FREE = re.compile(
    r"mode|searchpath|sweep\.(dir|subdir)|sweeper\.(params(\..*)?|max_batch_size|n_trials|n_jobs|direction|study_name)"
    r"|launcher\.(nodes|tasks_per_node|cpus_per_(task|gpu)|gpus_per_(node|task)|gres|mem_(gb|per_gpu|per_cpu)|timeout_min"
    r"|name|partition|qos|account|constraint|exclude|max_num_timeout|array_parallelism|signal_delay_s|n_jobs)"
    r"|(overrides|runtime)\..*|job\.(name|override_dirname|id|num|config_name)"
)
"""Keys of Hydra's section that a configuration file may set (they run nothing), and those that Hydra fills in."""


def check_hydra_section(found: Mapping[str, Any], own: Mapping[str, Any], launcher: Any) -> None:
    """Refuse settings of Hydra's section that come from a configuration file and can run code.

    Callbacks, logging, environment variables, launchers and sweepers can. `found` is the section, unresolved; `own` is the
    section that the package and the command line make for the same launcher and sweeper; `launcher` is the resolved one.
    """
    leaves, known = dict(_leaves(found)), dict(_leaves(own))
    for key in sorted({*leaves, *known}):
        if leaves.get(key) != known.get(key) and not _FREE.fullmatch(key):
            raise ConfigError(
                f"hydra.{key} is set by a configuration file, but only the command line can set it, because it can run "
                f"commands. If you trust the value, give hydra.{key}=... on the command line, and remove it from the file"
            )
    if found.get("output_subdir") is not None:
        raise ConfigError("hydra.output_subdir must be null: Hydra would write the configuration with its secrets")
    for key, value in _leaves(launcher):
        if isinstance(value, str) and printable(value) != value:
            raise ConfigError(f"hydra.launcher.{key} contains control characters: {shortened(value)}")


def _leaves(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The values of a mapping that are no filled mappings, with their keys."""
    if isinstance(node, Mapping) and node:
        for key, inner in node.items():
            yield from _leaves(inner, f"{path}.{key}" if path else str(key))
    else:
        yield path, node
