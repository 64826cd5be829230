"""A cut cable and a dead host: the job ends within its timeout on the hosts that are left, which show the cause."""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path

import pytest
from host_jobs import PATIENCE, both_ended, listening, train_on
from support.hosts import Host, made_hosts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]
LIMIT = (
    20  # seconds; the timeout of the job, which its ranks also have to start (6 s were too few beside busy processes)
)


def _training(hosts: list[Host], ranks: int, folder: Path) -> list[subprocess.Popen[str]]:
    """Start a job that goes on until it is ended, and wait until it trains. Its network is the last one of the hosts."""
    words = ["recipe=mlp", "logger=none", "trainer.max_steps=1000000", f"strategy.timeout={LIMIT}"]
    words += [f"output={folder / 'disk' / 'run'}", "trainer.val_check_interval=null", "trainer.limit_val_batches=0"]
    programs = train_on(hosts, f"{hosts[0].addresses[-1]}:29401", ranks, words, folder)
    lines = list[str]()
    assert programs[0].stdout is not None
    for line in programs[0].stdout:
        lines.append(line)
        if line.startswith("step "):
            return programs
    raise AssertionError("".join(lines) + both_ended(programs[1:])[0])


def _all_end(programs: list[subprocess.Popen[str]]) -> list[str]:
    begun = time.monotonic()
    said = both_ended(programs)
    assert time.monotonic() - begun < PATIENCE
    assert all(program.returncode not in (0, None) for program in programs)
    return said


def test_a_cut_cable_ends_the_job_on_both_hosts(tmp_path: Path) -> None:
    """Nothing tells a host that its cable is cut. Before, nothing listens beyond the network of the job."""
    with made_hosts(2, networks=("10.77.0", "10.78.0"), disk=tmp_path / "disk") as hosts:
        programs = _training(hosts, 1, tmp_path)
        assert [listening(host) for host in hosts] == [{"10.78.0.1"}, {"10.78.0.2"}]
        hosts[1].cut()
        first, second = _all_end(programs)
    assert "rank 0 (replica 0, stage 0) reached its timeout. Ranks that wait:" in first
    assert "no report from rank 1 (replica 0, stage 1)" in first
    assert "rank 1 (replica 0, stage 1) reached its timeout. Ranks that wait:" in second
    assert "The store of the job, on the host of rank 0, does not answer h2" in second
    assert "Traceback" not in first + second


@pytest.mark.parametrize("dead", [0, 1], ids=["with rank 0", "without rank 0"])
def test_a_dead_host_ends_the_job_on_the_other_one(tmp_path: Path, dead: int) -> None:
    with made_hosts(2, disk=tmp_path / "disk") as hosts:
        programs = _training(hosts, 2, tmp_path)
        hosts[dead].end()
        (said,) = _all_end([programs[1 - dead]])
    assert "lost another rank" in said
    assert "Traceback" not in said


def test_a_host_without_power_is_missed_by_two_others(tmp_path: Path) -> None:
    """A host that loses its power does not close its connections."""
    with made_hosts(3, disk=tmp_path / "disk") as hosts:
        programs = _training(hosts, 1, tmp_path)
        hosts[2].cut()
        hosts[2].end()
        said = _all_end(programs[:2])
    for text in said:
        assert "reached its timeout" in text
        assert re.search(r"no report from .*rank [12] \(replica 0, stage [12]\)", text), "in the order of their arrival"
