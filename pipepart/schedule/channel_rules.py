"""The check that the transfers of all ranks end, under the rules of a device library (NCCL).

Each rank has a host, which hands over work in the order of its program and goes on, and a device, which does that work
later. A send and its receive meet: both end when both are first on the stream of their communicator and both devices have
reached them. A transfer starts after the compute that was queued before it. Three rules say what may block in between:

- ``lazy``: the communicator of a directed pair of stages is made by the first transfer, and the hosts of both ends wait
  until both have arrived there.
- ``eager``: communicators exist, one for each directed pair or, with ``shared``, one for all pairs of one direction, as in a
  group that was made with ``device_id``.
- ``one_queue``: communicators exist, and all work of a device, compute, waits and transfers, goes through one hardware queue
  (``CUDA_DEVICE_MAX_CONNECTIONS=1``). The first entry of the queue blocks the others until it can start: a transfer when the
  earlier ones of its communicator have ended, a wait when its transfer has ended. What has started leaves the queue.

A program that ends with one queue ends with any number of queues, since each of them has a part of the same order. No rule
has a choice in it, so the order in which ranks are looked at does not change the result.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from pipepart.errors import ScheduleError
from pipepart.schedule.actions import Action

__all__ = ["RULES", "Compute", "Control", "Entry", "HostWait", "Order", "Post", "Stuck", "Sync", "check_posts"]

RULES = ("lazy", "eager", "one_queue")
_NAMES = {
    "lazy": "communicators made at first use",
    "eager": "communicators that exist",
    "one_queue": "one hardware queue",
}

Pair = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Post:
    """The host hands an asynchronous transfer to the communicator of its channel."""

    number: int
    """The number of the transfer on this rank."""
    kind: str
    """``send`` or ``recv``."""
    peer: int
    """The stage at the other end."""
    size: int
    action: Action | None = None
    """The SEND or RECV that the transfer is a part of."""


@dataclass(frozen=True, slots=True)
class Order:
    """The compute stream waits for a transfer; the host goes on."""

    number: int


@dataclass(frozen=True, slots=True)
class HostWait:
    """The host waits until a transfer has ended."""

    number: int


@dataclass(frozen=True, slots=True)
class Sync:
    """The host waits until the compute stream has run all that was queued so far."""


@dataclass(frozen=True, slots=True)
class Control:
    """A message in host memory: a send goes on at once, a receive waits until the host of the peer has sent it."""

    kind: str
    """``send`` or ``recv``."""
    peer: int
    number: int
    """The position of the message among those from its sender to its receiver, from 0."""


@dataclass(frozen=True, slots=True)
class Compute:
    """Work on the compute stream."""

    action: Action


Entry = Post | Order | HostWait | Sync | Control | Compute
"""One thing that the host of a rank does."""


@dataclass(frozen=True)
class Wait:
    """What a host or a device waits for, for ever."""

    what: str
    because: str
    channel: Pair | None = None
    """Source stage and target stage, if it is a transfer or a message."""
    action: Action | None = None

    def __str__(self) -> str:
        return f"{self.what}: {self.because}"


@dataclass(frozen=True)
class StuckRank:
    """The waits of a rank that does not end."""

    rank: int
    host: Wait | None
    """None if the host has done its whole program."""
    device: Wait | None
    """None if the compute stream, or the one queue, has done all that it was given."""
    transfers: tuple[Wait, ...] = ()
    """The first transfer of each communicator that has not ended."""


@dataclass(frozen=True)
class Stuck:
    """Programs that never end, with the waits of every rank that does not."""

    rule: str
    ranks: tuple[StuckRank, ...]

    def describe(self) -> str:
        """Return the waits in plain sentences."""
        names = ", ".join(str(rank.rank) for rank in self.ranks)
        lines = [f"With {_NAMES[self.rule]}, the job hangs; ranks that never end: {names}."]
        for rank in self.ranks:
            host = f"its host waits for {rank.host}" if rank.host else "its host has done its part"
            device = f"its device waits for {rank.device}" if rank.device else "its device has nothing queued"
            lines.append(f"Rank {rank.rank}: {host}; {device}.")
            if not rank.device:
                lines += [f"  Open: {wait}." for wait in rank.transfers]
        return "\n".join(lines)


def check_posts(programs: Sequence[Sequence[Entry]], rule: str, *, shared: bool = False) -> Stuck | None:
    """Return None if the programs of all ranks end under a rule, else what each stuck rank waits for.

    ``shared``: one communicator for all pairs of one direction; not with ``lazy``.
    """
    if rule not in RULES or (shared and rule == "lazy"):
        raise ScheduleError(f"rule {rule!r} with shared={shared}: expected one of {RULES}, and shared not with 'lazy'")
    run = _Run(programs, rule, shared)
    run.until_nothing_moves()
    return run.stuck()


@dataclass(eq=False, slots=True)
class _Transfer:
    post: Post
    rank: int
    stream: _Stream
    index: int
    """Its position on the stream of its communicator."""
    after: int
    """The device reaches it when so many entries of its queue have passed."""
    done: bool = False

    @property
    def channel(self) -> Pair:
        return (self.rank, self.post.peer) if self.post.kind == "send" else (self.post.peer, self.rank)

    def __str__(self) -> str:
        what = self.post.action or f"{self.post.kind} {self.post.number}"
        return f"{what} on the channel {self.channel[0]} -> {self.channel[1]}"


@dataclass(eq=False, slots=True)
class _Stream:
    """The transfers of one communicator on one rank, in their order."""

    transfers: list[_Transfer] = field(default_factory=list)
    done: int = 0

    @property
    def first(self) -> _Transfer | None:
        return self.transfers[self.done] if self.done < len(self.transfers) else None


@dataclass(eq=False, slots=True)
class _Launch:
    """A transfer in the one queue."""

    transfer: _Transfer


@dataclass(eq=False, slots=True)
class _Rank:
    rank: int
    program: Sequence[Entry]
    at: int = 0
    """The position of the host in its program."""
    queue: list[_Launch | _Transfer | None] = field(default_factory=list)
    """The work of the device: a transfer to start, a transfer to wait for, or compute (None)."""
    passed: int = 0
    computes: int = 0
    """The length of the queue after the last entry of the compute stream."""
    streams: dict[Pair | str, _Stream] = field(default_factory=dict)
    transfers: dict[int, _Transfer] = field(default_factory=dict)

    def transfer(self, number: int) -> _Transfer:
        if number not in self.transfers:
            raise ScheduleError(
                f"rank {self.rank}, entry {self.at}: {self.program[self.at]} waits for a transfer that was not posted "
                "before; expected a Post with this number in front of it"
            )
        return self.transfers[number]


class _Run:
    """The state of all ranks. Each change wakes the ranks that may go on because of it."""

    def __init__(self, programs: Sequence[Sequence[Entry]], rule: str, shared: bool) -> None:
        self._rule, self._shared = rule, shared
        self._ranks = [_Rank(rank, program) for rank, program in enumerate(programs)]
        self._joined: defaultdict[Pair, set[int]] = defaultdict(set)
        self._sent: defaultdict[Pair, int] = defaultdict(int)
        self._awake = deque(self._ranks)
        self._woken = set(range(len(self._ranks)))

    def until_nothing_moves(self) -> None:
        while self._awake:
            rank = self._awake.popleft()
            self._woken.discard(rank.rank)
            moving = True
            while moving:
                self._host(rank)
                self._device(rank)
                moving = False
                for key, stream in rank.streams.items():
                    while self._meet(key, stream):
                        moving = True

    def _wake(self, rank: int) -> None:
        if rank not in self._woken:
            self._woken.add(rank)
            self._awake.append(self._ranks[rank])

    # ---- the three kinds of progress

    def _host(self, rank: _Rank) -> None:
        while rank.at < len(rank.program):
            entry = rank.program[rank.at]
            if isinstance(entry, Post):
                if not self._has_communicator(rank, entry):
                    return
                self._launch(rank, entry)
            elif isinstance(entry, (Compute, Order)):
                rank.queue.append(None if isinstance(entry, Compute) else rank.transfer(entry.number))
                rank.computes = len(rank.queue)
            elif isinstance(entry, HostWait):
                if not rank.transfer(entry.number).done:
                    return
            elif isinstance(entry, Sync):
                self._device(rank)
                if rank.passed < rank.computes:
                    return
            elif entry.kind == "send":
                self._sent[rank.rank, entry.peer] += 1
                self._wake(entry.peer)
            elif self._sent[entry.peer, rank.rank] <= entry.number:
                return
            rank.at += 1

    def _has_communicator(self, rank: _Rank, post: Post) -> bool:
        if self._rule != "lazy":
            return True
        joined = self._joined[_channel(rank.rank, post)]
        if len(joined) < 2 and rank.rank not in joined:
            joined.add(rank.rank)
            if len(joined) == 2:
                self._wake(post.peer)
        return len(joined) == 2

    def _launch(self, rank: _Rank, post: Post) -> None:
        source, target = channel = _channel(rank.rank, post)
        key = channel if not self._shared else "down" if source < target else "up"
        stream = rank.streams.setdefault(key, _Stream())
        transfer = _Transfer(post, rank.rank, stream, len(stream.transfers), len(rank.queue))
        stream.transfers.append(transfer)
        rank.transfers[post.number] = transfer
        if self._rule == "one_queue":
            rank.queue.append(_Launch(transfer))
            transfer.after = len(rank.queue)

    def _device(self, rank: _Rank) -> None:
        while rank.passed < len(rank.queue):
            entry = rank.queue[rank.passed]
            if isinstance(entry, _Launch):
                if entry.transfer.stream.done < entry.transfer.index:
                    return
            elif entry is not None and not entry.done:
                return
            rank.passed += 1

    def _meet(self, key: Pair | str, stream: _Stream) -> bool:
        """End the first transfer of a communicator on this rank and its other end, if both are reached."""
        mine = stream.first
        if mine is None or mine.after > self._ranks[mine.rank].passed:
            return False
        other = self._ranks[mine.post.peer]
        facing = other.streams.get(key)
        theirs = facing.first if facing is not None else None
        if theirs is None or facing is None or theirs.after > other.passed or not _fit(mine, theirs):
            return False
        for transfer in (mine, theirs):
            transfer.done = True
            transfer.stream.done += 1
        self._wake(other.rank)
        return True

    # ---- the report

    def stuck(self) -> Stuck | None:
        """Return the waits of the ranks that have not ended, or None if all have."""
        found = []
        for rank in self._ranks:
            heads = [stream.first for stream in rank.streams.values() if stream.first is not None]
            host = self._wait_of_host(rank) if rank.at < len(rank.program) else None
            device = self._wait_of_device(rank) if rank.passed < len(rank.queue) else None
            if host or device or heads:
                found.append(StuckRank(rank.rank, host, device, tuple(self._end_of(head) for head in heads)))
        return Stuck(self._rule, tuple(found)) if found else None

    def _wait_of_host(self, rank: _Rank) -> Wait:
        entry = rank.program[rank.at]
        if isinstance(entry, Post):
            channel = _channel(rank.rank, entry)
            what = f"the communicator of the channel {channel[0]} -> {channel[1]} at its first use"
            what += f" ({entry.action})" if entry.action else ""
            return Wait(what, f"the host of stage {entry.peer} has not come to its first use", channel, entry.action)
        if isinstance(entry, HostWait):
            return self._end_of(rank.transfer(entry.number))
        if isinstance(entry, Control):
            what = f"message {entry.number} in host memory from stage {entry.peer}"
            return Wait(what, f"the host of stage {entry.peer} has not sent it", (entry.peer, rank.rank))
        device = self._wait_of_device(rank)
        return Wait("its device (an op needs a value)", "the device waits, too", device.channel, device.action)

    def _wait_of_device(self, rank: _Rank) -> Wait:
        entry = rank.queue[rank.passed]
        assert entry is not None, "compute never waits"
        if isinstance(entry, _Transfer):
            return self._end_of(entry)
        first = entry.transfer.stream.first
        assert first is not None
        wait = self._end_of(first)
        what = f"the start of {entry.transfer}, which blocks its one queue until {first} has ended"
        return Wait(what, wait.because, entry.transfer.channel, entry.transfer.post.action)

    def _end_of(self, transfer: _Transfer) -> Wait:
        return Wait(f"the end of {transfer}", self._because(transfer), transfer.channel, transfer.post.action)

    def _because(self, transfer: _Transfer) -> str:
        """Return why a transfer has not ended."""
        first, rank, peer = transfer.stream.first, self._ranks[transfer.rank], self._ranks[transfer.post.peer]
        if first is not transfer:
            return f"it is behind {first} on its communicator"
        if transfer.after > rank.passed:
            return "its own device has not come to it"
        key = next(key for key, stream in rank.streams.items() if stream is transfer.stream)
        facing = peer.streams.get(key)
        theirs = facing.first if facing is not None else None
        if theirs is None:
            return f"the host of stage {peer.rank} has not posted the other end"
        if not _fit(transfer, theirs):
            return f"stage {peer.rank} has {theirs} ({theirs.post.size} bytes) as the first of this communicator"
        return f"the device of stage {peer.rank} has not come to the other end"


def _channel(rank: int, post: Post) -> Pair:
    return (rank, post.peer) if post.kind == "send" else (post.peer, rank)


def _fit(mine: _Transfer, theirs: _Transfer) -> bool:
    """Whether two transfers are the two ends of one: the same channel, size and message."""
    a, b = mine.post.action, theirs.post.action
    same = a is None or b is None or a.message == b.message
    return (
        same
        and mine.post.kind != theirs.post.kind
        and mine.channel == theirs.channel
        and mine.post.size == theirs.post.size
    )
