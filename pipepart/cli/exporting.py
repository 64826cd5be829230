"""`pipepart export`: the network of a checkpoint as an ONNX file, safetensors, a folder of transformers, or a pt2 program."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipepart.cli.console import bold, quiet_libraries, shown, table
from pipepart.cli.saved_networks import Request, saved_network
from pipepart.export import FORMATS, Compared, Network, check_request, export_network, save_tokenizer, wanted_kind

__all__ = ["described", "export"]


def export(request: Request, to: str, quantize: str | None = None, output: Path | None = None) -> int:
    """Export the network of a checkpoint, and print the table of the comparison and the paths."""
    quiet_libraries()
    check_request(to, quantize)
    network, loaded, path = saved_network(request, wanted_kind(to))
    target = output or _beside(path, to, quantize)
    kind = f"{to} {quantize}" if quantize else to
    print(f"{bold('pipepart export')}  {type(network.module).__name__} of {shown(path)} to {kind}\n", flush=True)

    def tokenizer(folder: Path) -> None:
        if to == "hf":
            save_tokenizer((loaded.data, loaded.module), folder)

    rows = export_network(network, to, target, quantize, tokenizer)
    print(_table(rows))
    print(f"\n{bold('inputs'.rjust(10))}  {described(network)}")
    print(f"{bold('outputs'.rjust(10))}  {', '.join(network.outputs)}")
    print(f"{bold('exported'.rjust(10))}  {shown(target)}", flush=True)
    return 0


def _beside(checkpoint: Path, to: str, quantize: str | None) -> Path:
    """The default name: that of the checkpoint with the ending of the format, beside it."""
    bits = f"-{quantize}" if quantize else ""
    return checkpoint.with_name(f"{checkpoint.stem}{bits}{FORMATS[to].ending}")


def described(network: Network) -> str:
    """The names, dtypes and sizes of the inputs."""
    parts = []
    for name, value, batched in zip(network.inputs, network.example, network.batched):
        first = ["batch" if batched else str(len(value))] if value.ndim else []
        sizes = ", ".join([*first, *map(str, value.shape[1:])])
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
