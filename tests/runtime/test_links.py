"""Links and memory of a job with several processes: measured, collected, and used by one plan on all ranks.

The processes compute on the CPU and are told that it is an accelerator.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
from support.ranks import run_ranks
from torch import nn

from pipepart.build import job_devices
from pipepart.build.job_devices import joined_rooms
from pipepart.build.links import OwnLinks, joined_links, measure_links
from pipepart.cost.device_memory import Room
from pipepart.partition import Link
from pipepart.runtime import Groups, Mesh


def _measure() -> OwnLinks:
    groups = Groups.create(Mesh(2, 2), timedelta(seconds=60))
    with mock.patch.object(socket, "gethostname", return_value=f"host{groups.replica}"):
        return measure_links(groups, torch.device("cpu"), large=2**20)


@pytest.mark.slow
def test_each_rank_measures_its_neighbours_and_the_sums_of_its_stage() -> None:
    found = run_ranks(4, _measure)
    assert [[peer for peer, _ in own.messages] for own in found] == [[1], [0], [3], [2]]
    links = joined_links(found, Mesh(2, 2))
    assert links.hosts == (0, 0, 1, 1)
    assert links.between is None
    assert links.sums_inside is None
    for link in (links.inside, links.sums_between):
        assert link is not None
        assert 1e6 < link.bandwidth < 1e13
        assert 0 < link.latency < 1


def test_the_slowest_link_of_each_kind_counts() -> None:
    a, b, c = Link(3.0, 1.0), Link(2.0, 3.0), Link(9.0, 9.0)
    found = [OwnLinks("x", ((1, a),)), OwnLinks("x", ((0, b), (2, c))), OwnLinks("y", ((1, c),))]
    links = joined_links(found, Mesh(1, 3))
    assert links.hosts == (0, 0, 1)
    assert (links.inside, links.between) == (Link(2.0, 3.0), c)


def test_a_stage_has_the_memory_of_its_smallest_device() -> None:
    rooms = [Room(100, 0, 10), Room(80, 5, 8), Room(60, 0, 6), None]
    memory, source = joined_rooms(rooms, Mesh(2, 2))
    assert memory == (54.0, 67.0)
    assert source.startswith("device of")
    assert source.endswith("on rank 2")
    assert joined_rooms([None, None], Mesh(1, 2)) == ((), "")


def _fits(small: int) -> tuple[bool, bool]:
    """Return whether a model was moved, and whether it is where that says; rank `small` has a small device."""
    groups = Groups.create(Mesh(1, 2), timedelta(seconds=60))
    room = Room(1000 if groups.rank == small else 10**9, 0, 0)
    root = nn.ModuleList([nn.Linear(16, 16), nn.Linear(2, 2, device="meta")])
    with (
        mock.patch("pipepart.cost.device_memory.computes_on_host", return_value=False),
        mock.patch("pipepart.cost.device_memory.room_of", return_value=room),
        mock.patch.object(job_devices, "computes_on_host", return_value=False),
    ):
        fits = job_devices.place_model(root, torch.device("meta"), groups)  # meta stands in for an accelerator
    return fits, all(parameter.is_meta for parameter in root.parameters()) == fits


@pytest.mark.slow
def test_a_model_stays_on_the_host_on_all_ranks_if_it_does_not_fit_on_one() -> None:
    assert run_ranks(2, _fits, -1) == [(True, True)] * 2
    assert run_ranks(2, _fits, 1) == [(False, True)] * 2


class _Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(12)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def _plan(limits: Any) -> dict[str, Any]:
    from pipepart import Pipeline

    def room(device: torch.device) -> Room | None:
        return None if limits is None else Room(limits[torch.distributed.get_rank()], 0, 0)

    torch.manual_seed(1)
    with (
        mock.patch.object(job_devices, "computes_on_host", return_value=False),
        mock.patch.object(job_devices, "room_of", room),
    ):
        pipe = Pipeline(_Deep(), (torch.randn(256, 16),), stages=2, microbatches=8, schedule="gpipe")
    plan = pipe.plan
    return {
        "hash": plan.hash,
        "recomputes": any(plan.recomputes),
        "limit": plan.memory_limit,
        "source": plan.memory_source,
        "links": [name for name, *_ in plan.links],
        "memory": [memory.total for memory in plan.memory],
    }


@pytest.mark.slow
def test_ranks_agree_on_a_plan_within_the_memory_of_the_smallest_device() -> None:
    free = run_ranks(2, _plan, None)
    assert free[0] == free[1]
    assert not free[0]["recomputes"]
    assert free[0]["limit"] is None
    assert free[0]["links"] == ["messages inside a host"]
    least = int(0.95 * min(free[0]["memory"]))
    short = run_ranks(2, _plan, [least + 8, least])
    assert short[0] == short[1]
    assert short[0]["recomputes"], "recompute='auto' must act"
    assert short[0]["limit"] == least
    assert short[0]["source"].endswith("on rank 1")
