"""Record the posts of the real executor for every schedule and print which of them hang under the rules of NCCL.

python -m tools.bench.channels                            # receives in the order of the plan: nothing may hang
python -m tools.bench.channels --posting planned 1 2      # against fixed numbers of receives posted ahead
python -m tools.bench.channels --stages 2 4 --describe    # with the first hang of each row in words

Each schedule runs with and without skips, even and uneven micro-batches, training and evaluation, without and with an op in
every forward for which the host waits; a recording has a first step with new forms and a second one.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from pathlib import Path

import torch

from pipepart.schedule.channel_rules import RULES, Stuck, check_posts

sys.path.insert(0, str(Path(__file__).parents[3] / "tests"))

from support.recorded_posts import Case, grid, record_posts, with_host_waits


def stuck_cases(case: Case, posting: int | str) -> tuple[int, list[tuple[str, Stuck]]]:
    """Return the number of checks of a case, and those that hang, by rule."""
    plain = record_posts(case, posting).programs
    checks = [(rule, check_posts(programs, rule)) for programs in (plain, with_host_waits(plain)) for rule in RULES]
    return len(checks), [(rule, stuck) for rule, stuck in checks if stuck is not None]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.channels", description=__doc__.split("\n")[0])
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 3, 4, 8], help="numbers of stages")
    parser.add_argument("--posting", nargs="+", default=["planned"], help="'planned', or receives posted ahead")
    parser.add_argument("--describe", action="store_true", help="describe the first hang of each row")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    started, count = time.process_time(), 0
    print(f"{'schedule':24}{'posting':>10}{'stages':>8}{'checks':>8}  " + "".join(f"{rule:>11}" for rule in RULES))
    failed = False
    rows: dict[str, list[Case]] = defaultdict(list)
    for case in grid(options.stages):
        words = " ".join(f"{name}={value}" for name, value in case.options)
        rows[f"{case.schedule} {words}".strip() + f"|{case.stages}"].append(case)
    for name, cases in rows.items():
        for posting in options.posting:
            checks, hangs = 0, list[tuple[Case, str, Stuck]]()
            for case in cases:
                number, found = stuck_cases(case, posting if posting == "planned" else int(posting))
                checks += number
                hangs += [(case, rule, stuck) for rule, stuck in found]
            count += checks
            failed = failed or (posting == "planned" and bool(hangs))
            marks = [sum(rule == other for _, other, _ in hangs) for rule in RULES]
            cells = "".join(f"{f'{mark} hang' if mark else 'ends':>11}" for mark in marks)
            print(f"{name.split('|')[0]:24}{posting:>10}{cases[0].stages:8}{checks:8}  {cells}", flush=True)
            if hangs and options.describe:
                print(f"  {hangs[0][0]}:\n  " + hangs[0][2].describe().replace("\n", "\n  "))
    print(f"{count} checks, {time.process_time() - started:.1f} s of processor time")
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
