"""Which tests run in one worker, and in which order, where `make test` runs them side by side (pytest-xdist).

The tests of a file stay in one worker, unless they have an `xdist_group` of their own: they share fixtures, pools of
ranks and what they have computed. Files with the longest time limits come first, then those with the most slow tests.
Only workers see the marks of the tests, and the scheduler is elsewhere: they leave a table for it.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from support.long_tests import mark_long

try:
    from xdist.scheduler import LoadScopeScheduling
except ImportError:  # pytest alone runs the tests one after the other
    LoadScopeScheduling = object

__all__ = [
    "pytest_collection_modifyitems",
    "pytest_configure_node",
    "pytest_xdist_auto_num_workers",
    "pytest_xdist_make_scheduler",
]

_MEMORY_OF_A_WORKER = 2.5e9
"""Bytes that a worker and its processes need at most."""
_TABLE = "pipepart_groups"


class _ByGroup(LoadScopeScheduling):
    """Hands out groups in the order in which the workers have put the tests."""

    def __init__(self, config: pytest.Config, log: Any, table: Path) -> None:
        super().__init__(config, log)
        self._table, self._groups = table, dict[str, str]()

    def schedule(self) -> None:
        if not self._groups:
            self._groups = json.loads(self._table.read_text())
            self._table.unlink()
        super().schedule()

    def _split_scope(self, nodeid: str) -> str:
        return self._groups[nodeid]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Slow tests wait for processes half of their time: two workers for each core. Quick ones alone mostly compute."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    wanted = cores + (cores + 1) // 2 if "not slow" in config.getoption("markexpr") else 2 * cores
    return max(1, min(wanted, 16, int(memory / _MEMORY_OF_A_WORKER)))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput[_TABLE] = str(_table(node.config))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Ours for ``--dist loadscope``; all others as they are."""
    if config.getvalue("dist") != "loadscope":
        return None
    config.option.loadscopereorder = False
    return _ByGroup(config, log, _table(config))


def _table(config: Any) -> Path:
    return Path(tempfile.gettempdir()) / f"pipepart-groups-{os.getpid()}-{id(config)}.json"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the long tests. In a worker: put the groups in order, and leave the table."""
    mark_long(items)
    table = getattr(config, "workerinput", {}).get(_TABLE)
    if table is None:
        return  # a single process runs them in the order of the files
    groups: dict[str, list[pytest.Item]] = {}
    for item in items:
        groups.setdefault(_group(item), []).append(item)
    items[:] = [item for members in sorted(groups.values(), key=_weight, reverse=True) for item in members]
    beside = Path(f"{table}.{os.getpid()}")
    beside.write_text(json.dumps({item.nodeid: name for name, members in groups.items() for item in members}))
    beside.replace(table)


def _group(item: pytest.Item) -> str:
    given = item.get_closest_marker("xdist_group")
    if given is not None:
        return str(given.args[0])
    return item.nodeid.split("::")[0]


def _weight(members: list[pytest.Item]) -> tuple[float, int, int]:
    """The longest time limit of a slow test among them, how many slow ones there are, and how many in all."""
    slow = [item for item in members if item.get_closest_marker("slow") is not None]
    limits = [item.get_closest_marker("timeout") for item in slow]
    limit = max((float(mark.args[0]) for mark in limits if mark is not None and mark.args), default=0.0)
    return limit, len(slow), len(members)
