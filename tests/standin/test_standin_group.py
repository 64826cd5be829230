"""The process group of the stand-in obeys the rules of NCCL, also the unpleasant ones."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_standin

pytestmark = pytest.mark.timeout(600)


def _tensor(*values: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=f"standin:{dist.get_rank()}")


def _empty(size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device=f"standin:{dist.get_rank()}")


def _collectives() -> dict[str, Any]:
    rank, found = dist.get_rank(), {}
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.AVG, dist.ReduceOp.PRODUCT):
        x = _tensor(rank + 1.0, 2.0)
        dist.all_reduce(x, op)
        found[str(op).split(".")[-1]] = x.tolist()
    flags = _tensor(rank, 0, dtype=torch.bool)
    dist.broadcast(flags, 1)
    parts = [_empty(1) for _ in range(3)]
    dist.all_gather(parts, _tensor(rank + 0.5))
    whole = _empty(3)
    dist.all_gather_into_tensor(whole, _tensor(float(rank)))
    share = _empty(1)
    dist.reduce_scatter_tensor(share, _tensor(1.0, 10.0, 100.0))
    summed = _tensor(rank + 1.0)
    dist.reduce(summed, 2)
    gathered = [_empty(1) for _ in range(3)] if rank == 1 else None
    dist.gather(_tensor(rank * 2.0), gathered, 1)
    given = _empty(1)
    dist.scatter(given, [_tensor(4.0), _tensor(5.0), _tensor(6.0)] if rank == 0 else None, 0)
    host = torch.tensor([float(rank)])
    dist.all_reduce(host)  # by gloo
    dist.barrier()
    return {
        **found,
        "broadcast": flags.tolist(),
        "all_gather": [part.item() for part in parts],
        "into": whole.tolist(),
        "reduce_scatter": share.item(),
        "reduce": summed.item(),
        "gather": [part.item() for part in gathered or []],
        "scatter": given.item(),
        "host": host.item(),
    }


def test_collectives_of_three_ranks() -> None:
    answers = run_standin(_collectives, ranks=3)
    for rank, found in enumerate(answers):
        assert found == {
            "SUM": [6.0, 6.0],
            "MAX": [3.0, 2.0],
            "MIN": [1.0, 2.0],
            "AVG": [2.0, 2.0],
            "PRODUCT": [6.0, 8.0],
            "broadcast": [True, False],
            "all_gather": [0.5, 1.5, 2.5],
            "into": [0.0, 1.0, 2.0],
            "reduce_scatter": [3.0, 30.0, 300.0][rank],
            "reduce": 6.0 if rank == 2 else rank + 1.0,
            "gather": [0.0, 2.0, 4.0] if rank == 1 else [],
            "scatter": 4.0 + rank,
            "host": 3.0,
        }


def _refusals() -> list[str]:
    rank, errors = dist.get_rank(), []
    group = dist.new_group(backend="standin_ccl")
    for tensor in (_tensor(1, dtype=torch.int16), _empty(4)[::2], torch.ones(2)):
        try:
            dist.isend(tensor, 1 - rank, group=group)
        except (RuntimeError, ValueError) as error:
            errors.append(str(error))
    return errors


def test_what_nccl_cannot_send_is_refused() -> None:
    for errors in run_standin(_refusals, ranks=2):
        assert len(errors) == 3
        assert "unsupported data type Short" in errors[0]
        assert "must be contiguous" in errors[1]
        assert "cpu" in errors[2]


def _first_use(eager: bool) -> bool:
    """Whether the host of rank 0 could post a send before rank 1 posted anything."""
    word = torch.zeros(1)  # goes over the CPU group
    if dist.get_rank() == 1:
        dist.recv(word, 0)
        dist.irecv(_empty(1), 0).wait()
        return True
    works: list[Any] = []
    thread = threading.Thread(target=lambda: works.append(dist.isend(_tensor(1.0), 1)))
    thread.start()
    thread.join(None if eager else 0.3)
    posted = bool(works)
    dist.send(word, 1)
    thread.join()
    works[0].wait()
    return posted


@pytest.mark.parametrize("eager", [False, True])
def test_the_first_use_makes_the_communicator_and_blocks_the_host(eager: bool) -> None:
    assert run_standin(_first_use, eager, ranks=2, eager=eager)[0] is eager


def _order(matching: bool) -> tuple[list[float], list[str]]:
    """Tags are ignored: messages of a pair are met in the order of their posts."""
    from support.standin import process_group

    if dist.get_rank() == 0:
        works = [
            dist.isend(_tensor(1.0), 1, tag=1),
            dist.isend(_tensor(2.0) if matching else _tensor(2.0, 3.0), 1, tag=2),
        ]
        got = []
    else:
        got = [_empty(1).fill_(-1.0), _empty(1).fill_(-1.0)]
        works = [dist.irecv(got[0], 0, tag=2), dist.irecv(got[1], 0, tag=1)]
    for work in works:
        work.wait()
    return [value.item() for value in got], process_group.failures()


def test_messages_are_met_in_order_and_sizes_are_compared() -> None:
    assert run_standin(_order, True, ranks=2) == [([], []), ([1.0, 2.0], [])]
    sent, received = run_standin(_order, False, ranks=2)
    assert received[0] == [1.0, -1.0]
    assert "got 8 bytes of dtype 6, expected 4 bytes of dtype 6" in received[1][0]
    assert "expected another size" in sent[1][0]


def _both_send_first() -> list[bool]:
    """Each rank sends before it receives: on one communicator neither send is ever met."""
    other = 1 - dist.get_rank()
    works = [dist.isend(_tensor(1.0), other), dist.irecv(_empty(1), other)]
    end = time.monotonic() + 0.5
    while time.monotonic() < end and not all(work.is_completed() for work in works):
        time.sleep(0.01)
    done = [work.is_completed() for work in works]
    dist.distributed_c10d._abort_process_group()
    for work in works:
        work.wait()  # returns, without data and without an error
    return done


def test_two_sends_that_meet_on_one_communicator_hang_until_the_abort() -> None:
    assert run_standin(_both_send_first, ranks=2, timeout=60) == [[False, False]] * 2


def _batched() -> float:
    other, got = 1 - dist.get_rank(), _empty(1)
    ops = [dist.P2POp(dist.isend, _tensor(float(other)), other), dist.P2POp(dist.irecv, got, other)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return got.item()


def test_a_batch_of_sends_and_receives_has_no_order() -> None:
    assert run_standin(_batched, ranks=2) == [0.0, 1.0]


def _streams() -> tuple[list[str], list[str], float]:
    """A receive that was not waited for, a buffer written while it is sent, and the right way with a stream of its own."""
    from support import standin

    rank, errors = dist.get_rank(), []
    buffer = _tensor(3.0) if rank == 0 else _empty(1)
    post = dist.isend if rank == 0 else dist.irecv
    work = post(buffer, 1 - rank)
    try:
        buffer.add_(1)
    except RuntimeError as error:
        errors.append(str(error))
    work.wait()
    side = torch.Stream(device=buffer.device)
    with standin.counting() as waits:
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            work = post(buffer, 1 - rank)
            work.wait()
        torch.accelerator.current_stream().wait_stream(side)
        result = buffer * 2
    return errors, waits, result.item()


def test_posts_and_waits_order_streams() -> None:
    sent, received = run_standin(_streams, ranks=2)
    assert "writes memory read by op send on stream standin:0/" in sent[0][0]
    assert "memory written by op recv on stream standin:1/" in received[0][0]
    assert sent[1] == received[1] == []
    assert sent[2] == received[2] == 6.0


def _device_wait() -> float:
    """Rank 1 sends late. Waiting for the whole device waits for the receive as well."""
    if dist.get_rank() == 1:
        work = dist.isend(_tensor(5.0), 0)
        time.sleep(0.3)
        second = dist.isend(_tensor(6.0), 0)
        work.wait(), second.wait()
        return 6.0
    got = _empty(1)
    dist.irecv(_empty(1), 1)
    dist.irecv(got, 1)
    torch.accelerator.synchronize()
    return got.item()


def test_waiting_for_the_device_waits_for_its_messages() -> None:
    assert run_standin(_device_wait, ranks=2) == [6.0, 6.0]


def _subgroups() -> list[float]:
    """Groups of an eager one are eager as well; the rank that is not a member makes nothing."""
    rank, got = dist.get_rank(), []
    for members in ([0, 1], [1, 2], [0, 1, 2]):
        group = dist.new_group(members)
        if rank in members:
            x = _tensor(float(rank + 1))
            dist.all_reduce(x, group=group)
            got.append(x.item())
    return got


@pytest.mark.parametrize("eager", [False, True])
def test_groups_of_some_of_the_ranks(eager: bool) -> None:
    assert run_standin(_subgroups, ranks=3, eager=eager) == [[3.0, 6.0], [3.0, 5.0, 6.0], [5.0, 6.0]]


def _abort_by_a_watcher(at_first_use: bool) -> tuple[bool, str]:
    """Rank 1 leaves, also its group. Rank 0 waits for a message until a thread aborts the group."""
    dist.all_reduce(
        torch.zeros(1)
    )  # in host memory: a rank that leaves at once would disturb the connection of the other
    if dist.get_rank() == 1:
        if not at_first_use:
            dist.irecv(_empty(1), 0).wait()
        return True, ""
    if not at_first_use:
        dist.isend(_tensor(1.0), 1).wait()
    got = _tensor(7.0)
    group = dist.group.WORLD._get_backend(got.device)
    early: list[bool] = []
    works: list[Any] = []

    def watch() -> None:
        time.sleep(0.4)
        early.append(any(work.is_completed() for work in works))
        group.abort()

    thread = threading.Thread(target=watch)
    thread.start()
    error = ""
    try:
        works.append(dist.irecv(got, 1))
        works[0].wait()
    except RuntimeError as raised:
        error = str(raised)
    thread.join()
    return early[0], error or str(got.item())


@pytest.mark.parametrize("at_first_use", [False, True])
def test_a_lost_rank_is_not_noticed_until_the_group_is_aborted(at_first_use: bool) -> None:
    early, answer = run_standin(_abort_by_a_watcher, at_first_use, ranks=2, timeout=60)[0]
    assert not early
    assert "aborted" in answer if at_first_use else answer == "7.0"
