"""Transfer of the chunks of a plan to another step of the same model (evaluation over the training plan)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipepart.errors import PlanError
from pipepart.graph import OpGraph

__all__ = ["transfer"]


def transfer(planned: OpGraph, chunk_of: Sequence[int], other: OpGraph, chunks: int) -> dict[str, int]:
    """Return a chunk for every op of `other`, such that each parameter is used where the plan has put it.

    Parameters fix the chunks of their ops. Any other op goes to the chunk of the op of the same name and module in the
    plan, as far as the order allows: not before its inputs, not after its users.
    """
    homes = _homes(planned, chunk_of)
    named = {(op.name, op.module, op.target): chunk for op, chunk in zip(planned.ops, chunk_of)}
    before: list[list[int]] = [[] for _ in other.ops]
    after: list[list[int]] = [[] for _ in other.ops]
    for source, target in other.edges:
        before[target].append(source)
        after[source].append(target)
    groups = _groups(other)
    allowed = [_allowed(other, group, homes, chunks) for group in groups]
    of_group = {op: index for index, group in enumerate(groups) for op in group}
    latest = [max(options) for options in allowed]
    for op in reversed(range(len(other.ops))):
        index = of_group[op]
        latest[index] = min([latest[index], *(latest[of_group[user]] for user in after[op] if of_group[user] != index)])
    placed = [min(options) for options in allowed]
    for _ in range(len(groups) + 1):
        changed = False
        for op in range(len(other.ops)):
            index = of_group[op]
            earliest = max([placed[index], *(placed[of_group[need]] for need in before[op])])
            wish = named.get((other.ops[op].name, other.ops[op].module, other.ops[op].target), earliest)
            wanted = max(earliest, min(wish, latest[index]))
            choice = min((chunk for chunk in allowed[index] if chunk >= wanted), default=None)
            if choice is None:
                raise _misfit(other, op, _cause(other, op, before, homes, wanted))
            if choice != placed[index]:
                placed[index], changed = choice, True
        if not changed:
            break
    return {op.name: placed[of_group[i]] for i, op in enumerate(other.ops)}


def _homes(planned: OpGraph, chunk_of: Sequence[int]) -> dict[str, set[int]]:
    """Return the chunks of the plan that use each parameter."""
    homes: dict[str, set[int]] = {}
    for op, chunk in zip(planned.ops, chunk_of):
        for name in op.parameters:
            homes.setdefault(name, set()).add(chunk)
    return homes


def _groups(graph: OpGraph) -> list[list[int]]:
    """Return groups of ops that stay together, ordered by their first op; most ops are alone in their group."""
    parent = list(range(len(graph.ops)))

    def find(op: int) -> int:
        while parent[op] != op:
            parent[op] = parent[parent[op]]
            op = parent[op]
        return op

    for group in graph.colocated:
        for op in group[1:]:
            a, b = sorted((find(group[0]), find(op)))
            parent[b] = a
    found: dict[int, list[int]] = {}
    for op in range(len(graph.ops)):
        found.setdefault(find(op), []).append(op)
    return list(found.values())


def _allowed(graph: OpGraph, group: Sequence[int], homes: Mapping[str, set[int]], chunks: int) -> list[int]:
    """Return the chunks that hold all parameters of the group; any chunk may hold those that training does not use."""
    options = set(range(chunks))
    for op in group:
        for name in graph.ops[op].parameters:
            options &= homes.get(name, options)
    if not options:
        first = graph.ops[group[0]]
        raise PlanError(
            f"{first.name!r} in module {first.module!r} uses parameters that the plan has put on different stages. "
            f"Keep them together: keep_together=[[{first.module!r}]]."
        )
    return sorted(options)


def _cause(
    graph: OpGraph, op: int, before: Sequence[Sequence[int]], homes: Mapping[str, set[int]], wanted: int
) -> int | None:
    """Return the nearest op before `op` whose parameters are in chunk `wanted` or later."""
    todo, seen = list(before[op]), {op}
    for found in todo:
        if found in seen:
            continue
        seen.add(found)
        places = [min(homes[name]) for name in graph.ops[found].parameters if name in homes]
        if places and max(places) >= wanted:
            return found
        todo.extend(before[found])
    return None


def _misfit(graph: OpGraph, op: int, cause: int | None) -> PlanError:
    late = graph.ops[op]
    needed = "a result of a later stage"
    modules = [late.module]
    if cause is not None:
        early = graph.ops[cause]
        needed = f"the result of module {early.module!r} ({early.source}), which is on a later stage"
        modules.append(early.module)
    return PlanError(
        f"this step uses the model in another order than training: module {late.module!r} ({late.source}) needs {needed}. "
        "A step that feeds its results back into its first layers (decoding step by step) needs them on one stage: set "
        f"keep_together=[{modules!r}], or use fewer stages."
    )
