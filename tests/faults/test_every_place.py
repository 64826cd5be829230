"""Faults in forward, backward and communication: all ranks end, and say why. `tools.bench.faults` does it a hundred times."""

from __future__ import annotations

import multiprocessing

import pytest

from tools.bench.faults import thousand
from tools.bench.faults.job import Fault
from tools.bench.faults.repeat import once
from tools.bench.faults.trained_job import Trained


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
        Fault("parameters", "kill", 3, 4, "group", limit=60.0, sync="fsdp"),
        Fault("parameters", "raise", 3, 4, "group", limit=60.0, sync="master"),
        Fault("parameters", "kill", 2, 4, "group", limit=60.0, sync="local"),
        Fault("parameters", "kill", 1, 4, "group", limit=60.0, sync="ring"),
    ],
    ids=lambda fault: f"{fault.how} in {fault.where}{'' if fault.sync == 'mean' else f' of {fault.sync}'}",
)
def test_all_ranks_end_and_name_the_cause(fault: Fault) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "pipepart"])
    _, problems = once(context, fault, in_time=False)  # how long it takes is for the bench to say
    assert problems == []


def test_the_parts_of_a_thousand_faults_make_up_the_whole() -> None:
    whole = thousand.cases(1000, seed=3)
    assert len(whole) == 1000
    assert whole == thousand.cases(1000, seed=3) != thousand.cases(1000, seed=4)
    assert sorted(map(str, whole)) == sorted(str(fault) for k in range(7) for fault in whole[k::7])
    modes = {(fault.how, fault.where, fault.ranks, fault.stages, fault.transport, fault.sharded) for fault in whole}
    assert len(modes) == (3 * 7 - 1) * 3 * 2 * 2, (
        "every kind x phase x mode, except a rank that is stopped while it saves"
    )
    assert all(fault.rank < fault.ranks for fault in whole)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(
    "fault",
    [
        Trained("save", "kill", 1, 2, "shared_memory", 60.0, stages=2, sharded=True),
        Trained("validation", "raise", 3, 4, "group", 60.0, stages=2),
        Trained("validation", "raise", 0, 2, "shared_memory", 60.0, stages=2),
        Trained("update", "stop", 1, 2, "group", 20.0, stages=2),
    ],
    ids=lambda fault: f"{fault.how} in {fault.where}",
)
def test_a_run_with_checkpoints_ends_and_leaves_the_newest_one(fault: Trained) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "pipepart"])
    _, problems = thousand.once(context, fault)
    assert problems == []
