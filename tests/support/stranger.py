"""Another user of the host, who finds the sockets of a job and writes to them."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

__all__ = ["NOBODY", "attack", "listeners", "only_root", "stores"]

only_root = pytest.mark.skipif(
    not Path("/proc/net/unix").exists() or os.getuid() != 0, reason="only root can become another user, on Linux"
)
Listener = tuple[str, str, int]
"""Family, address as in /proc/net, port."""
NOBODY = 65534
_HELLO = struct.pack("<bI", 0, 0x3C85F7CE)  # the first message to torch's TCP store
_PING = struct.pack("<bI", 13, 4711)
_SET = struct.pack("<bQ", 1, 4) + b"/key" + struct.pack("<Q", 4) + b"evil"
_WORDS = [b"", bytes(64), b"\xff" * 4096, b"GET / HTTP/1.0\r\n\r\n", _HELLO, _HELLO + _SET, _HELLO + _PING]


def listeners(mark: str, also: str = "") -> tuple[list[Listener], list[bytes]]:
    """Return the ports and the abstract names on which processes listen that have the marks in their environment."""
    own = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            variables = (folder / "environ").read_bytes()
            if mark.encode() in variables and also.encode() in variables:
                own |= {os.readlink(file) for file in (folder / "fd").iterdir()}
        except OSError:
            continue
    ports, names = [], []
    for family in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{family}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
                address, port = fields[1].split(":")
                ports.append((family, address, int(port, 16)))
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if len(fields) > 7 and fields[3] == "00010000" and fields[7].startswith("@") and f"socket:[{fields[6]}]" in own:
            names.append(b"\0" + fields[7][1:].encode())
    return ports, names


def attack(ports: list[Listener], names: list[bytes], seconds: float = 0.0) -> None:
    """As another user, connect to all sockets, write garbage and messages of torch's store, and keep the connections."""
    if not ports and not names:
        return
    child = os.fork()
    if not child:
        try:
            _attack(ports, names, seconds)
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


def _attack(ports: list[Listener], names: list[bytes], seconds: float) -> None:
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    inet = [(socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", port)) for family, _, port in ports if family == "tcp"]
    inet6 = [(socket.AF_INET6, socket.SOCK_STREAM, ("::1", port)) for family, _, port in ports if family == "tcp6"]
    local = [(socket.AF_UNIX, socket.SOCK_SEQPACKET, name) for name in names]
    kept = []
    for word in _WORDS:
        for family, kind, address in (*inet, *inet6, *local):
            connection = socket.socket(family, kind)
            connection.settimeout(5)
            try:
                connection.connect(address)
                connection.send(word)
            except OSError:
                continue
            kept.append(connection)
    time.sleep(seconds)


def stores(ports: Iterable[int]) -> set[int]:
    """Return the ports with torch's TCP store behind them: it answers a ping with the number that was sent."""
    with ThreadPoolExecutor(32) as pool:
        asked = {port: pool.submit(_is_store, port) for port in ports}
        return {port for port, answer in asked.items() if answer.result()}


def _is_store(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
            connection.sendall(_HELLO + _PING)
            return connection.recv(4) == struct.pack("<I", 4711)
    except OSError:  # it has been closed, or does not answer
        return False
