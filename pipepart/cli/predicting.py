"""`pipepart predict`: the outputs of a checkpoint's network for the rows of a file, in their order."""

from __future__ import annotations

import time
from pathlib import Path

from pipepart.cli.console import bold, quiet_libraries, shown
from pipepart.cli.exporting import described
from pipepart.cli.rows_read import inputs_of, read_batches
from pipepart.cli.rows_written import check_output, written_rows
from pipepart.cli.saved_networks import Request, saved_network
from pipepart.errors import ConfigError
from pipepart.values import COUNT, check_number

__all__ = ["predict"]


def predict(request: Request, file: Path, output: Path | None = None, batch: int = 64) -> int:
    """Compute the outputs for a file of inputs, batch by batch, and write them."""
    quiet_libraries()
    check_number("--batch", batch, COUNT, whole=True)
    if not file.is_file():
        raise ConfigError(f"there is no file {file} to predict for")
    target = output or file.with_name(f"{file.stem}-predictions{file.suffix}")
    check_output(target, ())
    network, _, path = saved_network(request)
    inputs = inputs_of(network)
    check_output(target, network.outputs)
    print(
        f"{bold('pipepart predict')}  {type(network.module).__name__} of {shown(path)} for {shown(file)}\n", flush=True
    )
    started = time.perf_counter()
    with written_rows(target, network.outputs) as writer:
        for values in read_batches(file, inputs, batch):
            rows = len(values[0])
            try:
                outputs = network(values)
            except Exception as error:  # the values of a file can be anything, such as numbers beyond a vocabulary
                raise ConfigError(
                    f"{file}: {type(network.module).__name__} fails for the rows {writer.rows + 1} to {writer.rows + rows}: "
                    f"{type(error).__name__}: {error}. It takes {described(network)}"
                ) from error
            writer.add(outputs, rows)
    spent = time.perf_counter() - started
    print(f"{bold('predicted'.rjust(11))}  {writer.rows:,} rows in {spent:.1f} s ({writer.rows / spent:,.0f} rows/s)")
    print(f"{bold('outputs'.rjust(11))}  {', '.join(network.outputs)}")
    print(f"{bold('predictions'.rjust(11))}  {shown(target)}", flush=True)
    return 0
