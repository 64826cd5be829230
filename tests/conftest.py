"""For all tests: a cache of their own, quiet libraries, and no process left behind."""

from __future__ import annotations

import os
import tempfile

import pytest

os.environ.setdefault("PIPEPART_CACHE", tempfile.mkdtemp(prefix="pipepart-cache-"))
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("WANDB_SILENT", "true")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


@pytest.fixture(scope="session", autouse=True)
def _no_process_left():
    yield
    from support.ranks import stop_pools

    stop_pools()


@pytest.fixture(autouse=True)
def _one_thread_and_seed():
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
