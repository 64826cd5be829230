"""Pipelines on several hosts are equal to one process: real addresses, names that lead nowhere, clocks that differ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from host_jobs import both_ended, torchrun
from support.hosts import made_hosts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]
PROGRAM = str(Path(__file__).parent / "equal_program.py")


def _run(folder: Path, count: int, ranks: int, shapes: str, **options: Any) -> list[dict[str, Any]]:
    """What each rank has found, in order."""
    with made_hosts(count, **options) as hosts:
        programs = torchrun(hosts, ranks, [PROGRAM, str(folder), shapes], folder)
        said = both_ended(programs)
        assert [program.returncode for program in programs] == [0] * count, said
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(count * ranks)]


def test_two_hosts_equal_one_process(tmp_path: Path) -> None:
    """2 x 2 and 1 x 4. The job is in the first of two networks; a host knows its own name only, as an address of loopback."""
    found = _run(tmp_path, 2, 2, "2,4", networks=("10.77.0", "10.78.0"), clocks=(0, 1000))
    assert [rank["host"] for rank in found] == ["h1", "h1", "h2", "h2"]
    assert {rank["interface"] for rank in found} == {"net0"}
    two, four = ([rank["shapes"][shape] for rank in found] for shape in ("2", "4"))
    assert [rank["place"] for rank in two] == [[0, 0], [0, 1], [1, 0], [1, 1]], "each replica is on one host"
    assert [rank["place"] for rank in four] == [[0, 0], [0, 1], [0, 2], [0, 3]]
    assert all(rank["gradients"] for rank in two + four)
    # Inside a host tensors go through shared memory; a replica that is on two hosts uses sockets.
    assert {rank["transport"] for rank in two} == {"SharedMemoryTransport"}
    assert {rank["transport"] for rank in four} == {"GroupTransport"}
    # The clocks of the hosts differ by 1000 s, the events of one step do not.
    assert all(rank["traced"] == [0, 1, 2, 3] and rank["seconds"] < 500 for rank in four)


def test_three_hosts_equal_one_process(tmp_path: Path) -> None:
    """3 x 2 and 1 x 6, on cables of 200 Mbit/s."""
    found = _run(tmp_path, 3, 2, "2,6", rate="200mbit", clocks=(0, 1000, 5))
    assert [rank["host"] for rank in found] == ["h1", "h1", "h2", "h2", "h3", "h3"]
    assert {rank["shapes"]["2"]["transport"] for rank in found} == {"SharedMemoryTransport"}
    assert {rank["shapes"]["6"]["transport"] for rank in found} == {"GroupTransport"}
    assert all(rank["shapes"]["6"]["seconds"] < 500 for rank in found)
