"""Transport between CPU processes of one host: tensors through shared memory, notices through a local socket.

A pair of stages has one socket. The sender copies a tensor into a segment of shared memory and sends a small notice;
the receiver copies it out and sends the segment back as free. Nobody polls, and a send never waits: a segment that is
not free is not waited for, another one is made. Segments and sockets have no names in the file system (they are
memory files handed over by descriptor, and abstract sockets), so nothing is left behind by a process that is killed,
and a peer that dies is noticed at once by the end of its socket.
"""

from __future__ import annotations

import mmap
import os
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress

import torch
import torch.distributed as dist

from pipepart.runtime.mesh import Groups
from pipepart.runtime.transport import Pending

__all__ = ["SharedMemoryTransport", "one_host"]

_NOTICE = struct.Struct("<BQQ")  # kind, segment, bytes
_DATA, _NEW, _FREE = 0, 1, 2
_LEAST = 1 << 12  # bytes of the smallest segment


def one_host(groups: Groups) -> bool:
    """Whether all ranks of this replica can share memory: same running system, and one that has memory files."""
    if not hasattr(os, "memfd_create") or not hasattr(socket, "AF_UNIX"):
        return False
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            here = f"{file.read().strip()}:{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        here = f"unknown:{groups.rank}"
    found: list[str] = [""] * groups.mesh.stages
    dist.all_gather_object(found, here, group=groups.pipeline)
    return len(set(found)) == 1


class _Segment:
    def __init__(self, descriptor: int, size: int) -> None:
        self.size, self.descriptor = size, descriptor
        self._map = mmap.mmap(descriptor, size)
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)


class _Peer:
    """One end of the socket of a pair, with the segments of both directions."""

    def __init__(self, connection: socket.socket, who: str, timeout: float) -> None:
        self._socket, self._who, self._timeout = connection, who, timeout
        connection.setblocking(False)
        self._mine: dict[int, _Segment] = {}
        self._free: list[int] = []
        self._theirs: dict[int, _Segment] = {}
        self._arrived: deque[tuple[int, int]] = deque()

    def send(self, tensor: torch.Tensor) -> None:
        data = _as_bytes(tensor)
        self._read(block=False)  # segments that came back
        number = self._take(data.numel())
        segment = self._mine[abs(number)]
        segment.bytes[: data.numel()].copy_(data)
        if number < 0:  # a new segment goes with its descriptor
            self._notify(_NEW, -number, data.numel(), [segment.descriptor])
            os.close(segment.descriptor)
        else:
            self._notify(_DATA, number, data.numel())

    def recv(self, tensor: torch.Tensor) -> None:
        while not self._arrived:
            self._read(block=True)
        number, size = self._arrived.popleft()
        data = _as_bytes(tensor)
        if size != data.numel():
            raise RuntimeError(f"expected {data.numel()} bytes from {self._who}, got {size}")
        data.copy_(self._theirs[number].bytes[:size])
        with suppress(ConnectionError):  # a peer that has ended after its last message needs nothing back
            self._notify(_FREE, number, 0)

    def _take(self, size: int) -> int:
        """A free segment that is large enough (the smallest), or a new one as a negative number."""
        fitting = [number for number in self._free if self._mine[number].size >= size]
        if fitting:
            best = min(fitting, key=lambda number: self._mine[number].size)
            self._free.remove(best)
            return best
        room = max(_LEAST, 1 << (size - 1).bit_length())
        descriptor = os.memfd_create("pipepart", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, room)
        number = len(self._mine) + 1
        self._mine[number] = _Segment(descriptor, room)
        return -number

    def _notify(self, kind: int, number: int, size: int, descriptors: list[int] | None = None) -> None:
        notice = _NOTICE.pack(kind, number, size)
        deadline = time.monotonic() + self._timeout
        while True:
            try:
                if descriptors:
                    socket.send_fds(self._socket, [notice], descriptors)
                else:
                    self._socket.send(notice)
                return
            except BlockingIOError:  # the peer has not read for long: make room by reading, then wait for it
                self._read(block=False)
                self._await(write=True, deadline=deadline)

    def _read(self, block: bool) -> None:
        """Take in notices: all that are here, or wait for one."""
        deadline = time.monotonic() + self._timeout
        while True:
            try:
                data, descriptors, _, _ = socket.recv_fds(self._socket, _NOTICE.size, 1)
            except BlockingIOError:
                if not block:
                    return
                self._await(write=False, deadline=deadline)
                continue
            except ConnectionResetError:  # it ended with notices of ours unread; what it sent before is still to come
                continue
            if not data:
                if block:
                    raise ConnectionResetError(f"{self._who} is gone: Connection closed by peer")
                return  # it has ended, but all that was waited for is here
            kind, number, size = _NOTICE.unpack(data)
            if kind == _FREE:
                self._free.append(number)
                continue
            if kind == _NEW:
                length = os.fstat(descriptors[0]).st_size
                self._theirs[number] = _Segment(descriptors[0], length)
                os.close(descriptors[0])
            self._arrived.append((number, size))
            block = False  # one is here; take what else has come and go on

    def _await(self, write: bool, deadline: float) -> None:
        left = deadline - time.monotonic()
        waiting = select.poll()  # not select(), which takes no descriptor above 1023
        waiting.register(self._socket, select.POLLOUT if write else select.POLLIN)
        if left <= 0 or not waiting.poll(left * 1000):
            what = "take a message" if write else "send"
            raise TimeoutError(f"Timed out waiting {self._timeout:.0f} s for {self._who} to {what}")

    def close(self) -> None:
        self._socket.close()


class _Done:
    """A send that is over when it returns: the tensor has been copied."""

    def wait(self) -> None:
        return

    def is_completed(self) -> bool:
        return True


class _Receive:
    """A receive that is carried out when it is waited for; those before it in the same channel go first."""

    def __init__(self, channel: deque[_Receive], peer: _Peer, tensor: torch.Tensor) -> None:
        self._channel, self._peer, self._tensor, self._over = channel, peer, tensor, False
        channel.append(self)

    def wait(self) -> None:
        while not self._over:
            first = self._channel[0]
            self._peer.recv(first._tensor)
            first._over = True
            self._channel.popleft()

    def is_completed(self) -> bool:
        return self._over


_DONE = _Done()


class SharedMemoryTransport:
    """`Transport` for the CPU processes of one replica on one host. Made by all of its ranks together."""

    def __init__(self, groups: Groups, timeout: float) -> None:
        self._stage = groups.stage
        self._peers = _connect(groups, timeout)
        self._expected: dict[int, deque[_Receive]] = {stage: deque() for stage in self._peers}

    def send(self, tensor: torch.Tensor, target: int) -> Pending:
        self._peers[target].send(tensor)
        return _DONE

    def recv(self, tensor: torch.Tensor, source: int) -> Pending:
        return _Receive(self._expected[source], self._peers[source], tensor)

    def close(self) -> None:
        for peer in self._peers.values():
            peer.close()


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def _connect(groups: Groups, timeout: float) -> Mapping[int, _Peer]:
    """A socket to every other stage of the replica: the higher stage listens, the lower one connects."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(f"\0pipepart-{os.getpid()}-{os.urandom(8).hex()}")
    listener.listen(groups.mesh.stages)
    addresses: list[bytes] = [b""] * groups.mesh.stages
    name = listener.getsockname()
    dist.all_gather_object(addresses, name if isinstance(name, bytes) else name.encode(), group=groups.pipeline)
    found: dict[int, socket.socket] = {}
    for stage in range(groups.stage + 1, groups.mesh.stages):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.settimeout(timeout)
        connection.connect(addresses[stage])
        connection.send(struct.pack("<Q", groups.stage))
        found[stage] = connection
    listener.settimeout(timeout)
    for _ in range(groups.stage):
        connection, _ = listener.accept()
        connection.settimeout(timeout)
        user = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1]
        if user != os.getuid():  # an abstract name is open to every user of the host
            raise RuntimeError(f"a process of user {user} tried to join this pipeline")
        found[struct.unpack("<Q", connection.recv(8))[0]] = connection
    listener.close()
    return {
        stage: _Peer(c, f"stage {stage} (rank {groups.rank_of_stage(stage)})", timeout) for stage, c in found.items()
    }
