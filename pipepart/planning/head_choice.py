"""The choice of the option `head`: plans with whole heads, and with heads in slices.

A head in slices computes the scores of some tokens at a time, and again in backward (see `runtime/sliced_loss.py`), so it
takes a quarter more products, and holds no scores between forward and backward. `auto` looks at it where memory demands it:
no plan fits, or a good part of the memory of the head's stage is scores, and this stage recomputes or is the fullest one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from pipepart.cost import OpCosts
from pipepart.errors import PipepartError, PlanError
from pipepart.graph import HeadOps, OpGraph
from pipepart.planning.head_mode import HeadMode
from pipepart.planning.plan import Plan
from pipepart.planning.request import PlanRequest
from pipepart.planning.sources import Costs

__all__ = ["SlicedCosts", "planned_with_head", "sliced_graph", "tokens_of_slice"]

_SLICE_BYTES = 64 * 2**20
"""Bytes of the scores of a slice, at most: a slice of this size keeps a device busy, and is small for its memory."""
_TOKENS = (64, 8192)
"""Tokens of a slice, at least and at most. Fewer would read the weight too often."""
_AT_WORK = 3
"""Tensors of the size of the scores that exist at the end of their forward, as in the memory of a stage."""
_SHARE = 0.25
"""Part of the memory of a stage that slices must free before `auto` looks at them."""
_LARGE = 64 * 2**20
"""Bytes of scores below which `auto` leaves a head whole, unless the memory is limited."""
_LONGER = 1.15
"""Factor by which `auto` lets a step take longer for a lower peak, where no limit demands it."""

_Make = Callable[[OpGraph, Costs], Plan]


def planned_with_head(make: _Make, graph: OpGraph, source: Costs, request: PlanRequest) -> Plan:
    """Return the plan that the option `head` asks for; `make` searches a plan for a graph and its costs."""
    mode = HeadMode.of(request.head)
    if not graph.heads:
        plan = make(graph, source)
        return plan if mode.mode == "auto" else replace(plan, head_note="; ".join(graph.whole_heads))
    tokens = mode.tokens or tokens_of_slice(graph)

    def sliced() -> Plan:
        plan = make(sliced_graph(graph), SlicedCosts(source, graph, tokens))
        return replace(plan, head=tokens)

    if mode.mode == "sliced":
        return sliced()
    failure: PlanError | None = None
    whole: Plan | None = None
    try:
        whole = make(graph, source)
    except PlanError as error:
        failure = error
    if whole is not None and not _demanded(whole, graph, source, request):
        return whole
    try:
        other = sliced()
    except PipepartError:
        if whole is None:
            assert failure is not None
            raise failure from None
        return whole
    return other if whole is None or _better(other, whole, request) else whole


def tokens_of_slice(graph: OpGraph) -> int:
    """Return the usual number of tokens of a slice: a power of two whose scores take a certain memory."""
    least, most = _TOKENS
    widest = max(_bytes_of_token(graph, head) for head in graph.heads)
    return max(least, min(most, 1 << int(math.log2(max(1.0, _SLICE_BYTES / widest)))))


def sliced_graph(graph: OpGraph) -> OpGraph:
    """Return the graph with the ops of each head in one chunk, and with a backward in two halves, also of `F.linear`."""
    ops = list(graph.ops)
    for head in graph.heads:
        ops[head.linear] = replace(ops[head.linear], kind="module", module_class="Linear")
    return replace(graph, ops=tuple(ops), colocated=(*graph.colocated, *(head.ops for head in graph.heads)))


def _bytes_of_token(graph: OpGraph, head: HeadOps) -> float:
    """Return the bytes of the scores of one token."""
    op = graph.ops[head.linear]
    return head.classes * op.output_bytes / max(1, math.prod(op.shape or (1,)))


def _demanded(plan: Plan, graph: OpGraph, source: Costs, request: PlanRequest) -> bool:
    """Return whether the memory of a plan with whole heads is a reason to look at slices."""
    kinds = request.layout(plan.stages, plan.replicas).kinds
    costs = source.at(plan.microbatch_size, kinds[0] if kinds else "")
    for head in graph.heads:
        stage = plan.placement[plan.chunk_of[head.loss]]
        scores = costs.output_bytes[head.linear]
        held = sum(costs.saved_bytes[op] for op in (*head.between, head.loss)) + _AT_WORK * scores
        total = plan.memory[stage].total
        if held < _SHARE * total:
            continue
        again = any(plan.recomputes[chunk] for chunk, home in enumerate(plan.placement) if home == stage)
        fullest = total >= max(memory.total for memory in plan.memory)
        if (again and plan.memory_limit is not None) or (fullest and scores >= _LARGE):
            return True
    return False


def _better(sliced: Plan, whole: Plan, request: PlanRequest) -> bool:
    """Return whether a plan with heads in slices is better than one with whole heads."""
    seconds, before = (plan.step_time * request.weight(plan.replicas) for plan in (sliced, whole))
    if any(whole.recomputes) and seconds < before:
        return True
    peak, full = (max(memory.total for memory in plan.memory) for plan in (sliced, whole))
    return peak <= (1 - _SHARE) * full and seconds <= _LONGER * before


@dataclass(frozen=True, eq=False)
class SlicedCosts:
    """A source of costs in which heads run in slices."""

    source: Costs
    graph: OpGraph
    tokens: int

    def at(self, microbatch_size: int, kind: str) -> OpCosts:
        """Return the costs of a micro-batch."""
        return sliced_costs(self.source.at(microbatch_size, kind), self.graph, self.tokens)


def sliced_costs(costs: OpCosts, graph: OpGraph, tokens: int) -> OpCosts:
    """Return the costs of all ops if heads run in slices, computed from those of whole heads.

    The forward makes the scores, their gradient and that of the hidden states; the second half of backward makes the scores
    and their gradient again, and the gradient of the weight. Between them the hidden states and their gradient are kept.
    """
    columns = {name: list(getattr(costs, name)) for name in ("forward", "backward_input", "backward_weight")}
    saved, outputs = list(costs.saved_bytes), list(costs.output_bytes)
    forward, back, weight = columns.values()
    for head in graph.heads:
        linear, others = head.linear, (*head.between, head.loss)
        rows = outputs[linear] / max(1e-9, _bytes_of_token(graph, head))
        share = min(1.0, tokens / max(rows, 1.0))
        scores = forward[linear] + _sum(forward, others)
        gradient = _sum(back, others) + _sum(weight, others)
        by_input, by_weight = back[linear], weight[linear]
        if not by_weight and by_input and graph.ops[linear].kind == "function":
            by_input = by_weight = by_input / 2  # measured together
        trained = by_weight > 0
        forward[linear] = scores + (gradient + by_input if by_input else 0.0)
        back[linear], weight[linear] = 0.0, scores + gradient + by_weight if trained else 0.0
        saved[linear] += outputs[head.hidden] if by_input else 0
        outputs[linear] = round(outputs[linear] * share)
        for op in others:
            forward[op] = back[op] = weight[op] = 0.0
            saved[op] = min(saved[op], round(16 * rows))  # the targets
        for op in head.between:
            outputs[op] = round(outputs[op] * share)
    return replace(
        costs,
        forward=tuple(forward),
        backward_input=tuple(back),
        backward_weight=tuple(weight),
        saved_bytes=tuple(saved),
        output_bytes=tuple(outputs),
    )


def _sum(column: list[float], ops: Collection[int]) -> float:
    return math.fsum(column[op] for op in ops)
