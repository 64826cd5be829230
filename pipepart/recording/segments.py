"""Segments of a step that acts: each ends with a backward, and all are cut from one recording of the whole step.

```
the step     z  G  D(x)  D(G.detach)  BACKWARD  step D  D(G)  BACKWARD  step G
segment 1    z  G  D(x)  D(G.detach)  B
segment 2    z  G                                       D(G)  B
```

Each segment is a recording of its own with one loss. An op of an earlier segment is run again in a later one that needs its
value, if the parameters that it uses are still the same. If they have changed, its value is carried: an output of the
earlier segment, an input of the later one. A value through which gradients flow cannot be carried.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.fx as fx

from pipepart.errors import CaptureError
from pipepart.recording.op import op_of, where_is
from pipepart.recording.recorded import Recording
from pipepart.recording.recorded_run import intrinsics
from pipepart.recording.segment_graph import Segment, SegmentSource, segment_graph
from pipepart.recording.segment_ops import FIXED, Act, ActingOps

__all__ = ["Act", "Segment", "cut_segments"]

_CARRIED = 10
"""The cost of a carried value, in ops that are run again."""


@dataclass(eq=False)
class _Part:
    """A segment while it is made."""

    moment: int
    loss: fx.Node | None = None
    output: int | None = None
    gradient: set[fx.Node] = field(default_factory=set)
    """The ops through which gradients of the loss flow."""
    ops: set[fx.Node] = field(default_factory=set)
    carried: set[fx.Node] = field(default_factory=set)
    """Values of earlier segments."""
    given: dict[fx.Node, None] = field(default_factory=dict)
    """Values for later segments."""
    outputs: list[int] = field(default_factory=list)


def cut_segments(
    recording: Recording,
    acts: Sequence[Act],
    frozen: Sequence[Collection[str]],
    wanted: Collection[int],
    numbers: Mapping[str, int],
    redraws: bool = True,
) -> tuple[Segment, ...]:
    """Cut a recorded step, in the order in which its segments are run. Raises a `CaptureError` if that is not possible.

    `frozen` are the parameters that get no gradients, for each number of acts. `wanted` are the outputs of the recording
    that segments make besides their losses. `numbers` are those of the example (batch_idx and others). With `redraws`, an op
    that is run again draws the same random numbers.
    """
    return _Cut(ActingOps(recording, acts, frozen), numbers, redraws).segments(wanted)


class _Cut:
    """The search for the segments of one recording."""

    def __init__(self, ops: ActingOps, numbers: Mapping[str, int], redraws: bool) -> None:
        self.ops, self.numbers, self.redraws = ops, numbers, redraws
        self.recording, self.acts, self.nodes, self.outputs = ops.recording, ops.acts, ops.nodes, ops.outputs
        self.parts: list[_Part] = []

    # ---- values in segments

    def _valid(self, node: fx.Node, part: _Part) -> bool:
        """Return whether an op has the same value in a segment as where the step calls it."""
        if self.ops.changed(self.ops.parameters[node], op_of(node).moment, part.moment):
            return False
        changing = bool(self.ops.buffers[node] & self.ops.written) or node in self.ops.writes
        alone = (op_of(node).random and not self.redraws) or (changing and not self.ops.is_norm(node))
        if alone and part is not self._own(node):
            return False
        whole = (s for s in node.all_input_nodes if s.op not in FIXED)
        return all(self._valid(s, part) for s in whole if op_of(s).shape is None and not op_of(s).is_number)

    def _own(self, node: fx.Node) -> _Part | None:
        """Return the segment in whose time the step calls an op."""
        return next((part for part in self.parts if part.moment >= op_of(node).moment), None)

    def _at(self, moment: int) -> _Part:
        """Return a segment at a moment; if there is none, one without a loss is made."""
        for part in self.parts:
            if part.moment == moment:
                return part
        made = _Part(moment)
        self.parts = sorted([*self.parts, made], key=lambda part: part.moment)
        return made

    # ---- ops of segments

    def segments(self, wanted: Collection[int]) -> tuple[Segment, ...]:
        """Return the segments in order."""
        for moment, act in enumerate(self.acts):
            if act.loss is not None:
                loss = self.outputs[act.loss]
                if not isinstance(loss, fx.Node) or loss not in self.ops.requires:
                    raise CaptureError(
                        f"{act.text}: the loss requires no gradient. Expected a loss of parameters that are trained and not "
                        "frozen by toggle_optimizer."
                    )
                self.parts.append(_Part(moment, loss, act.loss))
        for part in list(self.parts):
            assert part.loss is not None
            part.gradient = self._reached(part.loss)
            self._need(part.loss, part)
        for index in wanted:
            node = self.outputs[index]
            if isinstance(node, fx.Node):
                self._best(node).outputs.append(index)
        for node in self.ops.writes:
            if not any(node in part.ops for part in self.parts):
                self._need(node, self._own(node) or self._at(len(self.acts)))
        self._add_checks()
        return self._finished()

    def _reached(self, loss: fx.Node) -> set[fx.Node]:
        found: set[fx.Node] = set()
        todo = [loss]
        while todo:
            node = todo.pop()
            if node not in found:
                found.add(node)
                todo.extend(source for source in op_of(node).differentiates if source in self.ops.requires)
        return found

    def _need(self, wanted: fx.Node, part: _Part) -> None:
        """Add an op and everything that it is computed from to a segment."""
        todo = [wanted]
        while todo:
            node = todo.pop()
            if node.op in FIXED or node in part.ops or node in part.carried:
                continue
            valid = self._valid(node, part)
            if node in part.gradient and not valid:
                raise self._stale(node, part)
            if valid and (node in part.gradient or not self._is_carried(node, part)):
                part.ops.add(node)
                todo.extend(node.all_input_nodes)
            else:
                part.carried.add(node)
                self._give(node, part)

    def _is_carried(self, node: fx.Node, part: _Part) -> bool:
        """Return whether a value is better carried: an earlier segment computes it from values that are no longer valid."""
        if op_of(node).shape is None or not any(node in other.ops for other in self._before(part)):
            return False
        return not self._is_clean(node, part)

    def _is_clean(self, wanted: fx.Node, part: _Part) -> bool:
        """Return whether a value and all that it is computed from are valid in a segment."""
        seen: set[fx.Node] = set()
        todo = [wanted]
        while todo:
            node = todo.pop()
            if node.op in FIXED or node in seen:
                continue
            if not self._valid(node, part):
                return False
            seen.add(node)
            todo.extend(node.all_input_nodes)
        return True

    def _before(self, part: _Part) -> list[_Part]:
        return [other for other in self.parts if other is not part and other.moment <= part.moment]

    def _stale(self, node: fx.Node, part: _Part) -> CaptureError:
        op, text = op_of(node), self.acts[part.moment].text
        act = self.ops.changed(self.ops.parameters[node], op.moment, part.moment)
        if act:
            because = f"{act} has changed its parameters since, so its gradients would be those of old values"
        elif op.random:
            because = "it draws random numbers, and with randomness='stage' they cannot be drawn again"
        else:
            because = "it changes or reads a buffer that the step changes, so it cannot be run again"
        return CaptureError(
            f"{self.recording.step}: the gradients of {text} flow through {node.name} ({where_is(node)}), which an earlier "
            f"part of the step has computed.\n  because: {because}\n  do: compute it again after the earlier backward, or "
            "detach it (.detach()) if no gradient is meant to flow"
        )

    def _give(self, node: fx.Node, later: _Part) -> None:
        """Let an earlier segment give a value to a later one."""
        storages, position = op_of(node).writes, self.ops.position[node]
        if any(op_of(n).mutates & storages for n in self.nodes[position + 1 :] if n.op not in FIXED):
            raise CaptureError(
                f"{self.recording.step}: {node.name} ({where_is(node)}) is computed in one part of the step, changed in place, "
                "and used in another part.\n  do: make a copy of it (.clone()) before it is changed"
            )
        earlier = self._before(later)
        for part in earlier:
            if node in part.ops:
                part.given[node] = None
                return
        own = self._own(node)
        part = own if own in earlier and own is not None and self._valid(node, own) else self._at(op_of(node).moment)
        self._need(node, part)
        part.given[node] = None

    def _best(self, node: fx.Node) -> _Part:
        """Return the segment that makes an output: one that computes it, or most of what it needs."""
        found = [(cost, i) for i, part in enumerate(self.parts) if (cost := self._cost(node, part)) is not None]
        part = self.parts[min(found)[1]] if found else self._at(op_of(node).moment)
        self._need(node, part)
        return part

    def _cost(self, wanted: fx.Node, part: _Part) -> int | None:
        """Return the cost of a value in a segment: ops besides its own, and carried values; None if it cannot be made."""
        seen: set[fx.Node] = set()
        carried = 0
        todo = [wanted]
        while todo:
            node = todo.pop()
            if node.op in FIXED or node in part.ops or node in part.carried or node in seen:
                continue
            seen.add(node)
            if self._is_carried(node, part):
                carried += _CARRIED
            elif node in self.ops.writes or not self._valid(node, part):
                return None
            else:
                todo.extend(node.all_input_nodes)
        return len(seen) + carried

    def _add_checks(self) -> None:
        """Add checks of sizes to all segments, other checks where their values are, and hooks on gradients."""
        for node in self.nodes:
            if node.target == "register_hook":
                for part in self.parts:
                    if all(source.op in FIXED or source in part.ops for source in node.all_input_nodes):
                        part.ops.add(node)
            if node.target is not intrinsics.check:
                continue
            if self._is_of_sizes(node):
                for part in self.parts:
                    self._need(node, part)
                continue
            self._best(node)

    def _is_of_sizes(self, check: fx.Node) -> bool:
        todo = list(check.all_input_nodes)
        while todo:
            node = todo.pop()
            if node.op == "placeholder":
                continue
            if not op_of(node).is_number or node.op in FIXED or node.target == "item":
                return False
            todo.extend(node.all_input_nodes)
        return True

    # ---- results

    def _finished(self) -> tuple[Segment, ...]:
        before: set[fx.Node] = set()
        found: list[Segment] = []
        for part in self.parts:
            again = [node for node in self.ops.writes if node in part.ops and node in before]
            new = [node for node in self.ops.writes if node in part.ops and node not in before]
            before |= part.ops
            restored = frozenset().union(*(self.ops.writes[node] for node in again)) if again else frozenset()
            for node in new:
                if self.ops.writes[node] & restored:
                    raise CaptureError(
                        f"{self.recording.step}: one backward needs a call of {op_of(node).module or node.name} that has run "
                        "before, and a new one, and both change the same buffers (statistics of BatchNorm).\n"
                        f"  where: {where_is(node)}\n"
                        "  do: compute both calls in the same part of the step, between the same two backwards"
                    )
            found.append(self._segment(part, tuple(sorted(restored)), tuple(found)))
        return tuple(found)

    def _trained(self, part: _Part) -> frozenset[str]:
        """Return the parameters that get a gradient. Refuses those that are frozen in one use and trained in another."""
        trained: dict[str, bool] = {}
        for node in sorted(part.gradient & part.ops, key=self.ops.position.__getitem__):
            op = op_of(node)
            names = set(self.ops.parameters[node]) if node.op == "call_module" else set()
            names |= {name for s in op.differentiates if (name := self.ops.attributes.get(s)) is not None}
            for name in names & self.ops.trainable:
                free = name not in self.ops.frozen[op.moment]
                if trained.setdefault(name, free) != free:
                    raise CaptureError(
                        f"{self.recording.step}: {self.acts[part.moment].text} gets gradients of {name} from a call inside "
                        "toggle_optimizer and from one outside of it.\n  do: call toggle_optimizer before the first of them"
                    )
        return frozenset(name for name, free in trained.items() if free)

    def _segment(self, part: _Part, restored: tuple[str, ...], earlier: tuple[Segment, ...]) -> Segment:
        trained = self._trained(part) if part.loss is not None else frozenset()
        makes: list[int | str] = [] if part.output is None else [part.output]
        results: list[Any] = [] if part.loss is None else [part.loss]
        makes += [*part.outputs, *(node.name for node in part.given)]
        results += [*(self.outputs[i] for i in part.outputs), *part.given]
        carried = sorted(part.carried, key=self.ops.position.__getitem__)
        flows = part.gradient | {node for node, name in self.ops.attributes.items() if name in trained}
        recording = segment_graph(self.recording, part.ops, carried, results, flows, part.loss is not None)
        takes = tuple(node.name for node in carried)
        inputs = recording.inputs[len(self.recording.inputs) :]
        recording = dataclasses.replace(
            recording, source=SegmentSource(self.recording, earlier, takes, inputs, self.numbers)
        )
        return Segment(recording, part.moment, trained, tuple(makes), takes, restored)
