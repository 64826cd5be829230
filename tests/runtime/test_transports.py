"""What is sent arrives, in order, whatever its form; a peer that is gone or silent is an error that names it."""

from __future__ import annotations

import os
import socket
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks
from support.stranger import attack

from pipepart.errors import ConfigError
from pipepart.options import Options
from pipepart.runtime import shared_memory
from pipepart.runtime.mesh import Groups, Mesh
from pipepart.runtime.transport import choose_transport

DRAWS = torch.Generator().manual_seed(0)  # ranks import this file after whatever they have drawn before
VALUES = [
    torch.arange(12).view(3, 4),
    torch.randn(5, 6, generator=DRAWS).t(),
    torch.tensor([True, False, True]),
    torch.randn(700, 700, generator=DRAWS),
    torch.tensor(3.5, dtype=torch.float64),
    torch.randn(4, 4, generator=DRAWS).to(torch.bfloat16),
]


def _exchange(name: str) -> list[float]:
    groups = Groups.create(Mesh(1, 3), timedelta(seconds=240))
    transport = choose_transport(name, groups, torch.device("cpu"), 240.0)
    errors = []
    # Everybody sends to everybody before anybody receives: no order of this may block.
    pending = []
    for repeat in range(3):
        for other in range(3):
            if other != groups.stage:
                for value in VALUES:
                    data = (value if value.dtype == torch.bool else value * (repeat + 1)).contiguous()
                    pending.append((transport.send(data, other), data))
    for repeat in range(3):
        for other in range(3):
            if other != groups.stage:
                buffers = [torch.empty(value.shape, dtype=value.dtype) for value in VALUES]
                receives = [transport.recv(buffer, other) for buffer in buffers]
                receives[-1].wait()  # waiting for a later one first is allowed
                for receive in receives[:-1]:
                    receive.wait()
                for value, buffer in zip(VALUES, buffers):
                    expected = value if value.dtype == torch.bool else value * (repeat + 1)
                    errors.append(float((buffer.double() - expected.double()).abs().max()))
    for transfer, _ in pending:
        transfer.wait()
    dist.barrier()
    return errors


@pytest.mark.parametrize("name", ["shared_memory", "group"])
def test_everything_arrives_in_order(name: str) -> None:
    torch.manual_seed(0)
    answers = run_ranks(3, _exchange, name)
    assert all(len(errors) == 36 and max(errors) == 0.0 for errors in answers)


def _silent_peer() -> str:
    groups = Groups.create(Mesh(1, 2), timedelta(seconds=240))
    transport = choose_transport("shared_memory", groups, torch.device("cpu"), 1.0)
    text = ""
    if groups.stage == 0:
        try:
            transport.recv(torch.empty(3), 1).wait()
        except TimeoutError as error:
            text = str(error)
    dist.barrier()
    return text


def test_a_silent_peer_is_named_after_the_time_limit() -> None:
    assert "Timed out waiting 1 s for stage 1 (rank 1) to send" in run_ranks(2, _silent_peer)[0]


def _closing_peer() -> str:
    groups = Groups.create(Mesh(1, 2), timedelta(seconds=240))
    transport = choose_transport("shared_memory", groups, torch.device("cpu"), 240.0)
    text = ""
    if groups.stage == 0:
        started = time.monotonic()
        try:
            transport.recv(torch.empty(3), 1).wait()
        except ConnectionError as error:
            text = f"{error} {time.monotonic() - started < 120}"
    else:
        transport.close()
    dist.barrier()
    return text


def test_a_peer_that_is_gone_is_noticed_at_once() -> None:
    assert "stage 1 (rank 1) is gone: Connection closed by peer True" in run_ranks(2, _closing_peer)[0]


def _ends_after_its_last_message(unread: bool) -> tuple[list[float], str]:
    groups = Groups.create(Mesh(1, 2), timedelta(seconds=240))
    transport = choose_transport("shared_memory", groups, torch.device("cpu"), 240.0)
    found, text = [], ""
    if groups.stage == 1 and unread:
        transport.send(torch.zeros(5), 0)  # stage 0 ends without having read this
    dist.barrier()
    if groups.stage == 0:
        for index in range(3):
            transport.send(torch.full((4,), float(index)), 1)
        transport.close()
    dist.barrier()
    if groups.stage == 1:
        for _ in range(3):
            buffer = torch.empty(4)
            transport.recv(buffer, 0).wait()
            found.append(float(buffer[0]))
        try:
            transport.recv(torch.empty(4), 0).wait()
        except ConnectionError as error:
            text = str(error)
    return found, text


@pytest.mark.parametrize("unread", [False, True])
def test_what_a_rank_sent_before_it_ended_arrives(unread: bool) -> None:
    """The first rank to finish a job closes its end while others still read its last results."""
    found, text = run_ranks(2, _ends_after_its_last_message, unread)[1]
    assert found == [0.0, 1.0, 2.0]
    assert "stage 0 (rank 0) is gone" in text


def _descriptors() -> tuple[int, int]:
    groups = Groups.create(Mesh(1, 2), timedelta(seconds=240))
    transport = choose_transport("shared_memory", groups, torch.device("cpu"), 240.0)
    counts = []
    for _ in range(60):
        transport.send(torch.randn(1000), 1 - groups.stage)
        transport.recv(torch.empty(1000), 1 - groups.stage).wait()
        counts.append(len(os.listdir("/proc/self/fd")))
    dist.barrier()
    return counts[5], counts[-1]


def test_segments_are_used_again_and_descriptors_do_not_grow() -> None:
    for early, late in run_ranks(2, _descriptors):
        assert late <= early + 2


def test_unknown_transport() -> None:
    with pytest.raises(ConfigError, match="did you mean 'shared_memory'"):
        Options(transport="sharedmemory")


def _under_attack() -> float:
    """Strangers connect to the socket of every stage before its peers do, and stay silent or write nonsense."""
    groups = Groups.create(Mesh(1, 3), timedelta(seconds=240))
    gather = shared_memory.gather_objects

    def gather_after_strangers(name: bytes, *args: Any, **options: Any) -> list[Any]:
        addresses = gather(name, *args, **options)
        if os.getuid() == 0:
            attack([], [name], seconds=0.2)
        for word in (b"", b"x", bytes(40), bytes(41)):  # of this user, without the key of the job
            strangers.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            strangers[-1].connect(name)
            if word:
                strangers[-1].send(word)
        gather(b"", *args, **options)
        return addresses

    strangers: list[socket.socket] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_memory, "gather_objects", gather_after_strangers)
        begun = time.monotonic()
        transport = shared_memory.SharedMemoryTransport(groups, 240.0)
    data = torch.full((3,), float(groups.stage))
    for other in {0, 1, 2} - {groups.stage}:
        transport.send(data, other)
    for other in {0, 1, 2} - {groups.stage}:
        transport.recv(data, other).wait()
        assert data.tolist() == [other] * 3
    dist.barrier()
    return time.monotonic() - begun


def test_strangers_at_the_socket_of_a_stage_are_ignored() -> None:
    assert max(run_ranks(3, _under_attack)) < 60
