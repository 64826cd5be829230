"""Receives posted ahead in the order of each channel, and sends kept alive until they are done."""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from pipepart.errors import PipelineError
from pipepart.recording import Edge
from pipepart.runtime.messages import Routes, TensorSpec, ValueSpec, decode_announcement, encode_announcement, spec_of
from pipepart.runtime.transport import Pending, Transport
from pipepart.schedule import Message

__all__ = ["Announced", "Inbox", "Outbox"]

_MAX_DIMS = 15  # of a tensor whose shape depends on the data: its shape travels in front of it as 16 numbers


class Announced:
    """The forms of messages that both ends know already: sent once for each (chunks, form of the micro-batch)."""

    def __init__(self) -> None:
        self._sent: dict[tuple[int, int, int], tuple[ValueSpec, ...]] = {}
        self._received: dict[tuple[int, int, int], tuple[ValueSpec, ...]] = {}

    def sent(self, key: tuple[int, int, int]) -> tuple[ValueSpec, ...] | None:
        return self._sent.get(key)

    def note_sent(self, key: tuple[int, int, int], specs: tuple[ValueSpec, ...]) -> None:
        self._sent[key] = specs

    def received(self, key: tuple[int, int, int]) -> tuple[ValueSpec, ...] | None:
        return self._received.get(key)

    def note_received(self, key: tuple[int, int, int], specs: tuple[ValueSpec, ...]) -> None:
        self._received[key] = specs


class Outbox:
    """Starts sends and keeps their tensors alive; `settle` waits for all of them."""

    def __init__(
        self, transport: Transport, routes: Routes, announced: Announced, forms: Sequence[int], device: torch.device
    ):
        self._transport, self._routes, self._announced = transport, routes, announced
        self._forms, self._device = forms, device
        self._open: deque[tuple[Pending, torch.Tensor, Message, int]] = deque()

    def send_values(self, message: Message, edges: Sequence[Edge], values: Sequence[Any]) -> None:
        """Send the values of a forward message; its form goes first when the other end does not know it."""
        target = self._routes.placement[message.target]
        specs = tuple(spec_of(value, edge) for edge, value in zip(edges, values))
        key = (message.source, message.target, self._forms[message.microbatch])
        known = self._announced.sent(key)
        if known is None:
            for part in encode_announcement(specs):
                self._start(part.to(self._device), target, message)
            self._announced.note_sent(key, specs)
        for edge, spec, expected in zip(edges, specs, known or specs):
            if edge.dynamic_shape and isinstance(spec, TensorSpec):
                self._start(_shape_header(spec, edge).to(self._device), target, message)
            elif spec != expected:
                raise PipelineError(
                    f"the value of {edge.name!r} (chunk {message.source} to chunk {message.target}) changed its form: expected "
                    f"{expected}, got {spec} for a micro-batch of the same form. Its shape depends on the data: keep its "
                    f"producer and its users in one chunk (keep_together)."
                )
        numbers = [value for value, spec in zip(values, specs) if isinstance(spec, str)]
        if numbers:
            self._start(_pack(numbers).to(self._device), target, message)
        for value, spec in zip(values, specs):
            if isinstance(spec, TensorSpec):
                self._start(value.detach(), target, message)

    def send_gradients(self, message: Message, gradients: Sequence[torch.Tensor]) -> None:
        for gradient in gradients:
            self._start(gradient, self._routes.placement[message.target], message)

    def _start(self, tensor: torch.Tensor, target: int, message: Message) -> None:
        while self._open and self._open[0][0].is_completed():  # type: ignore[attr-defined]
            self._open.popleft()
        if tensor.numel():
            tensor = tensor.contiguous()
            self._open.append((self._transport.send(tensor, target), tensor, message, target))

    def settle(self) -> None:
        while self._open:
            pending, _, message, target = self._open.popleft()
            _wait(pending, message, "to", target)


class Inbox:
    """Receives of one step. Posts `window` messages of each channel ahead, in the order in which they will come."""

    def __init__(
        self,
        transport: Transport,
        routes: Routes,
        announced: Announced,
        forms: Sequence[int],
        device: torch.device,
        expected: Mapping[int, Sequence[Message]],
        gradient_specs: Callable[[Message], tuple[ValueSpec, ...] | None],
        window: int = 2,
    ) -> None:
        self._transport, self._routes, self._announced = transport, routes, announced
        self._forms, self._device, self._window = forms, device, window
        self._gradient_specs = gradient_specs
        self._waiting = {source: deque(messages) for source, messages in expected.items()}
        self._posted: dict[Message, _Arrival] = {}
        self._posted_from = dict.fromkeys(self._waiting, 0)
        self._behind: set[int] = set()
        for source in self._waiting:
            self._post_ahead(source)

    def take(self, message: Message) -> list[Any]:
        """The values of a message; waits until they are here."""
        source = self._routes.placement[message.source]
        while message not in self._posted:
            self._post(source, may_block=True)
        arrival = self._posted.pop(message)
        values = arrival.values(message, source)
        self._posted_from[source] -= 1
        self._behind.add(source)
        return values

    def post_ahead(self) -> None:
        """Post again what `take` has used up. Called when no other stage waits for this one."""
        while self._behind:
            self._post_ahead(self._behind.pop())

    def _post_ahead(self, source: int) -> None:
        while (
            self._waiting[source] and self._posted_from[source] < self._window and self._post(source, may_block=False)
        ):
            pass

    def _post(self, source: int, may_block: bool) -> bool:
        """Post the next message of a channel. False if its form is not known yet and `may_block` is not set."""
        message = self._waiting[source][0]
        if message.payload == "B":
            specs = self._gradient_specs(message)
            assert specs is not None or not may_block, f"{message} is expected before its forward has run"
            if specs is None:
                return False
        else:
            edges = self._routes.forward[(message.source, message.target)]
            key = (message.source, message.target, self._forms[message.microbatch])
            specs = self._announced.received(key)
            dynamic = any(edge.dynamic_shape for edge in edges)
            if not may_block and (specs is None or dynamic):
                return False
            if specs is None:
                specs = self._read_announcement(message, source)
                self._announced.note_received(key, specs)
            if dynamic:
                specs = tuple(
                    self._read_shape(spec, message, source)
                    if edge.dynamic_shape and isinstance(spec, TensorSpec)
                    else spec
                    for edge, spec in zip(edges, specs)
                )
        self._waiting[source].popleft()
        self._posted[message] = _Arrival(specs, lambda tensor: self._transport.recv(tensor, source), self._device)
        self._posted_from[source] += 1
        return True

    def _read(self, size: int, dtype: torch.dtype, message: Message, source: int) -> torch.Tensor:
        buffer = torch.empty(size, dtype=dtype, device=self._device)
        _wait(self._transport.recv(buffer, source), message, "from", source)
        return buffer.cpu()

    def _read_announcement(self, message: Message, source: int) -> tuple[ValueSpec, ...]:
        length = int(self._read(1, torch.int64, message, source))
        return decode_announcement(self._read(length, torch.uint8, message, source))

    def _read_shape(self, spec: TensorSpec, message: Message, source: int) -> TensorSpec:
        header = self._read(_MAX_DIMS + 1, torch.int64, message, source).tolist()
        return TensorSpec(tuple(header[1 : 1 + header[0]]), spec.dtype)


class _Arrival:
    """Buffers of one message and the receives that fill them."""

    def __init__(
        self, specs: Sequence[ValueSpec], recv: Callable[[torch.Tensor], Pending], device: torch.device
    ) -> None:
        self._specs = specs
        numbers = sum(isinstance(spec, str) for spec in specs)
        self._numbers = torch.empty(numbers, dtype=torch.int64, device=device)
        self._tensors = [torch.empty(s.shape, dtype=s.dtype, device=device) for s in specs if isinstance(s, TensorSpec)]
        self._pending = [recv(buffer) for buffer in (self._numbers, *self._tensors) if buffer.numel()]

    def values(self, message: Message, source: int) -> list[Any]:
        for pending in self._pending:
            _wait(pending, message, "from", source)
        numbers, tensors = iter(self._numbers.tolist()), iter(self._tensors)
        return [_unpack(next(numbers), spec) if isinstance(spec, str) else next(tensors) for spec in self._specs]


def _wait(pending: Pending, message: Message, way: str, stage: int) -> None:
    try:
        pending.wait()
    except (RuntimeError, OSError) as error:
        what = "SEND" if way == "to" else "RECV"
        raise PipelineError(f"{what} {message} {way} stage {stage} failed: {error}") from error


def _shape_header(spec: TensorSpec, edge: Edge) -> torch.Tensor:
    if len(spec.shape) > _MAX_DIMS:
        raise PipelineError(f"{edge.name!r} has {len(spec.shape)} dimensions; at most {_MAX_DIMS} can cross a cut")
    return torch.tensor([len(spec.shape), *spec.shape, *[0] * (_MAX_DIMS - len(spec.shape))], dtype=torch.int64)


def _pack(numbers: Sequence[float]) -> torch.Tensor:
    """Numbers as 64-bit words; floats keep their bits."""
    words = [struct.unpack("<q", struct.pack("<d", n))[0] if isinstance(n, float) else int(n) for n in numbers]
    return torch.tensor(words, dtype=torch.int64)


def _unpack(word: int, kind: str) -> float:
    if kind == "float":
        return float(struct.unpack("<d", struct.pack("<q", word))[0])
    return bool(word) if kind == "bool" else word
