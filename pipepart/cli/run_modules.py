"""The module and the data of a checkpoint: those of the run that wrote it, of overrides, or of a class of the user."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from torch import nn

from pipepart.cli.config import allow_of, checked, compose_config, explaining
from pipepart.cli.targets import check_allow
from pipepart.errors import ConfigError
from pipepart.export import put_weights
from pipepart.files import load_yaml

__all__ = ["Loaded", "config_of", "from_class", "from_config", "named_object"]


@dataclass(frozen=True)
class Loaded:
    """A module with the weights of a checkpoint, and what else is known of it."""

    module: nn.Module
    data: Any = None
    """The data module of the run, set up, if there is one."""
    args: tuple[Any, ...] | None = None
    """The arguments of an example, if the user's class has one."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)


def config_of(checkpoint: Path, overrides: Sequence[str], extra: Path | None = None) -> dict[str, Any]:
    """The checked configuration of the run that wrote a checkpoint; with overrides (other than allow) that of them."""
    if any(not word.startswith("allow=") for word in overrides):
        return checked(compose_config(overrides, extra=extra))
    found = next((folder / "config.yaml" for folder in checkpoint.absolute().parents[:3] if _is_run(folder)), None)
    if found is None:
        raise ConfigError(
            f"there is no config.yaml of a run in the folders above {checkpoint}: give the overrides of the run (recipe=gpt "
            "...), or --class module:Class for a class of yours"
        )
    config = load_yaml(found, ConfigError).entries()
    with explaining(extra):
        composed = OmegaConf.create(dict(config))
    check_allow(config.get("allow") or (), allow_of(overrides))
    return checked(composed)


def _is_run(folder: Path) -> bool:
    return (folder / "config.yaml").is_file()


def from_config(config: dict[str, Any], checkpoint: Mapping[str, Any], path: Path) -> Loaded:
    """The recipe of a configuration with the weights of a checkpoint."""
    from pipepart.cli.fit import build_recipe
    from pipepart.lightning.materialise import materialise

    module, data = build_recipe(config)
    module.prepare_data()
    module.configure_model()
    materialise(module)
    module.on_load_checkpoint(dict(checkpoint))
    put_weights(module, checkpoint, path)
    data.prepare_data()
    data.setup("fit")
    return Loaded(module.eval(), data)


def from_class(name: str, checkpoint: Mapping[str, Any], path: Path) -> Loaded:
    """The LightningModule of a class with the hyper-parameters of the checkpoint, or what a function returns."""
    found = named_object(name)
    if not inspect.isclass(found):
        made = found()
        if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
            raise ConfigError(f"{name} returned {type(made).__name__}; expected (module, tuple of example arguments)")
        part, given = made
        put_weights(part, checkpoint, path)
        return Loaded(part.eval(), None, tuple(given) if isinstance(given, (tuple, list)) else (given,))
    if not issubclass(found, nn.Module):
        raise ConfigError(f"{name} is {found.__name__}; expected a class of modules, or a function")
    hyper = _hyper_parameters(found, checkpoint)
    try:
        module: Any = found(**hyper)
    except TypeError as error:
        raise ConfigError(
            f"{name} cannot be built with the hyper-parameters of {path} ({', '.join(hyper) or 'it has none'}): {error}. "
            "Call save_hyperparameters() in the class, or give a function that returns (module, example arguments)"
        ) from error
    hook: Any = getattr(module, "on_load_checkpoint", None)
    if callable(hook):
        hook(dict(checkpoint))
    put_weights(module, checkpoint, path)
    example = getattr(module, "example_input_array", None)
    if example is None:
        return Loaded(module.eval())
    if isinstance(example, Mapping):
        return Loaded(module.eval(), None, (), dict(example))
    return Loaded(module.eval(), None, tuple(example) if isinstance(example, (tuple, list)) else (example,))


def named_object(name: str) -> Callable[..., Any]:
    """What `module:name` names, with the current folder among the places of modules."""
    path, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = getattr(importlib.import_module(path), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{name}: {error}. Expected package.module:Class, or package.module:function") from error
    if not callable(found):
        raise ConfigError(f"{name} is a {type(found).__name__}; expected a class or a function")
    return found  # type: ignore[no-any-return]


def _hyper_parameters(kind: type, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """The hyper-parameters that the constructor takes, as Lightning's load_from_checkpoint chooses them."""
    saved = dict(checkpoint.get("hyper_parameters") or {})
    parameters = inspect.signature(kind).parameters
    whole = checkpoint.get("hparams_name")
    if whole in parameters and whole != "kwargs":
        return {str(whole): saved}
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return saved
    return {key: value for key, value in saved.items() if key in parameters}
