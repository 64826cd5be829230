"""A store of objects with the interface of S3 on this host: moto's server, a process of its own in the tests."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

__all__ = ["BUCKET", "made_store"]

BUCKET = "s3://pipepart-tests"
_PATIENCE = 120  # seconds; a busy machine takes long to import


@contextmanager
def made_store() -> Iterator[dict[str, str]]:
    """Inside, a store with a bucket; yields the environment of programs that use it."""
    for name in ("s3fs", "moto", "flask"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"there is no {name}, which the local object store needs")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    environment = {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "tests",
        "AWS_SECRET_ACCESS_KEY": "tests-only",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",
    }
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, **environment}
    )
    try:
        _wait_for(url, server)
        request = urllib.request.Request(f"{url}/{BUCKET.removeprefix('s3://')}", method="PUT")
        urllib.request.urlopen(request, timeout=_PATIENCE).read()
        yield environment
    finally:
        server.kill()
        server.wait()


def _wait_for(url: str, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            urllib.request.urlopen(f"{url}/moto-api/", timeout=5).read()
            return
        except OSError:
            assert server.poll() is None, "the server of objects has ended"
            assert time.monotonic() < deadline, "the server of objects does not answer"
            time.sleep(0.2)
