"""What a split means in figures: times, bytes and traffic of every chunk, and the memory of every stage."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from pipepart.cost import OpCosts
from pipepart.graph import OpGraph
from pipepart.partition import Link
from pipepart.planning.layout import Layout
from pipepart.planning.plan import ChunkPlan, StageMemory, Tie, Traffic
from pipepart.schedule import ChunkCosts, Edges, Schedule

__all__ = ["ParameterSizes", "Priced", "Pricing", "chunk_peaks"]

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_SPLIT = frozenset({"Linear", "Embedding", "Conv1d", "Conv2d", "Conv3d"})
"""The classes of layers whose backward the runtime can run in two halves."""

_AT_WORK = 3
"""Tensors of the size of an op's output that exist for a moment while its backward runs: a gradient that comes, one that
goes, and one in between."""
_AT_CONVOLUTION = 5
"""The same where an op lays out its tensors anew before it computes, as measured."""
_EARLY = 2
"""Messages that a stage takes in before they are needed."""

ParameterSizes = Mapping[str, tuple[int, int]]
"""Parameter name -> (elements, bytes)."""


@dataclass(frozen=True, eq=False)
class Priced:
    """One split on one placement, before the choice of what is recomputed."""

    placement: tuple[int, ...]
    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]
    saved: tuple[float, ...]
    received: tuple[float, ...]
    parameter_bytes: tuple[float, ...]
    trained_bytes: tuple[float, ...]
    reduce: tuple[float, ...]
    scratch: tuple[float, ...]
    """What comes and goes while the ops of a chunk run."""
    traffic: Mapping[tuple[int, int], tuple[float, float, float, float]]
    """(source, target) -> bytes and seconds ahead, bytes and seconds back; by source and target."""
    handling_forward: tuple[float, ...] = ()
    handling_backward: tuple[float, ...] = ()
    ties: tuple[Tie, ...] = ()

    @cached_property
    def edges(self) -> Edges:
        back = [pair for pair, cost in self.traffic.items() if cost[2]]
        return Edges.of(len(self.placement), self.traffic, back, [tie.chunks for tie in self.ties])

    def costs(self, recompute: Sequence[bool]) -> ChunkCosts:
        """What the simulator takes."""
        return ChunkCosts(
            forward=self.forward,
            backward_input=self.backward_input,
            backward_weight=self.backward_weight,
            recompute=tuple(f if again else 0.0 for f, again in zip(self.forward, recompute)),
            activation=tuple(r if again else s for r, s, again in zip(self.received, self.saved, recompute)),
            send_forward={pair: cost[1] for pair, cost in self.traffic.items()},
            send_backward={pair: cost[3] for pair, cost in self.traffic.items() if cost[2]},
            handling_forward=self.handling_forward,
            handling_backward=self.handling_backward,
            reduce=self.reduce,
            reduce_tied=tuple(tie.seconds for tie in self.ties),
        )


@dataclass(frozen=True, eq=False)
class Pricing:
    """The arithmetic for one graph on one mesh with one micro-batch size."""

    graph: OpGraph
    costs: tuple[OpCosts, ...]
    """One for all stages, or one per stage."""
    sizes: ParameterSizes
    layout: Layout
    optimizer_factor: float = 2.0
    frozen: Collection[str] = ()
    """Parameters without gradient and optimizer state."""

    @cached_property
    def _times(self) -> tuple[tuple[Floats, Floats, Floats], ...]:
        return tuple(
            (np.asarray(c.forward), np.asarray(c.backward_input), np.asarray(c.backward_weight)) for c in self.costs
        )

    @cached_property
    def _saved(self) -> Floats:
        return np.asarray(self.costs[0].saved_bytes, dtype=np.float64)

    @cached_property
    def sent(self) -> Floats:
        """Bytes of each op's output; replicable ops (masks, positions) are copied where they are used, never sent."""
        sizes = zip(self.graph.ops, self.costs[0].output_bytes)
        return np.array([0.0 if op.replicable else float(size) for op, size in sizes])

    @cached_property
    def sent_back(self) -> Floats:
        """Bytes of the gradient of each op's output; at least one, since a gradient of no bytes is waited for, too."""
        back = [op.requires_grad and not op.replicable for op in self.graph.ops]
        return np.where(back, np.maximum(self.sent, 1.0), 0.0)

    @cached_property
    def _edges(self) -> tuple[Ints, Ints]:
        pairs = [(a, b) for a, b in self.graph.edges if not self.graph.ops[a].replicable]
        table = np.array(pairs, dtype=np.int64).reshape(-1, 2)
        return table[:, 0], table[:, 1]

    @cached_property
    def _uses(self) -> tuple[Ints, Ints, Floats, Floats]:
        """(op, parameter) for every use of a parameter; bytes of every parameter, and those that are trained."""
        number = {name: i for i, name in enumerate(self.sizes)}
        uses = [(i, number[name]) for i, op in enumerate(self.graph.ops) for name in op.parameters]
        table = np.array(uses, dtype=np.int64).reshape(-1, 2)
        size = np.array([float(self.sizes[name][1]) for name in number])
        trained = np.array([0.0 if name in self.frozen else float(self.sizes[name][1]) for name in number])
        return table[:, 0], table[:, 1], size, trained

    def price(self, chunk_of: Sequence[int] | Ints, placement: Sequence[int]) -> Priced:
        """The figures of one split."""
        chunk = np.asarray(chunk_of, dtype=np.int64)
        count = len(placement)
        op, where = self._runs(chunk)
        times = [
            tuple(np.bincount(where, weights=column[op], minlength=count) for column in columns)
            for columns in self._times
        ]

        def at(chunk_index: int, column: int) -> float:
            stage = placement[chunk_index] if len(times) > 1 else 0
            return float(times[stage][column][chunk_index])

        held, trained = self._held(chunk, count)
        traffic, sent = self._traffic(chunk, placement)
        received = [0.0] * count
        for (_, target), cost in traffic.items():
            received[target] += cost[0]
        handling_forward, handling_backward = self._handling(placement, traffic)
        return Priced(
            placement=tuple(placement),
            forward=tuple(at(c, 0) for c in range(count)),
            backward_input=tuple(at(c, 1) for c in range(count)),
            backward_weight=tuple(at(c, 2) for c in range(count)),
            saved=self._kept(chunk, count, sent),
            scratch=self._scratch(chunk, placement, traffic),
            received=tuple(received),
            parameter_bytes=tuple(held.tolist()),
            trained_bytes=tuple(trained.tolist()),
            reduce=tuple(self.layout.reduce_seconds(s, float(b)) for s, b in zip(placement, trained)),
            traffic=traffic,
            handling_forward=handling_forward,
            handling_backward=handling_backward,
            ties=self._ties(chunk, placement),
        )

    def _kept(self, chunk: Ints, count: int, sent: Sequence[tuple[int, int]]) -> tuple[float, ...]:
        """Bytes that one micro-batch leaves in each chunk between its forward and its backward.

        Besides what autograd saves these are the outputs that wait for their gradient, and the inputs that will have
        one. Where the same tensor is among the saved ones it counts once.
        """
        kept = np.bincount(chunk, weights=self._saved, minlength=count).tolist()
        waiting, all_savers = set(), self.costs[0].savers
        for op, target in sent:
            savers = all_savers[op] if all_savers else ()
            home, size = int(chunk[op]), float(self.sent[op])
            saving = {int(chunk[saver]) for saver in savers}
            waits = self.graph.ops[op].requires_grad
            if waits and op not in waiting and home not in saving:
                waiting.add(op)
                kept[home] += size
            counted = bool(savers) and int(chunk[savers[0]]) == target
            if all_savers and (waits or target in saving) and not counted:
                kept[target] += size
        return tuple(kept)

    def _scratch(
        self,
        chunk: Ints,
        placement: Sequence[int],
        traffic: Mapping[tuple[int, int], tuple[float, float, float, float]],
    ) -> tuple[float, ...]:
        """Bytes that a chunk needs for a moment: some tensors of the largest size, and messages that came early."""
        largest = np.zeros(len(placement))
        np.maximum.at(largest, chunk, self._at_work)
        early = [0.0] * len(placement)
        for (source, target), (there, _, back, _) in traffic.items():
            if placement[source] != placement[target]:
                early[target] = max(early[target], there)
                early[source] = max(early[source], back)
        return tuple(float(size) + _EARLY * message for size, message in zip(largest, early))

    @cached_property
    def _at_work(self) -> Floats:
        """Bytes that come and go while each op runs."""
        convolutions = ["conv" in f"{op.module_class} {op.target}".lower() for op in self.graph.ops]
        return np.where(convolutions, _AT_CONVOLUTION, _AT_WORK) * np.asarray(
            self.costs[0].output_bytes, dtype=np.float64
        )

    def _runs(self, chunk: Ints) -> tuple[Ints, Ints]:
        """(op, chunk) for every op in every chunk that runs it: its own, or for replicable ops those that use it."""
        users: dict[int, set[int]] = {}
        for op, targets in self._replicable_users:
            users[op] = set().union(*(users.get(t, {int(chunk[t])}) for t in targets)) or {int(chunk[op])}
        copies = np.array([(op, home) for op, homes in users.items() for home in homes], dtype=np.int64).reshape(-1, 2)
        once = self._not_replicable
        return np.concatenate((once, copies[:, 0])), np.concatenate((chunk[once], copies[:, 1]))

    @cached_property
    def _not_replicable(self) -> Ints:
        return np.array([i for i, op in enumerate(self.graph.ops) if not op.replicable], dtype=np.int64)

    @cached_property
    def _replicable_users(self) -> list[tuple[int, list[int]]]:
        """Replicable ops from last to first, with the ops that use them."""
        found: dict[int, list[int]] = {i: [] for i, op in enumerate(self.graph.ops) if op.replicable}
        for source, target in self.graph.edges:
            if source in found:
                found[source].append(target)
        return sorted(found.items(), reverse=True)

    def _handling(
        self, placement: Sequence[int], traffic: Mapping[tuple[int, int], tuple[float, float, float, float]]
    ) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """What each forward and each backward of a chunk costs its device besides computing."""
        handling = self.layout.handling
        messages = [[0, 0] for _ in placement]
        sizes = [[0.0, 0.0] for _ in placement]
        for (source, target), (there, _, back, _) in traffic.items():
            if placement[source] != placement[target]:
                for end in (source, target):
                    messages[end][0] += 1
                    messages[end][1] += back > 0
                    sizes[end][0] += there
                    sizes[end][1] += back
        found = [tuple(map(handling.seconds, *both)) for both in zip(messages, sizes)]
        return tuple(f for f, _ in found), tuple(b for _, b in found)

    def _ties(self, chunk: Ints, placement: Sequence[int]) -> tuple[Tie, ...]:
        """Trained parameters that lie on several stages, those of the same chunks together."""
        op, parameter, _, trained = self._uses
        shared: dict[tuple[int, ...], float] = {}
        for which in self._used_often:
            chunks = tuple(sorted(set(chunk[op[parameter == which]].tolist())))
            if trained[which] and len({placement[c] for c in chunks}) > 1:
                shared[chunks] = shared.get(chunks, 0.0) + float(trained[which])
        return tuple(
            Tie(chunks, int(size), self.layout.tie_seconds(sorted({placement[c] for c in chunks}), size))
            for chunks, size in sorted(shared.items())
        )

    @cached_property
    def _used_often(self) -> list[int]:
        """Parameters that several ops use."""
        _, parameter, size, _ = self._uses
        return [int(which) for which in np.flatnonzero(np.bincount(parameter, minlength=len(size)) > 1)]

    def in_two_halves(self, priced: Priced, chunk_of: Sequence[int] | Ints) -> Priced:
        """The same split where backwards run in two halves.

        Every layer that is run that way takes a little longer; of all other ops the gradients of parameters come with
        those of the inputs. And there is one action more for every backward.
        """
        split = np.array([op.kind == "module" and op.module_class in _SPLIT for op in self.graph.ops])
        costs = self.costs[0]  # of the first device where they differ: what is moved is small
        longer = np.where(split, np.asarray(costs.split_extra), 0.0) if costs.split_extra else np.zeros(len(split))
        moved = np.where(split, 0.0, np.asarray(costs.backward_weight))

        def by_chunk(values: Floats) -> list[float]:
            found: list[float] = np.bincount(np.asarray(chunk_of), weights=values, minlength=count).tolist()
            return found

        count = len(priced.placement)
        more, less = by_chunk(longer + moved), by_chunk(moved)
        start = self.layout.handling.action
        return replace(
            priced,
            backward_input=tuple(b + m for b, m in zip(priced.backward_input, more)),
            backward_weight=tuple(max(0.0, w - m) + start for w, m in zip(priced.backward_weight, less)),
        )

    def _held(self, part_of: Ints, count: int) -> tuple[Floats, Floats]:
        """Parameter bytes, and those that are trained, of each part (chunk or stage): a parameter counts once in each."""
        op, parameter, size, trained = self._uses
        if not len(op):
            return np.zeros(count), np.zeros(count)
        keys = np.unique(part_of[op] * len(size) + parameter)
        part, which = keys // len(size), keys % len(size)

        def total(values: Floats) -> Floats:
            return np.bincount(part, weights=values[which], minlength=count).astype(np.float64)

        return total(size), total(trained)

    def _traffic(
        self, chunk: Ints, placement: Sequence[int]
    ) -> tuple[dict[tuple[int, int], tuple[float, float, float, float]], list[tuple[int, int]]]:
        """What each pair of chunks exchanges, and (op, chunk) for every output that goes to another chunk."""
        count = len(placement)
        source, target = self._edges
        crosses = chunk[source] != chunk[target]
        # A tensor is sent once to each chunk that uses it.
        keys = np.unique(source[crosses] * count + chunk[target[crosses]])
        sender = keys // count
        pairs, which = np.unique(chunk[sender] * count + keys % count, return_inverse=True)
        ahead = np.bincount(which, weights=self.sent[sender], minlength=len(pairs))
        back = np.bincount(which, weights=self.sent_back[sender], minlength=len(pairs))
        found = {}
        for pair, there, again in zip(pairs.tolist(), ahead.tolist(), back.tolist()):
            a, b = divmod(pair, count)
            seconds = (0.0, 0.0)
            if placement[a] != placement[b]:
                link = self._link(placement[a], placement[b])
                seconds = (link.seconds(there), link.seconds(again))
            found[a, b] = (there, seconds[0], again, seconds[1])
        return found, list(zip(sender.tolist(), (keys % count).tolist()))

    @cached_property
    def _links(self) -> dict[tuple[int, int], Link]:
        return {}

    def _link(self, a: int, b: int) -> Link:
        pair = (min(a, b), max(a, b))
        if pair not in self._links:
            self._links[pair] = self.layout.link(*pair)
        return self._links[pair]

    # ---- memory

    def memory(
        self, chunk_of: Sequence[int] | Ints, priced: Priced, schedule: Schedule, recompute: Sequence[bool]
    ) -> tuple[StageMemory, ...]:
        """What each stage holds at the peak of the schedule."""
        stage_of = np.asarray(priced.placement, dtype=np.int64)[np.asarray(chunk_of, dtype=np.int64)]
        held, trained = self._held(stage_of, schedule.stages)
        return tuple(
            StageMemory(
                weights=int(held[stage]),
                gradients=int(trained[stage]),
                optimizer=int(trained[stage] * self.optimizer_factor),
                activations=_activations(priced, schedule, stage, recompute),
                scratch=math.ceil(max(s for s, home in zip(priced.scratch, priced.placement) if home == stage)),
            )
            for stage in range(schedule.stages)
        )

    def fitting_recompute(
        self, chunk_of: Sequence[int] | Ints, priced: Priced, schedule: Schedule, wish: bool | str
    ) -> tuple[tuple[bool, ...], float, int]:
        """What is recomputed so that every stage fits; the bytes by which the worst one does not, and which that is.

        Chunks of a stage change to recomputation one by one, the one that saves most per second of extra work first.
        """
        again = [wish is True] * len(priced.placement)
        memory = self.memory(chunk_of, priced, schedule, again)
        over = [m.total - limit for m, limit in zip(memory, self.layout.memory)]
        if wish == "auto" and max(over) > 0:
            in_flight = chunk_peaks(schedule)
            for stage in [s for s, bytes_over in enumerate(over) if bytes_over > 0]:
                mine = [c for c, home in enumerate(priced.placement) if home == stage]
                saving = {c: in_flight[c] * (priced.saved[c] - priced.received[c]) for c in mine}
                fixed = memory[stage].total - memory[stage].activations
                for c in sorted(mine, key=lambda c: (priced.forward[c] / max(saving[c], 1e-30), c)):
                    if saving[c] <= priced.saved[c]:
                        continue  # with one micro-batch in flight nothing is won
                    again[c] = True
                    over[stage] = fixed + _activations(priced, schedule, stage, again) - self.layout.memory[stage]
                    if over[stage] <= 0:
                        break
        worst = max(range(len(over)), key=over.__getitem__)
        return tuple(again), max(0.0, over[worst]), worst

    # ---- for the plan

    def chunk_plans(self, chunk_of: Sequence[int], priced: Priced) -> tuple[ChunkPlan, ...]:
        members: list[list[int]] = [[] for _ in priced.placement]
        for op, chunk in enumerate(chunk_of):
            members[chunk].append(op)
        found = []
        for index, ops in enumerate(members):
            names = {name for op in ops for name in self.graph.ops[op].parameters}
            paths = [self.graph.ops[op].module for op in ops if self.graph.ops[op].module]
            found.append(
                ChunkPlan(
                    stage=priced.placement[index],
                    ops=len(ops),
                    first=paths[0] if paths else "-",
                    last=paths[-1] if paths else "-",
                    parameters=sum(self.sizes[name][0] for name in names),
                    parameter_bytes=int(priced.parameter_bytes[index]),
                    saved_bytes=int(priced.saved[index]),
                    forward=priced.forward[index],
                    backward_input=priced.backward_input[index],
                    backward_weight=priced.backward_weight[index],
                    received_bytes=int(priced.received[index]),
                    reduce=priced.reduce[index],
                    handling_forward=priced.handling_forward[index],
                    handling_backward=priced.handling_backward[index],
                )
            )
        return tuple(found)

    def traffic_plans(self, priced: Priced) -> tuple[Traffic, ...]:
        return tuple(
            Traffic(*pair, int(there), int(back), seconds, seconds_back)
            for pair, (there, seconds, back, seconds_back) in sorted(priced.traffic.items())
        )


def _activations(priced: Priced, schedule: Schedule, stage: int, recompute: Sequence[bool]) -> int:
    """Bytes that a stage keeps for backward at its peak.

    A chunk that recomputes holds all that it saves again, for the micro-batch that it is at. Between the two halves of
    a split backward everything is taken to stay.
    """
    size = [r if again else s for r, s, again in zip(priced.received, priced.saved, recompute)]
    level = peak = 0.0
    for action in schedule.actions[stage]:
        if action.kind == "F":
            level += size[action.chunk]
            peak = max(peak, level)
        elif action.kind in ("B", "W"):
            level -= size[action.chunk]
    mine = [c for c, home in enumerate(priced.placement) if home == stage]
    return math.ceil(peak + max((priced.saved[c] for c in mine if recompute[c]), default=0.0))


def chunk_peaks(schedule: Schedule) -> tuple[int, ...]:
    """Per chunk: the most micro-batches whose activations it holds at once."""
    live = [0] * schedule.chunks
    peak = [0] * schedule.chunks
    for actions in schedule.actions:
        for action in actions:
            if action.kind == "F":
                live[action.chunk] += 1
                peak[action.chunk] = max(peak[action.chunk], live[action.chunk])
            elif action.kind in ("B", "W"):
                live[action.chunk] -= 1
    return tuple(peak)
