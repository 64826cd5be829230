"""Faults in forward, backward and communication: all ranks end, and say why. `tools.bench.faults` does it a hundred times."""

from __future__ import annotations

import multiprocessing

import pytest

from tools.bench.faults.job import Fault
from tools.bench.faults.repeat import once


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [
        Fault("forward", "stop", 1, 2, "shared_memory", limit=8.0),
        Fault("backward", "stop", 2, 4, "group", limit=8.0),
        Fault("backward", "kill", 1, 4, "shared_memory", limit=60.0),
        Fault("communication", "kill", 0, 2, "group", limit=60.0),
        Fault("communication", "raise", 3, 4, "shared_memory", limit=60.0),
        Fault("backward", "raise", 0, 4, "group", limit=60.0),
        Fault("gradients", "kill", 2, 4, "group", limit=60.0, sync="sharded"),
        Fault("parameters", "kill", 1, 4, "group", limit=60.0, sync="sharded"),
        Fault("parameters", "raise", 3, 4, "group", limit=60.0, sync="master"),
    ],
    ids=lambda fault: f"{fault.how} in {fault.where}{'' if fault.sync == 'mean' else f' of {fault.sync}'}",
)
def test_all_ranks_end_and_name_the_cause(fault: Fault) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "pipepart"])
    _, problems = once(context, fault, in_time=False)  # how long it takes is for the bench to say
    assert problems == []
