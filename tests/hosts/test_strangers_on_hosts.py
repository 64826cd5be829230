"""A stranger on the network of a job on several hosts: nothing of what he sends is unpickled, and the job goes on."""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
from host_jobs import both_ended, train_on
from support.hosts import Host, made_hosts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]
STEPS = 60
PROGRAM = """
import pathlib, socket, struct, sys, time
import torch.distributed as dist

trap, places, kept, said = pathlib.Path(sys.argv[1]).read_bytes(), pathlib.Path(sys.argv[2]), [], []
print("here", flush=True)
while not places.exists():
    time.sleep(0.05)
hello = struct.pack("<bI", 0, 0x3C85F7CE)  # the first message to torch's store
for place in places.read_text().split():
    address, _, port = place.rpartition(":")
    for word in (b"", trap, b"\\xff" * 4096, b"GET / HTTP/1.0\\r\\n\\r\\n", hello):
        try:
            connection = socket.create_connection((address, int(port)), timeout=5)
            connection.sendall(word)
            kept.append(connection)
        except OSError:
            continue
    try:
        with socket.create_connection((address, int(port)), timeout=5) as asked:
            asked.sendall(hello + struct.pack("<bI", 13, 4711))
            is_store = asked.recv(4) == struct.pack("<I", 4711)
    except OSError:
        is_store = False
    if is_store:
        store = dist.TCPStore(address, int(port), None, False, wait_for_workers=False)
        for key in ("pipepart/key", "evil", "default_pg/0//pipepart/key"):
            store.set(key, trap)
        said.append(place)
print(f"stores {len(said)}, connections {len(kept)}", flush=True)
time.sleep(600)
"""


class Trap:
    """An object that makes a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        import os

        return os.mknod, (self.path,)


def _ports(host: Host) -> set[str]:
    """The addresses and ports on which processes of a host listen for others."""
    found = set()
    for line in host.run("cat", "/proc/net/tcp").splitlines():
        fields = line.split()
        if fields[3] == "0A" and fields[1].partition(":")[0] != "0100007F":
            found.add(f"{host.address}:{int(fields[1].partition(':')[2], 16)}")
    return found


def test_a_stranger_is_not_listened_to_and_the_job_goes_on(tmp_path: Path) -> None:
    """Without PIPEPART_TOKEN: the stranger reaches the stores and every other port, but does not know the key of the job."""
    sprung, bomb = tmp_path / "sprung", tmp_path / "bomb"
    bomb.write_bytes(pickle.dumps(Trap(str(sprung))))
    words = ["recipe=mlp", "logger=none", f"trainer.max_steps={STEPS}", "strategy.timeout=120", "strategy.sharded=true"]
    words += [f"output={tmp_path / 'run'}", f"trainer.val_check_interval={STEPS}", "trainer.limit_val_batches=1"]
    with made_hosts(3) as hosts:
        stranger = hosts[2].start([sys.executable, "-c", PROGRAM, str(bomb), str(tmp_path / "places")], tmp_path)
        assert stranger.stdout is not None and stranger.stdout.readline() == "here\n"
        programs = train_on(hosts[:2], f"{hosts[0].address}:29401", 1, words, tmp_path)
        assert programs[0].stdout is not None
        line = ""
        while not line.startswith("step "):
            line = programs[0].stdout.readline()
            assert line, both_ended(programs)
        places = sorted(_ports(hosts[0]) | _ports(hosts[1]))
        assert places
        (tmp_path / "unnamed").write_text("\n".join(places))
        (tmp_path / "unnamed").rename(tmp_path / "places")
        heard = []
        for said in stranger.stdout:  # torch warns of names that it misses
            heard.append(said)
            if said.startswith("stores "):
                break
        assert said.startswith("stores "), "".join(heard)
        assert not said.startswith("stores 0"), "the stores of torch serve everyone"
        ended = both_ended(programs)
    assert [program.returncode for program in programs] == [0, 0], ended
    assert not sprung.exists()
    assert json.loads((tmp_path / "run" / "result.json").read_text())["steps"] == STEPS
