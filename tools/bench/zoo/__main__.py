"""Try capture on the zoo: ``python -m tools.bench.zoo [language|images|plain|libraries] [names...] [options]``.

``libraries`` (not part of ``all``) are models of other libraries, from an environment of their own (``make zoo-env``, then
``.venv-zoo/bin/python -m tools.bench.zoo libraries``). They are also run on two stages, and each in child processes. A name
may be that of a library.

Timing all models of a family takes minutes: ``--part 1/3 --times`` takes the time of every third model and nothing else.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import statistics
import sys
import warnings

import torch

from pipepart.errors import PipepartError
from tools.bench.zoo import images, language, libraries, library_table, plain
from tools.bench.zoo.checks import Report, check_model
from tools.bench.zoo.proof_times import proof_ratio

FAMILIES = {
    "plain": plain.ARCHITECTURES,
    "language": language.ARCHITECTURES,
    "images": images.ARCHITECTURES,
}


def main() -> int:
    """Check the asked models, print a line for each and a summary; exit 1 if one was not equal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("family", nargs="?", default="all", choices=["all", *FAMILIES, "libraries"])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--speed", action="store_true", help="also time a step against the original, side by side")
    parser.add_argument("--times", action="store_true", help="time capture and steps only, compare nothing")
    parser.add_argument(
        "--proof", action="store_true", help="time capture with and without the proof of gradients only"
    )
    parser.add_argument("--part", default="1/1", help="I/N: only every N-th model, from the I-th on")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds for each model of a library")
    parser.add_argument("--json", help="write the reports to this file")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    part, parts = (int(number) for number in options.part.split("/"))
    if options.family == "libraries":
        if options.speed or options.times or options.proof:
            parser.error("libraries are compared only: --speed, --times and --proof are for the other families")
        unknown = set(options.names) - set(libraries.ARCHITECTURES) - set(libraries.LIBRARIES)
        if unknown:
            parser.error(f"{sorted(unknown)} are no models and no libraries; there are {libraries.LIBRARIES}")
        asked = [n for n in libraries.ARCHITECTURES if not options.names or {n, n.partition(".")[0]} & {*options.names}]
        return library_table.run(asked[part - 1 :: parts], options.json, options.limit)
    wanted = [
        (family, name)
        for family, builders in FAMILIES.items()
        for name in builders
        if options.family in ("all", family) and (not options.names or name in options.names)
    ]
    if options.proof:
        return _proof_times(wanted[part - 1 :: parts])
    reports: list[Report] = []
    if options.times:
        check_model("warm-up", *plain.ARCHITECTURES["gpt"](), equality=False)
    for family, name in wanted[part - 1 :: parts]:
        torch.manual_seed(0)
        model, example = FAMILIES[family][name]()
        report = check_model(
            f"{family}/{name}", model, example, speed=options.speed or options.times, equality=not options.times
        )
        reports.append(report)
        word = "captured" if options.times else "equal"
        print(
            f"{report.name:44} {word if report.equal else 'FAILED':8} ops {report.ops:5} "
            f"capture {report.seconds:6.2f} s  largest op {report.largest_op:4.0%} "
            f"(leaf {report.largest_leaf:4.0%}) {f'speed {report.speed:.2f} ' if report.speed else ''}"
            f"{'whole: ' + ', '.join(report.kept_whole) if report.kept_whole else ''}"
            f"{' | '.join(report.problems[:2])}",
            flush=True,
        )
    good = [report for report in reports if report.equal]
    indivisible = [r.name for r in good if r.largest_op > 0.4 and r.largest_op > r.largest_leaf + 1e-9]
    print(f"\n{len(good)} of {len(reports)} {'captured' if options.times else 'equal'}")
    print(f"more than 40 % in one op by our doing: {indivisible or 'none'}")
    if good:
        print(
            f"capture: median {statistics.median(r.seconds for r in good):.2f} s, worst {max(r.seconds for r in good):.2f} s"
        )
    speeds = [report.speed for report in good if report.speed]
    if speeds:
        print(f"step time against the original: median {statistics.median(speeds):.3f}, worst {max(speeds):.3f}")
    if options.json:
        with open(options.json, "w") as file:
            json.dump([dataclasses.asdict(report) for report in reports], file, indent=1)
    return 0 if len(good) == len(reports) else 1


def _proof_times(wanted: list[tuple[str, str]]) -> int:
    """The time of capture with the proof of gradients over that without it, for each model; the median at the end."""
    ratios = []
    for family, name in wanted:
        torch.manual_seed(0)
        model, example = FAMILIES[family][name]()
        model.train()
        try:
            ratios.append(proof_ratio(model, example(2)))
        except PipepartError as error:
            print(f"{family}/{name:36} not captured: {str(error)[:120]}")
            continue
        print(f"{family}/{name:36} {ratios[-1]:.2f}", flush=True)
    if ratios:
        print(f"\ncapture with the proof over capture without: median {statistics.median(ratios):.2f}, ", end="")
        print(f"worst {max(ratios):.2f}, {len(ratios)} models")
    return 0 if ratios and statistics.median(ratios) <= 1.6 else 1


if __name__ == "__main__":
    sys.exit(main())
