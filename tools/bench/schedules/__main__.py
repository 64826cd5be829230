"""Print the table of schedules, a Gantt picture, the speed of the tools, or a comparison with torch's own lists.

python -m tools.bench.schedules                                   # the table
python -m tools.bench.schedules --stages 8 --microbatches 24 --chunks 2 --ratio 1:1:1
python -m tools.bench.schedules --gantt zb_v --stages 4 --microbatches 8
python -m tools.bench.schedules --gantt my_schedule.csv
python -m tools.bench.schedules --speed                           # 64 stages x 512 micro-batches
python -m tools.bench.schedules --peers                           # against torch.distributed.pipelining
python -m tools.bench.schedules --published                       # against the results of a paper
"""

from __future__ import annotations

import argparse
import sys
import time
from itertools import pairwise

from pipepart.errors import PipepartError
from pipepart.schedule import SCHEDULES, ChunkCosts, make_schedule, picture, simulate, table, validate


def _ratio(text: str) -> tuple[float, float, float]:
    parts = tuple(float(part) for part in text.split(":"))
    if len(parts) != 3:
        raise argparse.ArgumentTypeError(f"{text!r}: expected F:I:W such as 1:1:0.8")
    return parts


def speed(stages: int, microbatches: int) -> str:
    """Seconds to generate, prove and simulate each schedule."""
    lines = [
        f"{stages} stages x {microbatches} micro-batches, CPU seconds of one core",
        f"{'schedule':12}{'actions':>9}{'generate':>10}{'validate':>10}{'simulate':>10}{'all':>8}{'wall':>8}",
    ]
    for name in SCHEDULES:
        wall = time.perf_counter()
        marks = [time.process_time()]
        schedule = make_schedule(name, stages=stages, microbatches=microbatches)
        marks.append(time.process_time())
        validate(schedule)
        marks.append(time.process_time())
        timeline = simulate(schedule, ChunkCosts.even(stages, schedule.chunks // stages))
        assert timeline.step_time > 0
        assert timeline.bubble >= 0
        assert max(timeline.peak_activations) > 0
        marks.append(time.process_time())
        wall = time.perf_counter() - wall
        parts = [after - before for before, after in pairwise(marks)]
        actions = sum(map(len, schedule.actions))
        lines.append(
            f"{name:12}{actions:9}" + "".join(f"{part:10.2f}" for part in parts) + f"{sum(parts):8.2f}{wall:8.2f}"
        )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.schedules", description=__doc__.split("\n")[0])
    parser.add_argument("--stages", type=int, nargs="+", help="numbers of stages (p)")
    parser.add_argument("--microbatches", type=int, nargs="+", help="numbers of micro-batches (m)")
    parser.add_argument("--chunks", type=int, nargs="+", help="chunks per stage (v)")
    parser.add_argument("--ratio", type=_ratio, nargs="+", help="F:I:W of a stage, such as 1:1:1")
    parser.add_argument("--send", type=float, default=0.0, help="time of one message, in stage forwards")
    parser.add_argument("--gantt", metavar="NAME", help="draw this schedule (or .csv file) instead of the table")
    parser.add_argument("--speed", action="store_true", help="time the tools themselves")
    parser.add_argument("--peers", action="store_true", help="compare with the lists of torch.distributed.pipelining")
    parser.add_argument("--published", action="store_true", help="compare with the published results of a paper")
    options = parser.parse_args(argv)
    try:
        if options.gantt:
            text = picture(
                options.gantt,
                stages=options.stages[0] if options.stages else None,
                microbatches=options.microbatches[0] if options.microbatches else None,
                chunks=options.chunks[0] if options.chunks else None,
                ratio=options.ratio[0] if options.ratio else (1.0, 1.0, 1.0),
                send=options.send,
                color=sys.stdout.isatty(),
            )
            print(text)
        elif options.speed:
            print(speed((options.stages or [64])[0], (options.microbatches or [512])[0]))
        elif options.published:
            from tools.bench.schedules.published import published

            print(published())
        elif options.peers:
            from tools.bench.schedules.peers import peers

            print(peers(options.stages or [2, 4, 8], options.microbatches or [4, 8, 16, 24]))
        else:
            given = {}
            if options.ratio:
                given["ratios"] = options.ratio
            stages, microbatches = options.stages or [4, 8], options.microbatches or [8, 24]
            print(table(stages, microbatches, options.chunks or [1, 2, 4], send=options.send, **given))
    except PipepartError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
