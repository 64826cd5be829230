"""Small random problems and their optimum by trying every assignment: slow, and without any idea of the search."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator

import numpy as np

from pipepart.partition import Device, Link, Problem

GB = 1e9


def assignments(problem: Problem, chunks: int) -> Iterator[tuple[int, ...]]:
    """Every op -> chunk that never decreases along an edge, keeps groups together and has the forced cuts."""
    before: dict[int, list[int]] = {}
    for a, b in problem.edges:
        before.setdefault(b, []).append(a)
    first = {}
    for group in problem.colocated:
        for op in group:
            first[op] = min(first.get(op, op), *group)

    def extend(done: list[int]) -> Iterator[tuple[int, ...]]:
        op = len(done)
        if op == problem.ops:
            yield tuple(done)
            return
        low = max((done[a] for a in before.get(op, ())), default=0)
        for chunk in range(low, chunks):
            if first.get(op, op) < op and done[first[op]] != chunk:
                continue
            yield from extend([*done, chunk])

    for chunk_of in extend([]):
        if all(max(chunk_of[:cut]) < min(chunk_of[cut:]) for cut in problem.split_at) and all(
            len({chunk_of[op] for op in group}) == 1 for group in problem.colocated
        ):
            yield chunk_of


def work_somewhere(problem: Problem, op: int) -> bool:
    """The op takes time on some device."""
    times = [problem.forward[op] + problem.backward[op]]
    for kind in problem.devices:
        if kind.forward is not None and kind.backward is not None:
            times.append(kind.forward[op] + kind.backward[op])
    return any(time > 0 for time in times)


def load_of(problem: Problem, chunk_of: tuple[int, ...], chunk: int, chunks: int, device: int, held: int) -> float:
    """Seconds of a chunk by the definition; infinite if it does not fit, cannot run, or has no work."""
    kind = problem.devices[device]
    forward = problem.forward / kind.speed if kind.forward is None else kind.forward
    backward = problem.backward / kind.speed if kind.backward is None else kind.backward
    mine = [op for op in range(problem.ops) if chunk_of[op] == chunk]
    ahead = sum(forward[op] for op in mine)
    compute = ahead + sum(backward[op] for op in mine)
    if not any(work_somewhere(problem, op) for op in mine):
        return math.inf
    paid = arriving = 0.0
    training = problem.backward.sum() > 0
    for source in range(problem.ops):
        where = {chunk_of[source]} | {chunk_of[b] for a, b in problem.edges if a == source}
        size = problem.output_bytes[source]
        if chunk in where and len(where) > 1 and size > 0:
            link = problem.links[0 if len(problem.links) == 1 else chunk - 1 if min(where) < chunk else chunk]
            ways = 2 if training else 1
            paid += ways * (link.latency + size / link.bandwidth) if kind.communicates else 0.0
            if chunk_of[source] < chunk:
                arriving += size
    room = kind.memory - problem.reserved_bytes
    state = sum(problem.parameter_bytes[op] for op in mine) * problem.state_factor
    saved = sum(problem.saved_bytes[op] for op in mine)
    choices = []
    for word in problem.recompute:
        work = compute + (ahead if word == "full" else 0.0)
        used = state + (held * arriving + saved if word == "full" and held else held * saved)
        if used <= room:
            choices.append(max(work, paid) if problem.overlap else work + paid)
    return min(choices, default=math.inf)


def optimum(problem: Problem, chunks: int, microbatches: int = 1) -> float:
    """The smallest bottleneck over all assignments (and all orders of the devices, if they are a pool)."""
    best = math.inf
    counts = range(1, chunks + 1) if problem.fewer else (chunks,)
    for count in counts:
        if problem.any_order:
            placements = list(itertools.permutations(range(len(problem.devices)), count))
        else:
            placements = [tuple(problem.device(chunk) for chunk in range(count))]
        for chunk_of in assignments(problem, count):
            if len(set(chunk_of)) < count:
                continue
            for devices in placements:
                worst = 0.0
                for chunk, device in enumerate(devices):
                    held = problem.held(chunk, chunks, microbatches)
                    worst = max(worst, load_of(problem, chunk_of, chunk, count, device, held))
                    if worst >= best:
                        break
                best = min(best, worst)
    return best


def random_problem(seed: int, ops: int) -> Problem:
    """A random DAG with skips, idle ops, groups, memory, and one or two kinds of devices."""
    rng = np.random.default_rng(seed)
    edges = {(int(rng.integers(0, b)), b) for b in range(1, ops) if rng.random() < 0.9}
    for _ in range(int(rng.integers(0, ops))):
        a, b = sorted(int(x) for x in rng.choice(ops, 2, replace=False))
        edges.add((a, b))
    forward = np.round(rng.random(ops) * (rng.random(ops) > 0.3), 3)
    training = rng.random() < 0.7
    problem = Problem(
        forward=forward,
        backward=2 * forward * training,
        parameter_bytes=np.round(rng.random(ops) * 100) * (rng.random(ops) > 0.4),
        saved_bytes=np.round(rng.random(ops) * 50) * (rng.random(ops) > 0.4),
        output_bytes=np.round(rng.random(ops) * 100) * (rng.random(ops) > 0.2),
        edges=tuple(sorted(edges)),
        links=(Link(float(rng.choice([100.0, 1000.0, 1e6])), float(rng.choice([0.0, 0.01]))),),
        overlap=bool(rng.random() < 0.3),
    )
    if rng.random() < 0.3:
        problem = dataclasses.replace(problem, colocated=(tuple(int(x) for x in rng.choice(ops, 2, replace=False)),))
    return problem


def with_memory(problem: Problem, seed: int, chunks: int) -> Problem:
    """The same with a limit that binds, and a rule for what is in flight."""
    rng = np.random.default_rng(seed + 1)
    total = float(problem.parameter_bytes.sum() * 4 + problem.saved_bytes.sum())
    return dataclasses.replace(
        problem,
        devices=(Device(memory=total * float(rng.choice([0.5, 0.7, 1.2]))),),
        state_factor=4.0,
        in_flight=str(rng.choice(["one", "gpipe", "1f1b"])),
        recompute=tuple([("none",), ("none", "full"), ("full",)][int(rng.integers(3))]),
    )


def with_two_kinds(problem: Problem, seed: int, chunks: int) -> Problem:
    """The same on fast and slow devices, in a given order or as a pool, with different links."""
    rng = np.random.default_rng(seed + 2)
    memory = float(rng.choice([math.inf, problem.parameter_bytes.sum() * 0.8 + 1]))
    fast = Device("fast", speed=2.0, memory=memory)
    times = np.round(rng.random(problem.ops), 3) * (problem.forward > 0)
    slow = Device("slow", forward=times, backward=0 * times, communicates=bool(rng.random() < 0.5))
    kinds = [fast, slow]
    devices = tuple(kinds[int(i)] for i in rng.integers(0, 2, chunks))
    pool = bool(rng.random() < 0.5)
    links = problem.links
    if not pool and chunks > 2:
        links = tuple(Link(float(rng.choice([100.0, 1000.0])), 0.001 * int(rng.integers(3))) for _ in range(chunks - 1))
    return dataclasses.replace(problem, devices=devices if chunks > 1 else devices[:1], any_order=pool, links=links)
