"""Transport between CPU processes of one host: tensors go through shared memory, notices through a local socket.

Each pair of stages has one socket. The sender copies a tensor into a segment of shared memory and sends a small notice.
The receiver copies the tensor out, and one of its next notices tells that the segment is free. There is no polling, and a
send does not wait: if no segment is free, it makes a new one. Segments (memory files, passed by descriptor) and sockets
(abstract names) are not in the file system, so a killed process leaves nothing behind, and the end of its socket tells its
peers at once.
"""

from __future__ import annotations

import array
import ctypes
import mmap
import os
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial

import torch

from pipepart.runtime.failure import check_others
from pipepart.runtime.meeting import gather_objects
from pipepart.runtime.mesh import Groups
from pipepart.runtime.transport import Pending

__all__ = ["SharedMemoryTransport", "one_host"]

_FREED = 8  # freed segments in one notice, at most
_NOTICE = struct.Struct(f"<BQQB{_FREED}Q")  # kind, segment, bytes, number of freed segments, freed segments
_DATA, _NEW, _FREE = 0, 1, 2
_ROOM_FOR_DESCRIPTOR = socket.CMSG_SPACE(struct.calcsize("i")) if hasattr(socket, "CMSG_SPACE") else 0
_LEAST = 1 << 12  # bytes of the smallest segment
_LOOK = 1.0  # seconds between two looks at failures of other ranks


def one_host(groups: Groups) -> bool:
    """Return whether all ranks of this replica run on one system with memory files. All of them must call it."""
    if not hasattr(os, "memfd_create") or not hasattr(socket, "AF_UNIX"):
        return False
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            here = f"{file.read().strip()}:{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        here = f"unknown:{groups.rank}"
    return len(set(gather_objects(here, groups, inside_replica=True))) == 1


class _Segment:
    def __init__(self, descriptor: int, size: int) -> None:
        self.size, self.descriptor = size, descriptor
        self._map = mmap.mmap(descriptor, size)
        self._first = ctypes.c_char.from_buffer(self._map)
        self.address = ctypes.addressof(self._first)


class _Peer:
    """One end of the socket of a pair, with the segments of both directions."""

    def __init__(self, connection: socket.socket, who: str, timeout: float, look: Callable[[], None]) -> None:
        """`look` is called regularly while waiting, and raises if another rank has failed."""
        self._socket, self._who, self._timeout, self._look = connection, who, timeout, look
        connection.setblocking(False)
        self._readable, self._writable = select.poll(), select.poll()  # not select(): no descriptor above 1023
        self._readable.register(connection, select.POLLIN)
        self._writable.register(connection, select.POLLOUT)
        self._mine: dict[int, _Segment] = {}
        self._free: list[int] = []
        self._theirs: dict[int, _Segment] = {}
        self._arrived: deque[tuple[int, int]] = deque()
        self._done: list[int] = []
        """Segments of the peer that are free again; the next notice tells it."""

    def send(self, tensor: torch.Tensor) -> None:
        assert tensor.is_contiguous()
        size = tensor.nbytes
        number = self._take(size)
        segment = self._mine[abs(number)]
        ctypes.memmove(segment.address, tensor.data_ptr(), size)
        if number < 0:  # a new segment goes with its descriptor
            self._notify(_NEW, -number, size, segment.descriptor)
            os.close(segment.descriptor)
        else:
            self._notify(_DATA, number, size)

    def recv(self, tensor: torch.Tensor) -> None:
        if not self._arrived:
            self._read(block=True)
        number, size = self._arrived.popleft()
        assert tensor.is_contiguous()
        if size != tensor.nbytes:
            raise RuntimeError(f"expected {tensor.nbytes} bytes from {self._who}, got {size}")
        ctypes.memmove(tensor.data_ptr(), self._theirs[number].address, size)
        self._done.append(number)
        if len(self._done) == _FREED:
            with suppress(ConnectionError):  # a peer that has ended needs no segments
                self._notify(_FREE, 0, 0)

    def _take(self, size: int) -> int:
        """Return the smallest free segment that is large enough, or a new one as a negative number."""
        best = self._smallest(size)
        if best is None:
            self._read(block=False)  # segments may be free again
            best = self._smallest(size)
        if best is not None:
            self._free.remove(best)
            return best
        room = max(_LEAST, 1 << (size - 1).bit_length())
        descriptor = os.memfd_create("pipepart", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, room)
        number = len(self._mine) + 1
        self._mine[number] = _Segment(descriptor, room)
        return -number

    def _smallest(self, size: int) -> int | None:
        fitting = [number for number in self._free if self._mine[number].size >= size]
        return min(fitting, key=lambda number: self._mine[number].size, default=None)

    def _notify(self, kind: int, number: int, size: int, descriptor: int | None = None) -> None:
        done, self._done = self._done, []
        notice = _NOTICE.pack(kind, number, size, len(done), *done, *[0] * (_FREED - len(done)))
        deadline = time.monotonic() + self._timeout
        while True:
            try:
                if descriptor is not None:
                    socket.send_fds(self._socket, [notice], [descriptor])
                else:
                    self._socket.send(notice)
                return
            except BlockingIOError:  # the socket is full: read, so that the peer can send, and wait
                self._read(block=False)
                self._await(write=True, deadline=deadline)

    def _read(self, block: bool) -> None:
        """Read notices: with `block`, up to the next tensor; else all that have arrived."""
        deadline = time.monotonic() + self._timeout
        while True:
            if block:  # usually no notice is here yet, and the read would fail
                self._await(write=False, deadline=deadline)
            try:
                data, ancillary, _, _ = self._socket.recvmsg(_NOTICE.size, _ROOM_FOR_DESCRIPTOR)
            except BlockingIOError:
                if not block:
                    return
                continue
            except ConnectionResetError:  # the peer ended with unread notices; its own are still readable
                continue
            if not data:
                if block:
                    raise ConnectionResetError(f"{self._who} is gone: Connection closed by peer")
                return  # the peer has ended after its last notice
            kind, number, size, count, *freed = _NOTICE.unpack(data)
            self._free.extend(freed[:count])
            if kind == _FREE:
                continue
            if kind == _NEW:
                descriptor = array.array("i", ancillary[0][2])[0]
                self._theirs[number] = _Segment(descriptor, os.fstat(descriptor).st_size)
                os.close(descriptor)
            self._arrived.append((number, size))
            if block:
                return

    def _await(self, write: bool, deadline: float) -> None:
        ready = self._writable if write else self._readable
        while (left := deadline - time.monotonic()) > 0:
            if ready.poll(min(left, _LOOK) * 1000):
                return
            self._look()
        what = "take a message" if write else "send"
        raise TimeoutError(f"Timed out waiting {self._timeout:.0f} s for {self._who} to {what}")

    def close(self) -> None:
        self._socket.close()


class _Done:
    """A finished send: the tensor has been copied."""

    def wait(self) -> None:
        return

    def is_completed(self) -> bool:
        return True


class _Receive:
    """A receive that runs when it is waited for, after earlier receives of the same channel."""

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
    """`Transport` for the CPU processes of one replica on one host. All of its ranks create it together."""

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


def _connect(groups: Groups, timeout: float) -> Mapping[int, _Peer]:
    """Return a socket to every other stage of the replica: the higher stage listens, the lower one connects."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(f"\0pipepart-{os.getpid()}-{os.urandom(8).hex()}")
    listener.listen(groups.mesh.stages)
    name = listener.getsockname()
    addresses = gather_objects(name if isinstance(name, bytes) else name.encode(), groups, inside_replica=True)
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
        if user != os.getuid():  # every user of the host can connect to an abstract name
            raise RuntimeError(f"a process of user {user} tried to join this pipeline")
        found[struct.unpack("<Q", connection.recv(8))[0]] = connection
    listener.close()
    return {
        stage: _Peer(c, f"stage {stage} (rank {groups.rank_of_stage(stage)})", timeout, partial(check_others, groups))
        for stage, c in found.items()
    }
