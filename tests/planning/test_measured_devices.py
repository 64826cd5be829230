"""Plans for the devices of a job: measured links, and the memory that its devices have."""

from __future__ import annotations

import dataclasses

import pytest
from planning_samples import chain, planned, sample_costs, sizes_of

from pipepart.errors import PlanError
from pipepart.partition import Link
from pipepart.planning import Plan
from pipepart.planning.layout import BETWEEN_GPUS, Handling, Layout, MeasuredLinks

FAST, NETWORK = Link(100e9, 10e-6), Link(10e9, 30e-6)
RING, SLOW_RING = Link(80e9, 8e-6), Link(5e9, 40e-6)
TWO_HOSTS = MeasuredLinks((0, 0, 1, 1), FAST, NETWORK, RING, SLOW_RING)


def test_stages_use_the_link_between_their_hosts() -> None:
    one_pipeline = Layout.uniform(4, 1, links=TWO_HOSTS)
    assert one_pipeline.link(0, 1) == FAST
    assert one_pipeline.link(1, 2) == one_pipeline.link(0, 3) == NETWORK
    pipelines = Layout.uniform(2, 2, links=TWO_HOSTS)  # each replica on one host
    assert pipelines.link(0, 1) == FAST
    crossed = Layout.uniform(2, 2, links=dataclasses.replace(TWO_HOSTS, hosts=(0, 0, 0, 1)))
    assert crossed.link(0, 1) == NETWORK, "the slowest link over all replicas"


def test_sums_use_what_was_measured_for_sums() -> None:
    pipelines = Layout.uniform(2, 2, links=TWO_HOSTS)
    assert pipelines.reduce_seconds(0, 1e6) == pytest.approx(2 * (SLOW_RING.latency + 0.5e6 / SLOW_RING.bandwidth))
    on_one_host = Layout.uniform(2, 2, links=dataclasses.replace(TWO_HOSTS, hosts=(0, 0, 0, 0)))
    assert on_one_host.reduce_seconds(1, 1e6) == pytest.approx(2 * (RING.latency + 0.5e6 / RING.bandwidth))
    ties = Layout.uniform(4, 1, links=TWO_HOSTS)
    assert ties.tie_seconds((0, 1), 1e6) == pytest.approx(2 * (FAST.latency + 0.5e6 / FAST.bandwidth))
    assert ties.tie_seconds((0, 3), 1e6) == pytest.approx(2 * (NETWORK.latency + 0.5e6 / NETWORK.bandwidth))


def test_a_kind_of_link_that_no_neighbours_have_is_taken_from_the_other_kind() -> None:
    only = MeasuredLinks((0, 1, 0, 1), between=NETWORK)
    layout = Layout.uniform(4, 1, links=only, across=BETWEEN_GPUS)
    assert layout.link(0, 2) == NETWORK
    assert layout.between_replicas(0) == BETWEEN_GPUS


def _planned(**request: object) -> Plan:
    graph = chain(8)
    return planned(
        graph, sample_costs(graph), 2, sizes_of(graph), stages=2, microbatches=8, schedule="gpipe", **request
    )


def test_without_a_limit_nothing_recomputes_and_a_full_device_makes_chunks_recompute() -> None:
    free = _planned()
    assert not any(free.recomputes)
    least = 0.95 * min(memory.total for memory in free.memory)
    short = _planned(stage_memory=(least, least), memory_source="device of 1 GB")
    assert any(short.recomputes)
    assert short.memory_limit == pytest.approx(least)
    assert "(device of 1 GB)" in short.describe()


def test_the_limit_of_the_user_is_preferred() -> None:
    needed = max(memory.total for memory in _planned().memory)
    more = _planned(stage_memory=(0.9 * needed,) * 2, memory_source="device of 1 GB", memory_limit=2 * needed)
    assert not any(more.recomputes)
    assert more.memory_limit == 2 * needed
    assert more.memory_source == "memory_limit"


def test_each_stage_has_the_limit_of_its_own_devices() -> None:
    needed = [memory.total for memory in _planned().memory]
    uneven = _planned(stage_memory=(100 * needed[0], 0.9 * needed[1]), memory_source="device of 1 GB on rank 1")
    assert uneven.memory[1].total <= 0.9 * needed[1]
    assert not uneven.recomputes[0]


def test_an_error_says_where_the_limit_comes_from() -> None:
    with pytest.raises(PlanError, match=r"limit by device of 1 GB"):
        _planned(stage_memory=(10.0, 10.0), memory_source="device of 1 GB")


def test_links_are_in_the_plan_and_change_its_step() -> None:
    links = MeasuredLinks((0, 1), between=Link(1e6, 1e-3))
    slow = _planned(links=links, handling=Handling())
    fast = _planned(links=dataclasses.replace(links, between=FAST), handling=Handling())
    assert slow.step_time > fast.step_time
    assert slow.links == (("messages between hosts", 1e6, 1e-3),)
    assert "links      measured: messages between hosts 1 MB/s + 1.00 ms" in slow.describe()
    assert Plan.from_json(slow.to_json()) == slow
    assert slow.hash != fast.hash


def test_a_plan_without_them_has_the_file_that_it_had_before() -> None:
    text = _planned().to_json()
    assert "memory_source" not in text
    assert '"links"' not in text
