"""Runs on every rank of a job on several hosts: compares steps of a pipeline with one process, and writes what it finds.

The arguments are a folder for the results and the numbers of stages, one after the other in the same processes.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import torch

MICROBATCHES, SIZES = 4, [2, 2, 2, 1]


def compared(stages: int) -> dict[str, Any]:
    """Train one step with this number of stages, in float64, and compare loss and gradients with plain PyTorch."""
    from support.models import build
    from support.reference import assert_close, reference_step

    from pipepart import Pipeline

    replicas = int(os.environ["WORLD_SIZE"]) // stages
    plain, batches = build("gpt"), []
    for replica in range(replicas):
        torch.manual_seed(40 + replica)
        batches.append(plain.batch(sum(SIZES)))
    losses = [reference_step(plain, batch, SIZES) for batch in batches]
    model = build("gpt")
    pipe = Pipeline(model, model.batch(8), stages=stages, microbatches=MICROBATCHES, schedule="1f1b", timeout=120)
    groups = pipe._runtime.groups
    assert groups is not None
    with pipe.tracing():
        loss = pipe.step(*batches[groups.replica])
    assert_close("loss", loss, losses[groups.replica])
    expected, count = dict(plain.named_parameters()), 0
    for name, parameter in pipe.named_parameters():
        reference = expected[name].grad
        assert reference is not None and parameter.grad is not None, name
        assert_close(name, parameter.grad, reference / replicas)
        count += 1
    events = pipe.trace.events
    return {
        "place": [groups.replica, groups.stage],
        "gradients": count,
        "transport": type(pipe._runtime._transport).__name__,
        "seconds": max(event.end for event in events) - min(event.start for event in events),
        "traced": sorted({event.stage for event in events}),
    }


def main() -> None:
    folder, shapes = Path(sys.argv[1]), [int(number) for number in sys.argv[2].split(",")]
    found = {str(stages): compared(stages) for stages in shapes}
    about = {"host": socket.gethostname(), "interface": os.environ.get("GLOO_SOCKET_IFNAME"), "shapes": found}
    (folder / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(about))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    main()
