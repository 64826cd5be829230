"""The key of a job on several hosts is not in the store that everyone can read, and every connection is proved with it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist
from support.ranks import run_ranks

from pipepart.errors import PipelineError
from pipepart.runtime.job_key import agreed_key, prove


class _Recorded:
    """A store that remembers everything that passes it, and in which another process has written before."""

    def __init__(self, **written: str) -> None:
        self.store, self.seen = dist.HashStore(), list[bytes]()
        self.written = {key.replace("_", "/"): value for key, value in written.items()}

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        self.seen.append(value.encode())
        if key in self.written:
            return self.written[key].encode()
        return bytes(self.store.compare_set(key, expected, value))

    def set(self, key: str, value: str) -> None:
        self.seen.append(value.encode())
        self.store.set(key, self.written.get(key, value))

    def get(self, key: str) -> bytes:
        return bytes(self.store.get(key))


def _together(*calls: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as threads:
        started = [threads.submit(call) for call in calls]
        return [call.exception(60) or call.result() for call in started]


def _agreed(store: Any, tokens: list[str]) -> list[Any]:
    return _together(*(partial(agreed_key, store, rank, len(tokens), token) for rank, token in enumerate(tokens)))


@pytest.mark.parametrize("token", ["", "a secret"])
def test_all_ranks_have_one_random_key_that_was_never_in_the_store(token: str) -> None:
    first, second = _Recorded(), _Recorded()
    keys = _agreed(first, [token] * 4)
    assert len(set(keys)) == 1 and len(keys[0]) == 32
    assert set(_agreed(second, [token] * 4)).isdisjoint(keys), "another job has another key"
    assert not any(keys[0].hex() in value.decode() or keys[0] in value for value in first.seen)


def test_hosts_with_different_tokens_do_not_agree() -> None:
    _, error = _agreed(_Recorded(), ["a secret", "another"])
    assert isinstance(error, PipelineError) and "PIPEPART_TOKEN differs" in str(error)


@pytest.mark.parametrize("value", ["00" * 64, "no hex", ""])
def test_a_key_that_another_process_has_written_is_refused(value: str) -> None:
    _, error = _agreed(_Recorded(sealed_1=value), ["", ""])
    assert isinstance(error, PipelineError) and "the key for rank 1" in str(error)


@pytest.mark.parametrize("number", ["1", "0", "f" * 512, "no number", "f" * 10_000])
def test_a_number_in_the_place_of_a_rank_is_refused(number: str) -> None:
    """A number of a small group would let everyone compute the key."""
    store = _Recorded()
    store.store.set("public/0", number)
    with pytest.raises(PipelineError, match="the place of rank 0"):
        agreed_key(store, 1, 2, "")  # type: ignore[arg-type]
    with pytest.raises(PipelineError, match="the place of rank 1"):
        agreed_key(_Recorded(public_1="5"), 1, 2, "")  # type: ignore[arg-type]


def _proved(key_of_last: bytes) -> str:
    group = dist.new_group(backend="gloo")
    last = dist.get_rank() == dist.get_world_size() - 1
    try:
        prove(group, key_of_last if last else b"k" * 32)
    except PipelineError as error:
        return str(error)
    return ""


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_each_connection_is_proved(size: int) -> None:
    assert run_ranks(size, _proved, b"k" * 32) == [""] * size
    found = run_ranks(size, _proved, b"x" * 32)
    assert all(f"to rank {rank} in the place of rank {size - 1};" in found[rank] for rank in range(size - 1)), found
    assert f"to rank {size - 1} in the place of rank 0;" in found[-1]


def _over_the_network() -> tuple[str, bool]:
    """As ranks of several hosts: the default store is one of torch that serves everyone."""
    from datetime import timedelta

    from pipepart.runtime import Groups, Mesh
    from pipepart.runtime.job_key import _is_private
    from pipepart.runtime.meeting import gather_objects
    from pipepart.runtime.rendezvous import job_store

    rank, size, files = dist.get_rank(), dist.get_world_size(), job_store()
    assert _is_private(files)
    if rank == 0:
        served = dist.TCPStore("127.0.0.1", 0, size, True, wait_for_workers=False)
        files.set("port of this test", str(served.port))
    else:
        served = dist.TCPStore("127.0.0.1", int(files.get("port of this test")), size, False)
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=served, rank=rank, world_size=size)
    assert not _is_private(job_store())
    groups = Groups.create(Mesh(1, size), timedelta(seconds=60))
    assert gather_objects(rank, groups) == list(range(size))
    known = served.check(["default_pg/0//pipepart/key"]) or job_store().check(["pipepart/key"])
    dist.barrier()
    return groups.key.hex(), known


@pytest.mark.slow
def test_ranks_that_meet_in_an_open_store_agree_on_a_key() -> None:
    found = run_ranks(3, _over_the_network)
    assert len({key for key, _ in found}) == 1
    assert not any(known for _, known in found), "no key is in the store"
