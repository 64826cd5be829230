"""Tests on several hosts are skipped, with the reason, where the system cannot make them."""

from __future__ import annotations

import pytest
from support.hosts import why_no_hosts


@pytest.fixture(autouse=True)
def _needs_hosts() -> None:
    reason = why_no_hosts()
    if reason is not None:
        pytest.skip(reason)
