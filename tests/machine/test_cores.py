"""The cores for each process of a job on this host."""

from __future__ import annotations

import pytest

from pipepart.machine import host

QUEUE = ("SLURM_CPUS_PER_TASK", "SLURM_CPUS_ON_NODE", "SLURM_NTASKS")


@pytest.mark.parametrize(
    ("queue", "processes", "expected"),
    [
        ({}, 4, 4),
        ({}, 32, 1),
        ({"SLURM_CPUS_ON_NODE": "8", "SLURM_NTASKS": "8"}, 4, 2),
        ({"SLURM_CPUS_ON_NODE": "64", "SLURM_NTASKS": "4"}, 4, 4),
        ({"SLURM_CPUS_PER_TASK": "3", "SLURM_CPUS_ON_NODE": "12", "SLURM_NTASKS": "4"}, 4, 3),
        ({"SLURM_CPUS_PER_TASK": "12", "SLURM_NTASKS": "1"}, 4, 3),
        ({"SLURM_CPUS_PER_TASK": "none", "SLURM_CPUS_ON_NODE": "0"}, 4, 4),
    ],
)
def test_a_queue_may_give_fewer_cores_than_the_host_has(
    monkeypatch: pytest.MonkeyPatch, queue: dict[str, str], processes: int, expected: int
) -> None:
    monkeypatch.setattr(host, "usable_cores", lambda: 16)
    for name in QUEUE:
        monkeypatch.delenv(name, raising=False)
    for name, value in queue.items():
        monkeypatch.setenv(name, value)
    assert host.shared_cores(processes) == expected
