"""For all tests: a cache of their own, quiet libraries, and no process left behind."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from support.side_by_side import (  # noqa: F401
    pytest_collection_modifyitems,
    pytest_configure_node,
    pytest_xdist_auto_num_workers,
    pytest_xdist_make_scheduler,
)

_WORKER = os.environ.get("PYTEST_XDIST_WORKER", "")
if _WORKER or "PIPEPART_CACHE" not in os.environ:
    os.environ["PIPEPART_CACHE"] = tempfile.mkdtemp(prefix=f"pipepart-cache-{_WORKER}")
    atexit.register(shutil.rmtree, os.environ["PIPEPART_CACHE"], ignore_errors=True)
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("WANDB_SILENT", "true")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def pytest_collection_finish(session: pytest.Session) -> None:
    """The libraries and the tests stay until the end: the garbage collector need not search them again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _no_process_left():
    yield
    from support.ranks import stop_pools

    stop_pools()


@contextmanager
def _environment_put_back() -> Iterator[None]:
    """A Trainer leaves variables behind (MASTER_PORT, LOCAL_RANK): jobs that later tests start would meet at one port."""
    before = dict(os.environ)
    yield
    now = os.environ.get("PYTEST_CURRENT_TEST")
    for name in set(os.environ) - set(before):
        del os.environ[name]
    os.environ.update(before)
    if now is not None:
        os.environ["PYTEST_CURRENT_TEST"] = now


@pytest.fixture(scope="module", autouse=True)
def _environment_stays_after_a_module() -> Iterator[None]:
    """Also after the fixtures of a module, of which some run a Trainer in this process."""
    with _environment_put_back():
        yield


@pytest.fixture(autouse=True)
def _environment_stays() -> Iterator[None]:
    with _environment_put_back():
        yield


@pytest.fixture(autouse=True)
def _one_thread_and_seed():
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
