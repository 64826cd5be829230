"""The commands of the README for several machines, on several hosts: addresses, names, disks, and what listens where."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from host_jobs import both_ended, on_each, torchrun, train_on
from support.hosts import made_hosts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]
SHORT = [
    "recipe=mlp",
    "logger=csv",
    "trainer.max_steps=6",
    "trainer.limit_val_batches=1",
    "trainer.val_check_interval=3",
]
PROGRAM = str(Path(__file__).parent / "addresses_program.py")


def test_an_address_that_leads_nowhere_is_an_error_in_seconds(tmp_path: Path) -> None:
    """One host asks for an address that nobody has, one for a name that does not resolve; a third one waits for a host
    that is there, but does not start its part: that is said, and takes as long as it is told to."""
    with made_hosts(4) as hosts:
        asked = [("10.77.0.9", "300"), ("no-such-host", "300"), (hosts[3].address, "8")]
        programs = on_each(hosts, [[PROGRAM, *words] for words in asked], tmp_path)
        nobody, unknown, refused = both_ended(programs)
    assert re.search(
        r"PipelineError: h1 cannot reach .* 10\.77\.0\.9 port 29401.* comes from launcher\.address", nobody
    )
    assert re.search(r"ConfigError: .*'no-such-host'.* does not resolve on h2.* comes from launcher\.address", unknown)
    assert "waiting for the host with the address 10.77.0.4 port 29401" in refused
    assert re.search(r"PipelineError: nothing listens at 10\.77\.0\.4 port 29401.*h3 has waited for 8 s", refused)
    for said in (nobody, unknown):
        assert float(said.split()[0]) < 120, "far below the 300 s that it may wait for other hosts to start"


def _trained(folder: Path) -> dict[str, object]:
    (result,) = folder.glob("**/result.json")
    found: dict[str, object] = json.loads(result.read_text())
    return found


def test_the_address_may_be_a_name(tmp_path: Path) -> None:
    """On its own host the name is an address of loopback: the other host tells by which address it is reached."""
    with made_hosts(2, named=True, disk=tmp_path / "disk") as hosts:
        words = [*SHORT, f"output={tmp_path / 'disk' / 'run'}"]
        programs = train_on(hosts, f"{hosts[1].name}:29401", 1, words, tmp_path, PIPEPART_TOKEN="a secret")
        said = both_ended(programs)
        assert [program.returncode for program in programs] == [0, 0], said
    assert _trained(tmp_path / "disk" / "h2")["stages"] == 2, "the host with the address has rank 0"
    assert "node 0     replica 0 stage 0\nnode 1     replica 0 stage 1" in said[1]
    assert "The first rank ran on another machine" in said[0]


def test_torchrun_trains_a_recipe(tmp_path: Path) -> None:
    with made_hosts(2) as hosts:
        words = ["-m", "pipepart.cli", "train", *SHORT, f"output={tmp_path / 'run'}"]
        programs = torchrun(hosts, 2, words, tmp_path)
        said = both_ended(programs)
        assert [program.returncode for program in programs] == [0, 0], said
    assert _trained(tmp_path)["stages"] == 4
    placed = "node 0     replica 0 stage 0, replica 0 stage 1\nnode 1     replica 0 stage 2, replica 0 stage 3"
    assert placed in said[0]


@pytest.mark.parametrize("shared", [True, False])
def test_a_sharded_checkpoint_needs_a_disk_that_hosts_share(tmp_path: Path, shared: bool) -> None:
    disk = tmp_path / "disk"
    with made_hosts(2, disk=None if shared else disk) as hosts:
        words = [*SHORT, "strategy.sharded=true", f"output={disk / 'run'}"]
        programs = train_on(hosts, f"{hosts[0].address}:29401", 1, words, tmp_path)
        said = both_ended(programs)
    if shared:
        assert [program.returncode for program in programs] == [0, 0], said
        from pipepart import consolidate

        consolidate(disk / "run" / "checkpoints" / "last.ckpt", tmp_path / "whole.ckpt")
        return
    assert [program.returncode for program in programs] == [1, 1], said
    assert "rank 0 on h1 does not see" in said[0] and "use a folder on a disk that all hosts share" in said[0]
    left = {path.name for host in ("h1", "h2") for path in (disk / host / "run" / "checkpoints").glob("*")}
    assert not left, "no part of a checkpoint stays"
