"""Messages between chunks on different stages: their contents and forms, receives posted ahead, sends in flight."""

from __future__ import annotations

import json
import struct
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from pipepart.devices import current_stream, on_stream, used_on
from pipepart.errors import PipelineError
from pipepart.recording import BATCH, Chunk, Edge
from pipepart.runtime.transport import Pending, Transport
from pipepart.schedule import Message

__all__ = ["Forms", "Inbox", "Outbox", "PlannedInbox", "Routes", "TensorSpec", "ValueSpec", "Wire"]

_MAX_DIMS = 15  # of a tensor whose shape depends on the data: its shape travels in front of it as 16 numbers

Pair = tuple[int, int]
"""Source chunk and target chunk of a forward message."""


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


ValueSpec = TensorSpec | str
"""The form of a value: that of a tensor, or the type name of a plain number ("int", "float", "bool")."""


@dataclass(frozen=True)
class Routes:
    """The edges between each pair of chunks, and those whose gradients are sent back.

    Leaves of the batch enter the pipeline with chunk 0, so they travel in the messages of chunk 0.
    """

    forward: Mapping[Pair, tuple[Edge, ...]]
    """The edges of each pair, in the order of the message."""
    placement: tuple[int, ...]
    """The stage of each chunk."""

    @staticmethod
    def of(chunks: Sequence[Chunk], placement: Sequence[int]) -> Routes:
        """Return the routes between chunks that are placed on stages."""
        table: dict[Pair, list[Edge]] = {}
        for chunk in chunks:
            for edge in chunk.imports:
                # Plain numbers of the batch (step counters) reach every rank in the header of the step.
                if edge.source == BATCH and (chunk.index == 0 or edge.kind == "number"):
                    continue
                table.setdefault((max(edge.source, 0), chunk.index), []).append(edge)
        return Routes({pair: tuple(edges) for pair, edges in sorted(table.items())}, tuple(placement))

    @property
    def backward_pairs(self) -> frozenset[Pair]:
        """The pairs over which at least one gradient is sent back."""
        return frozenset(pair for pair in self.forward if self.gradients[pair])

    @cached_property
    def channels(self) -> frozenset[tuple[int, int]]:
        """The pairs of stages between which messages are sent, source first."""
        there = {(self.placement[a], self.placement[b]) for a, b in self.forward}
        back = {(self.placement[b], self.placement[a]) for a, b in self.backward_pairs}
        return frozenset((source, target) for source, target in there | back if source != target)

    def local(self, pair: Pair) -> bool:
        """Return whether both chunks are on one stage, so that values are handed over and not sent."""
        return self.placement[pair[0]] == self.placement[pair[1]]

    # Every action reads these, so they are computed once.

    @cached_property
    def gradients(self) -> dict[Pair, tuple[Edge, ...]]:
        """For each pair the edges whose gradients are sent back from the target to the source."""
        return {
            pair: tuple(edge for edge in edges if pair[1] in edge.grad_targets and edge.source != BATCH)
            for pair, edges in self.forward.items()
        }

    @cached_property
    def leaving(self) -> dict[int, tuple[Pair, ...]]:
        """For each chunk the pairs of which it is the source."""
        return {chunk: tuple(p for p in self.forward if p[0] == chunk) for chunk in range(len(self.placement))}

    @cached_property
    def entering(self) -> dict[int, tuple[Pair, ...]]:
        """For each chunk the pairs of which it is the target."""
        return {chunk: tuple(p for p in self.forward if p[1] == chunk) for chunk in range(len(self.placement))}


@dataclass(frozen=True)
class Forms:
    """Forms of messages that both ends know. They are sent once for each pair of chunks and form of the micro-batch."""

    sent: dict[tuple[int, int, int], tuple[ValueSpec, ...]] = field(default_factory=dict)
    received: dict[tuple[int, int, int], tuple[ValueSpec, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Wire:
    """The connection of one stage to the others in one step."""

    transport: Transport
    """Carries tensors on the device."""
    control: Transport
    """Carries forms, shapes and numbers in host memory."""
    routes: Routes
    known: Forms
    device: torch.device
    forms: Sequence[int]
    """For each micro-batch a number for the shapes and types of its leaves."""
    receiving: torch.Stream | None = None
    """The stream on which receives are posted, so that they do not wait for the ops before them; None on the CPU."""

    def key(self, message: Message) -> tuple[int, int, int]:
        """Return the key of a forward message in `known`."""
        return message.source, message.target, self.forms[message.microbatch]


class Outbox:
    """The sends of one step. Keeps their tensors alive until `finish`, which waits for all of them."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._open: deque[tuple[Pending, torch.Tensor, Message, int]] = deque()

    def send_values(self, message: Message, edges: Sequence[Edge], values: Sequence[Any]) -> None:
        """Send the values of a forward message, after their form if the receiver does not know it."""
        wire = self._wire
        specs = tuple(_spec_of(value, edge) for edge, value in zip(edges, values))
        key = wire.key(message)
        known = wire.known.sent.get(key)
        if known is None:
            for part in _encode_forms(specs):
                self._start(part, message, wire.control)
            wire.known.sent[key] = specs
        for edge, spec, expected in zip(edges, specs, known or specs):
            if edge.dynamic_shape and isinstance(spec, TensorSpec):
                self._start(_shape_header(spec, edge), message, wire.control)
            elif spec != expected:
                raise PipelineError(
                    f"the value of {edge.name!r} (chunk {message.source} to chunk {message.target}) changed its form: expected "
                    f"{expected}, got {spec} for a micro-batch of the same form. Its shape depends on the data: keep its "
                    f"producer and its users in one chunk (keep_together)."
                )
        numbers = [value for value, spec in zip(values, specs) if isinstance(spec, str)]
        if numbers:
            self._start(_pack(numbers), message, wire.control)
        for value, spec in zip(values, specs):
            if isinstance(spec, TensorSpec):
                self._start(value.detach(), message, wire.transport)

    def send_gradients(self, message: Message, gradients: Sequence[torch.Tensor]) -> None:
        """Send the gradients of a backward message; the receiver knows their form from its forward."""
        for gradient in gradients:
            self._start(gradient, message, self._wire.transport)

    def _start(self, tensor: torch.Tensor, message: Message, transport: Transport) -> None:
        while self._open and self._open[0][0].is_completed():
            self._open.popleft()
        if tensor.numel():
            tensor, target = tensor.contiguous(), self._wire.routes.placement[message.target]
            self._open.append((transport.send(tensor, target), tensor, message, target))

    def finish(self) -> None:
        """Wait for all sends."""
        while self._open:
            pending, _, message, target = self._open.popleft()
            _wait(pending, message, "SEND", target)


class Inbox:
    """The receives of one step. Posts a few messages of each channel ahead, in the order in which they will arrive."""

    def __init__(
        self,
        wire: Wire,
        expected: Mapping[int, Sequence[Message]],
        gradient_specs: Callable[[Message], tuple[ValueSpec, ...] | None],
    ) -> None:
        """`expected`: the messages from each stage in order; `gradient_specs`: the form of a backward message, if known."""
        self._wire, self._gradient_specs = wire, gradient_specs
        self._waiting = {source: deque(messages) for source, messages in expected.items()}
        self._posted: dict[Message, _Arrival] = {}
        self._posted_from = dict.fromkeys(self._waiting, 0)
        self._ahead = wire.transport.ahead or 0
        self._behind: set[int] = set()
        for source in self._waiting:
            self._post_ahead(source)

    def take(self, message: Message) -> list[Any]:
        """Wait for a message and return its values."""
        source = self._wire.routes.placement[message.source]
        while message not in self._posted:
            self._post(source, may_block=True)
        values = self._posted.pop(message).values(message, source)
        self._posted_from[source] -= 1
        self._behind.add(source)
        return values

    def post_ahead(self) -> None:
        """Post receives in place of those that `take` has used. Called when no other stage waits for this one."""
        while self._behind:
            self._post_ahead(self._behind.pop())

    def _post_ahead(self, source: int) -> None:
        while self._waiting[source] and self._posted_from[source] < self._ahead:
            if not self._post(source, may_block=False):
                return

    def _post(self, source: int, may_block: bool) -> bool:
        """Post the next message of a channel. Returns False if its form is unknown and `may_block` is not set."""
        wire, message = self._wire, self._waiting[source][0]
        if message.payload == "B":
            specs = self._gradient_specs(message)
            assert specs is not None or not may_block, f"{message} is expected before its forward has run"
            if specs is None:
                return False
        else:
            edges = wire.routes.forward[(message.source, message.target)]
            key = wire.key(message)
            specs = wire.known.received.get(key)
            dynamic = any(edge.dynamic_shape for edge in edges)
            if not may_block and (specs is None or dynamic):
                return False
            if specs is None:
                wire.known.received[key] = specs = self._read_forms(message, source)
            if dynamic:
                specs = tuple(
                    self._read_shape(spec, message, source)
                    if edge.dynamic_shape and isinstance(spec, TensorSpec)
                    else spec
                    for edge, spec in zip(edges, specs)
                )
        self._waiting[source].popleft()
        self._posted[message] = _Arrival(wire, specs, source)
        self._posted_from[source] += 1
        return True

    def _read(self, size: int, dtype: torch.dtype, message: Message, source: int) -> torch.Tensor:
        buffer = torch.empty(size, dtype=dtype)
        _wait(self._wire.control.recv(buffer, source), message, "RECV", source)
        return buffer

    def _read_forms(self, message: Message, source: int) -> tuple[ValueSpec, ...]:
        length = int(self._read(1, torch.int64, message, source))
        return _decode_forms(self._read(length, torch.uint8, message, source))

    def _read_shape(self, spec: TensorSpec, message: Message, source: int) -> TensorSpec:
        header = self._read(_MAX_DIMS + 1, torch.int64, message, source).tolist()
        return TensorSpec(tuple(header[1 : 1 + header[0]]), spec.dtype)


class PlannedInbox(Inbox):
    """Receives in the order of the plan, for devices on which a transfer can hold up the work behind it.

    Before each action, the receives are posted that one run of the whole schedule puts in front of it. A message of one tensor
    is posted earlier, as soon as all messages of its channel before it were taken: it can start at once.
    """

    def __init__(
        self,
        wire: Wire,
        expected: Mapping[int, Sequence[Message]],
        gradient_specs: Callable[[Message], tuple[ValueSpec, ...] | None],
        due: Sequence[Sequence[Message]],
    ) -> None:
        """`due`: for each action of the stage the messages whose receives are posted before it."""
        self._due = deque(due)
        super().__init__(wire, expected, gradient_specs)
        self.post_ahead()

    def take(self, message: Message) -> list[Any]:
        values = super().take(message)
        self._post_ahead(self._wire.routes.placement[message.source])
        return values

    def post_ahead(self) -> None:
        """Post the receives that the plan puts in front of the next action. Called after each action."""
        for message in self._due.popleft() if self._due else ():
            source = self._wire.routes.placement[message.source]
            while message in self._waiting[source]:
                self._post(source, may_block=True)

    def _post_ahead(self, source: int) -> None:
        if not self._waiting[source] or self._posted_from[source]:
            return
        message, routes = self._waiting[source][0], self._wire.routes
        forward = message.payload == "F"
        edges = (
            routes.forward[message.source, message.target]
            if forward
            else routes.gradients[message.target, message.source]
        )
        if len(edges) == 1:
            self._post(source, may_block=False)


class _Arrival:
    """The buffers of one message and the receives that fill them."""

    def __init__(self, wire: Wire, specs: Sequence[ValueSpec], source: int) -> None:
        self._specs, self._wire = specs, wire
        numbers = sum(isinstance(spec, str) for spec in specs)
        self._numbers = torch.empty(numbers, dtype=torch.int64)
        self._pending = [wire.control.recv(self._numbers, source)] if numbers else []
        forms = [spec for spec in specs if isinstance(spec, TensorSpec)]
        with on_stream(wire.receiving):
            self._tensors = [torch.empty(form.shape, dtype=form.dtype, device=wire.device) for form in forms]
            self._pending += [wire.transport.recv(buffer, source) for buffer in self._tensors if buffer.numel()]

    def values(self, message: Message, source: int) -> list[Any]:
        for pending in self._pending:
            _wait(pending, message, "RECV", source)
        if self._wire.receiving is not None:
            stream = current_stream(self._wire.device)
            for tensor in self._tensors:
                used_on(tensor, stream)
        numbers, tensors = iter(self._numbers.tolist()), iter(self._tensors)
        return [_unpack(next(numbers), spec) if isinstance(spec, str) else next(tensors) for spec in self._specs]


def _wait(pending: Pending, message: Message, kind: str, stage: int) -> None:
    try:
        pending.wait()
    except (RuntimeError, OSError) as error:
        way = "to" if kind == "SEND" else "from"
        raise PipelineError(f"{kind} {message} {way} stage {stage} failed: {error}") from error


def _spec_of(value: Any, edge: Edge) -> ValueSpec:
    if isinstance(value, torch.Tensor):
        return TensorSpec(tuple(value.shape), value.dtype)
    if isinstance(value, (bool, int, float)):
        return type(value).__name__
    raise PipelineError(
        f"the value of {edge.name!r} crosses from chunk {edge.source} to {list(edge.targets)}: expected a tensor or a number, "
        f"got {type(value).__name__}. Keep its producer and its users in one chunk (keep_together)."
    )


def _encode_forms(specs: Sequence[ValueSpec]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the forms of the values of a message as length and bytes."""
    plain = [(list(s.shape), str(s.dtype).removeprefix("torch.")) if isinstance(s, TensorSpec) else s for s in specs]
    data = bytearray(json.dumps(plain).encode())
    return torch.tensor([len(data)], dtype=torch.int64), torch.frombuffer(data, dtype=torch.uint8)


def _decode_forms(data: torch.Tensor) -> tuple[ValueSpec, ...]:
    plain = json.loads(data.cpu().numpy().tobytes())
    return tuple(s if isinstance(s, str) else TensorSpec(tuple(s[0]), getattr(torch, s[1])) for s in plain)


def _shape_header(spec: TensorSpec, edge: Edge) -> torch.Tensor:
    if len(spec.shape) > _MAX_DIMS:
        raise PipelineError(
            f"{edge.name!r} has {len(spec.shape)} dimensions; at most {_MAX_DIMS} can cross a cut. Keep its producer and its "
            "users in one chunk (keep_together)."
        )
    return torch.tensor([len(spec.shape), *spec.shape, *[0] * (_MAX_DIMS - len(spec.shape))], dtype=torch.int64)


def _pack(numbers: Sequence[float]) -> torch.Tensor:
    """Return numbers as 64-bit words; floats keep their bits."""
    words = [struct.unpack("<q", struct.pack("<d", n))[0] if isinstance(n, float) else int(n) for n in numbers]
    return torch.tensor(words, dtype=torch.int64)


def _unpack(word: int, kind: str) -> float:
    if kind == "float":
        return float(struct.unpack("<d", struct.pack("<q", word))[0])
    return bool(word) if kind == "bool" else word
