"""All published graphs and some large ones: our bottleneck, the reference, the time, the gap, the simpler splits.

    python -m tools.bench.partition [--data FOLDER] [--large 10000] [--json FILE]
    python -m tools.bench.partition --thousand     # GPT-3 175B on 1,024 and Llama 405B on 512 devices, everything auto

Ends with an error if a known optimum is not met.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from pipepart.cost.given import read_graph
from pipepart.partition import Link, Partition, Problem, baselines, check, given_problem, partition
from tools.bench.partition.large import LARGE
from tools.bench.partition.references import LAYER_PROFILES, OPERATOR_GRAPHS

_STAGES = (2, 4, 8)
_LINK = Link(10e9, 10e-6)


@dataclass(frozen=True)
class Row:
    """One solved problem."""

    graph: str
    ops: int
    chunks: int
    what: str
    ours: float
    reference: float | None
    met: bool | None
    gap: float
    proved: bool
    seconds: float
    """Processor time."""
    wall_seconds: float
    reference_seconds: float | None
    even: float | None
    """Bottleneck of the even split over ours."""
    method: str


def solve(problem: Problem, chunks: int) -> tuple[Partition, float]:
    """The answer, checked, with the processor time of the search alone (the machine may be busy with other things)."""
    start = time.process_time()
    answer = partition(problem, chunks, slack=0.0)
    seconds = time.process_time() - start
    check(problem, answer)
    return answer, seconds


def operator_rows(folder: Path) -> list[Row]:
    """The graphs with known optima of the exact reference search."""
    rows = []
    for known in OPERATOR_GRAPHS:
        graph = read_graph(folder / "dnn-partitioning" / f"{known.graph}.json")
        for host, reference, digits in ((True, known.with_host, 5e-5), (False, known.accelerators, 0.0)):
            problem = given_problem(graph, host=host)
            answer, seconds = solve(problem, known.devices + host)
            met = answer.bottleneck <= reference * (1 + 1e-6) + digits
            what = f"{known.devices} devices" + (" and a host" if host else "")
            rows.append(_row(known.graph, problem, answer, what, 1.0, reference, met, seconds, known.seconds, None))
    return rows


def profile_rows(folder: Path) -> list[Row]:
    """The layer profiles, with free communication (where optima are known) and over a link."""
    rows = []
    for path in sorted((folder / "pipedream").glob("*_graph.txt")):
        name = path.stem.removesuffix("_graph")
        for link, what in ((None, "compute only"), (_LINK, "10 GB/s")):
            problem = given_problem(read_graph(path), link=link)
            for chunks in _STAGES:
                answer, seconds = solve(problem, chunks)
                reference = LAYER_PROFILES.get((name, chunks)) if link is None else None
                met = None if reference is None else answer.bottleneck * 1e3 <= reference * (1 + 1e-6) + 5e-4
                even = baselines(problem, chunks)["even"].bottleneck / answer.bottleneck
                rows.append(_row(name, problem, answer, what, 1e3, reference, met, seconds, None, even))
    return rows


def large_rows(ops: int, stages: tuple[int, ...]) -> list[Row]:
    """Made-up graphs of a size that has no reference."""
    rows = []
    for name, build in LARGE.items():
        for chunks in stages:
            problem = build(ops)
            answer, seconds = solve(problem, chunks)
            even = baselines(problem, chunks)["even"].bottleneck / answer.bottleneck
            rows.append(_row(f"{name} (made up)", problem, answer, "50 GB/s", 1e3, None, None, seconds, None, even))
    return rows


def _row(
    graph: str,
    problem: Problem,
    answer: Partition,
    what: str,
    unit: float,
    reference: float | None,
    met: bool | None,
    seconds: float,
    reference_seconds: float | None,
    even: float | None,
) -> Row:
    return Row(
        graph=graph,
        ops=problem.ops,
        chunks=answer.chunks,
        what=what,
        ours=answer.bottleneck * unit,
        reference=reference,
        met=met,
        gap=answer.gap,
        proved=answer.proved,
        seconds=seconds,
        wall_seconds=answer.seconds,
        reference_seconds=reference_seconds,
        even=even,
        method=answer.method,
    )


def table(rows: list[Row]) -> str:
    """The rows as text."""
    head = f"{'graph':38}{'ops':>6}{'chunks':>7}  {'on':21}{'ours':>11}{'reference':>11}  {'':5}{'gap':>8}{'cpu':>9}{'wall':>9}"
    lines = [head + f"{'ref. time':>10}{'even':>7}  how"]
    for row in rows:
        reference = "" if row.reference is None else f"{row.reference:.6g}"
        verdict = "" if row.met is None else "met" if row.met else "MISS"
        gap = "proved" if row.proved else f"{row.gap:.2%}"
        theirs = "" if row.reference_seconds is None else f"{row.reference_seconds:.3f} s"
        even = "" if row.even is None else f"x{row.even:.2f}"
        lines.append(
            f"{row.graph:38}{row.ops:>6}{row.chunks:>7}  {row.what:21}{row.ours:>11.6g}{reference:>11}  {verdict:5}"
            f"{gap:>8}{row.seconds:>7.3f} s{row.wall_seconds:>7.2f} s{theirs:>10}{even:>7}  {row.method}"
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Run the bench; 1 if a known optimum is not met, 2 if the data is not there."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench.partition", description=__doc__.split("\n\n")[0])
    default = os.environ.get("PIPEPART_DATA", str(Path(__file__).parents[3].parent / "shared" / "data"))
    parser.add_argument("--data", type=Path, default=Path(default), help="folder with the published graphs")
    parser.add_argument("--large", type=int, default=10_000, help="ops of the made-up graphs; 0 leaves them out")
    parser.add_argument("--stages", type=int, nargs="+", default=[8, 64], help="chunks for the made-up graphs")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--thousand", action="store_true", help="GPT-3 175B on 1,024 and Llama 405B on 512 devices")
    options = parser.parse_args(arguments)
    if options.thousand:
        from tools.bench.partition.thousand import thousand

        print(thousand())
        return 0
    if not (options.data / "dnn-partitioning").is_dir():
        print(f"no published graphs in {options.data}: give their folder with --data or PIPEPART_DATA", file=sys.stderr)
        return 2
    rows = operator_rows(options.data) + profile_rows(options.data)
    if options.large:
        rows += large_rows(options.large, tuple(options.stages))
    print(table(rows))
    known = [row for row in rows if row.met is not None]
    timed = [row for row in rows if row.reference_seconds is not None]
    quick = [row for row in timed if row.seconds < max(1.0, row.reference_seconds or 0.0)]
    proved = sum(row.proved for row in rows)
    print(
        f"\n{sum(bool(row.met) for row in known)} of {len(known)} known optima met; {proved} of {len(rows)} proved; "
        f"{len(quick)} of {len(timed)} solved below 1 s or below the reference's time"
    )
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return 0 if all(row.met for row in known) else 1


if __name__ == "__main__":
    sys.exit(main())
