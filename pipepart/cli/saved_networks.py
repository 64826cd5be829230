"""The network of a checkpoint with an example of its inputs, for the commands that export it and that predict with it."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from pipepart.cli.run_modules import Loaded, config_of, from_class, from_config
from pipepart.errors import ConfigError
from pipepart.export import Network, find_checkpoint, part_of, read_checkpoint
from pipepart.export.example_inputs import observed_call

__all__ = ["Request", "add_request", "saved_network"]


@dataclass(frozen=True)
class Request:
    """The checkpoint that a command line names, and where its module comes from."""

    checkpoint: Path
    overrides: Sequence[str] = ()
    extra: Path | None = None
    """The user's own folder of configurations."""
    named: str | None = None
    """`module:name` of a class or a function of the user."""
    module: str | None = None
    """The path of the submodule that is the network."""
    trusted: bool = False

    @classmethod
    def taken(cls, given: dict[str, Any]) -> Request:
        """Take the request out of the arguments of a command line."""
        return cls(**{name: given.pop(name) for name in cls.__dataclass_fields__})


def add_request(parser: argparse.ArgumentParser) -> None:
    """The options of a request, without its positional arguments."""
    parser.add_argument(
        "--class", dest="named", metavar="MODULE:NAME",
        help="the LightningModule class of the checkpoint, or a function that returns (module, example arguments)",
    )  # fmt: skip
    parser.add_argument("--module", metavar="PATH", help="the submodule to use (default: the one that the steps call)")
    parser.add_argument(
        "--config-dir", dest="extra", type=Path, help="a folder with your own recipes, with the layout of conf/"
    )
    parser.add_argument(
        "--trust-checkpoint", dest="trusted", action="store_true",
        help="read objects of other classes in the checkpoint, which can run code",
    )  # fmt: skip


def saved_network(request: Request, wanted: Callable[[nn.Module], bool] | None = None) -> tuple[Network, Loaded, Path]:
    """The network with the weights of the checkpoint, what it belongs to, and the path of the checkpoint."""
    named = request.named
    if named and request.overrides:
        raise ConfigError(f"--class {named} takes no overrides, got {request.overrides[0]}: they are for recipes")
    path = find_checkpoint(request.checkpoint)
    if named:
        loaded = from_class(named, read_checkpoint(path, request.trusted), path)
    else:
        config = config_of(path, request.overrides, request.extra)  # its faults are found before a large file is read
        loaded = from_config(config, read_checkpoint(path, request.trusted), path)
    return _network(loaded, part_of(loaded.module, request.module, wanted)), loaded, path


def _network(loaded: Loaded, part: nn.Module) -> Network:
    """The network with the inputs of an example: the user's, or those that a step passes to it."""
    config: Any = getattr(part, "config", None)
    if getattr(config, "use_cache", None):  # models of transformers return a cache, which is no tensor
        config.use_cache = False
    if loaded.args is not None and part is loaded.module:
        return Network.of(part, loaded.args, loaded.kwargs)
    if loaded.args is not None:
        raise ConfigError("--module is for recipes: the example arguments of --class belong to the module itself")
    if loaded.data is None:
        raise ConfigError(
            f"{type(loaded.module).__name__} has no example_input_array, so the shapes of its inputs are not known: set it in "
            "the class, or give --class a function that returns (module, example arguments)"
        )
    args, kwargs = observed_call(loaded.module, part, _first_batch(loaded.data))
    return Network.of(part, args, kwargs)


def _first_batch(data: Any) -> Any:
    """A batch of the loader for validation, or else for training."""
    for name in ("val_dataloader", "train_dataloader"):
        loaders = getattr(data, name)()
        loaders = list(loaders.values()) if isinstance(loaders, dict) else loaders
        loader = loaders[0] if isinstance(loaders, (list, tuple)) and loaders else loaders
        batch = next(iter(loader), None) if loader is not None else None
        if batch is not None:
            return batch
    raise ConfigError("data: no loader gives a batch, and one is needed to know the shapes of the inputs")
