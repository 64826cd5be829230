"""Capture of a model that no process here could hold: ``python -m tools.bench.zoo.large [--billions 10]``.

The model is built on the meta device. Reported: parameters, ops, seconds, and the memory of the process at its peak.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass

import torch

from pipepart.graph import op_graph
from pipepart.machine import peak_memory
from pipepart.recording import record
from tools.bench.zoo.plain_blocks import GPT

__all__ = ["Large", "capture_large"]


@dataclass(frozen=True)
class Large:
    """What the capture of one large model took."""

    parameters: int
    ops: int
    flops: int
    seconds: float
    """Of recording alone."""
    graph_seconds: float
    """Of the graph for planning, with its FLOPs."""
    peak_bytes: int
    """Of the whole process, libraries included."""


def capture_large(billions: float, length: int = 1024) -> Large:
    """Capture a GPT of about so many parameters (layers of width 5120) on the meta device."""
    width = 5120
    depth = max(1, round(billions * 1e9 / (12 * width * width)))
    with torch.device("meta"):
        model = GPT(width=width, depth=depth, heads=40, vocabulary=50304, length=length)
    batch = (torch.zeros(2, length, dtype=torch.long), torch.zeros(2, length, dtype=torch.long))
    start = time.perf_counter()
    recording = record(model.train(), batch)
    recorded = time.perf_counter()
    graph = op_graph(recording)
    done = time.perf_counter()
    return Large(
        sum(p.numel() for p in model.parameters()),
        len(recording.ops),
        sum(op.flops for op in graph.ops),
        recorded - start,
        done - recorded,
        peak_memory(),
    )


def main() -> None:
    """Capture one and print what it took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--billions", type=float, default=10.0)
    found = capture_large(parser.parse_args().billions)
    print(
        f"{found.parameters / 1e9:.2f} billion parameters, {found.ops} ops, {found.flops / 1e12:.1f} TFLOPs forward: "
        f"recorded in {found.seconds:.1f} s, graph in {found.graph_seconds:.1f} s, "
        f"peak memory of the process {found.peak_bytes / 2**20:.0f} MiB"
    )


if __name__ == "__main__":
    main()
