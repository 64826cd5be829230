"""`pipepart export`: the network of a checkpoint as an ONNX file, safetensors, a folder of transformers, or a pt2 program."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from pipepart.cli.console import bold, quiet_libraries, shown, table
from pipepart.cli.run_modules import Loaded, config_of, from_class, from_config
from pipepart.errors import ConfigError
from pipepart.export import (
    FORMATS,
    Compared,
    Network,
    check_request,
    export_network,
    find_checkpoint,
    part_of,
    read_checkpoint,
    save_tokenizer,
    wanted_kind,
)
from pipepart.export.example_inputs import observed_call

__all__ = ["export"]


def export(
    checkpoint: Path,
    to: str,
    overrides: Sequence[str] = (),
    *,
    extra: Path | None = None,
    named: str | None = None,
    module: str | None = None,
    quantize: str | None = None,
    output: Path | None = None,
    trusted: bool = False,
) -> int:
    """Export the network of a checkpoint, and print the table of the comparison and the paths."""
    quiet_libraries()
    check_request(to, quantize)
    if named and overrides:
        raise ConfigError(f"--class {named} takes no overrides, got {overrides[0]}: they are for recipes")
    path = find_checkpoint(checkpoint)
    target = output or _beside(path, to, quantize)
    if named:
        loaded = from_class(named, read_checkpoint(path, trusted), path)
    else:
        config = config_of(path, overrides, extra)  # faults of it are found before a large file is read
        loaded = from_config(config, read_checkpoint(path, trusted), path)
    network = _network(loaded, part_of(loaded.module, module, wanted_kind(to)))
    kind = f"{to} {quantize}" if quantize else to
    print(f"{bold('pipepart export')}  {type(network.module).__name__} of {shown(path)} to {kind}\n", flush=True)

    def tokenizer(folder: Path) -> None:
        if to == "hf":
            save_tokenizer((loaded.data, loaded.module), folder)

    rows = export_network(network, to, target, quantize, tokenizer)
    print(_table(rows))
    print(f"\n{bold('inputs'.rjust(10))}  {_described(network)}")
    print(f"{bold('outputs'.rjust(10))}  {', '.join(network.outputs)}")
    print(f"{bold('exported'.rjust(10))}  {shown(target)}", flush=True)
    return 0


def _beside(checkpoint: Path, to: str, quantize: str | None) -> Path:
    """The default name: that of the checkpoint with the ending of the format, beside it."""
    bits = f"-{quantize}" if quantize else ""
    return checkpoint.with_name(f"{checkpoint.stem}{bits}{FORMATS[to].ending}")


def _network(loaded: Loaded, part: nn.Module) -> Network:
    """The network with the inputs of an example: the user's, or those that a step passes to it."""
    config = getattr(part, "config", None)
    if getattr(config, "use_cache", None):  # models of transformers return a cache, which is no tensor
        config.use_cache = False
    if loaded.args is not None and part is loaded.module:
        return Network.of(part, loaded.args, {})
    if loaded.args is not None:
        raise ConfigError("--module is for recipes: the example arguments of --class belong to the module itself")
    if loaded.data is None:
        raise ConfigError(
            f"{type(loaded.module).__name__} has no example_input_array, so the shapes of its inputs are not known: set it in "
            "the class, or give --class a function that returns (module, example arguments)"
        )
    batch = _first_batch(loaded.data)
    args, kwargs = observed_call(loaded.module, part, batch)
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
    raise ConfigError("data: no loader gives a batch, and an export needs one to know the shapes of the inputs")


def _described(network: Network) -> str:
    parts = []
    for name, value, batched in zip(network.inputs, network.example, network.batched):
        sizes = ", ".join(
            ["batch" if batched else str(value.shape[0]), *map(str, value.shape[1:])] if value.ndim else []
        )
        parts.append(f"{name} {str(value.dtype).removeprefix('torch.')} [{sizes}]")
    return ", ".join(parts)


def _table(rows: Sequence[Compared]) -> str:
    """Size, latency and difference of each form; a ratio is that of torch divided by that of the row."""
    first = rows[0]
    lines = [["", "size", "smaller", "latency", "faster", "largest difference", "mean difference"]]
    for row in rows:
        lines.append(
            [
                row.name,
                f"{row.bytes / 1e6:.2f} MB",
                f"{first.bytes / row.bytes:.2f}x",
                f"{row.seconds * 1e3:.2f} ms",
                f"{first.seconds / row.seconds:.2f}x",
                "" if row is first else f"{row.largest:.1e}",
                "" if row is first else f"{row.mean:.1e}",
            ]
        )
    return table(lines)
