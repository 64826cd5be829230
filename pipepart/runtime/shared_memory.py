"""Transport between CPU processes of one host: tensors go through shared memory, notices through a local socket.

Each pair of stages has one socket. The sender copies a tensor into a segment of shared memory and sends a small notice.
The receiver copies the tensor out, and one of its next notices reports that the segment is free. There is no polling, and a
send does not wait: if no segment is free, it makes a new one. Segments (memory files, passed by descriptor) and sockets
(abstract names) are not in the file system, so a killed process leaves nothing behind, and the end of its socket tells its
peers at once.
"""

from __future__ import annotations

import array
import ctypes
import hmac
import mmap
import os
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
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
_PROOF = 32  # bytes
_HELLO = struct.Struct(f"<Q{_PROOF}s")  # the stage that connects and its digest
_PATIENCE = 5.0  # seconds in which a process that connects must greet
_BACKLOG = 128


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

    ahead: int | None = 2

    def __init__(self, groups: Groups, timeout: float) -> None:
        self._stage = groups.stage
        self._peers = _connect(groups, timeout)
        self._expected: dict[int, deque[_Receive]] = {stage: deque() for stage in self._peers}

    def open(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Do nothing: every pair of stages is connected."""

    def send(self, tensor: torch.Tensor, target: int) -> Pending:
        self._peers[target].send(tensor)
        return _DONE

    def recv(self, tensor: torch.Tensor, source: int) -> Pending:
        return _Receive(self._expected[source], self._peers[source], tensor)

    def close(self) -> None:
        for peer in self._peers.values():
            peer.close()


def _connect(groups: Groups, timeout: float) -> Mapping[int, _Peer]:
    """Return a socket to every other stage of the replica: the higher stage listens, the lower one connects.

    Every user of the host can connect to an abstract name. Both ends check the user of the other one, and that it knows the
    key of the job.
    """
    deadline, look = time.monotonic() + timeout, partial(check_others, groups)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"\0pipepart-{os.getpid()}-{os.urandom(8).hex()}")
        listener.listen(_BACKLOG)
        listener.setblocking(False)
        name = listener.getsockname()
        addresses = gather_objects(name if isinstance(name, bytes) else name.encode(), groups, inside_replica=True)
        higher = range(groups.stage + 1, groups.mesh.stages)
        found = {stage: _call(addresses[stage], stage, groups, timeout) for stage in higher}
        found |= _answer(listener, groups, deadline, look)
    return {
        stage: _Peer(c, f"stage {stage} (rank {groups.rank_of_stage(stage)})", timeout, look)
        for stage, c in found.items()
    }


def _call(address: bytes, stage: int, groups: Groups, timeout: float) -> socket.socket:
    """Connect to a higher stage and wait for its answer."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(timeout)
    connection.connect(address)
    if _is_own(connection):
        connection.send(_HELLO.pack(groups.stage, _proof(groups, groups.stage, stage)))
        if hmac.compare_digest(connection.recv(_PROOF), _proof(groups, stage, groups.stage)):
            return connection
    connection.close()
    raise ConnectionError(
        f"the process at the socket of stage {stage} is not a rank of this job: Connection closed by peer"
    )


def _answer(
    listener: socket.socket, groups: Groups, deadline: float, look: Callable[[], None]
) -> dict[int, socket.socket]:
    """Return the connections of all lower stages. Connections of other processes are closed, and do not delay them."""
    found: dict[int, socket.socket] = {}
    silent: dict[
        int, tuple[socket.socket, float]
    ] = {}  # by descriptor: connections without a greeting, and their deadlines
    ready = select.poll()
    ready.register(listener, select.POLLIN)
    while len(found) < groups.stage:
        events, now = ready.poll(_LOOK * 1000), time.monotonic()
        for number, _ in events:
            if number != listener.fileno():
                connection, _ = silent.pop(number)
                ready.unregister(number)
                stage = _greeting(connection, groups)
                if stage is None or stage in found:
                    connection.close()
                else:
                    found[stage] = connection
            elif (accepted := _accepted(listener)) is not None:
                ready.register(accepted, select.POLLIN)
                silent[accepted.fileno()] = accepted, now + _PATIENCE
        for number in [number for number, (_, until) in silent.items() if until < now]:
            ready.unregister(number)
            silent.pop(number)[0].close()
        if now > deadline:
            raise TimeoutError(f"Timed out waiting for {groups.stage - len(found)} lower stages to connect")
        if not events:
            look()
    for connection, _ in silent.values():
        connection.close()
    return found


def _accepted(listener: socket.socket) -> socket.socket | None:
    """Return the next connection; None if it is of another user, or gone."""
    with suppress(OSError):
        connection, _ = listener.accept()
        if _is_own(connection):
            connection.setblocking(False)
            return connection
        connection.close()
    return None


def _greeting(connection: socket.socket, groups: Groups) -> int | None:
    """Return the lower stage that has greeted on this connection, and answer it; None for all other bytes."""
    with suppress(OSError, struct.error):
        stage, proof = _HELLO.unpack(connection.recv(_HELLO.size + 1))
        if stage < groups.stage and hmac.compare_digest(proof, _proof(groups, stage, groups.stage)):
            connection.send(_proof(groups, groups.stage, stage))
            return int(stage)
    return None


def _is_own(connection: socket.socket) -> bool:
    """Return whether the process at the other end belongs to the user of this process."""
    return struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1] == os.getuid()


def _proof(groups: Groups, source: int, target: int) -> bytes:
    """Return the digest by which stage `source` shows stage `target` that it knows the key of the job."""
    return hmac.digest(groups.key, f"{groups.number}/{groups.replica}/{source}/{target}".encode(), "sha256")
