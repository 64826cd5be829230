"""`python -m tools.bench.auto [gpt resnet recipe links] [--devices 2] [--batch 32] [--steps 15] [--rounds 2] [--quick]`.

Every shape is run `rounds` times in turn, so that a slow minute of the machine hits all of them; the least median of the
rounds counts.
"""

from __future__ import annotations

import argparse
import dataclasses
import math

from tools.bench.auto.models import NAMES, build
from tools.bench.auto.shapes import Measured, Shape, ddp, pipeline, shapes_for
from tools.bench.runtime.processes import on_ranks


def automatic(model: str, batch: int, devices: int) -> str:
    """The plan that auto picks for this machine, as JSON: costs measured here, nothing fixed."""
    from pipepart.planning import plan

    module, example = build(model, batch)
    found = plan(module, example, devices=devices, cost="profile")
    print(found.describe(), flush=True)
    return found.to_json(indent=None)


def table(model: str, batch: int, devices: int, steps: int, rounds: int, quick: bool) -> str:
    """Measured and predicted of auto, of plain DDP and of every fixed shape."""
    from pipepart.planning import Plan

    chosen = automatic(model, batch, devices)
    mesh = Plan.from_json(chosen)
    auto = Shape("auto", mesh.stages, mesh.replicas)
    shapes = shapes_for(devices, (2 * devices,) if quick else (2 * devices, 4 * devices, 8 * devices))
    shapes = [shape for shape in shapes if shape.replicas <= batch and _count(shape) <= batch // shape.replicas]
    best: dict[str, Measured] = {}

    def keep(name: str, found: Measured) -> None:
        if name not in best or found.seconds < best[name].seconds:
            best[name] = found

    for number in range(rounds):
        keep("plain DDP", _slowest(on_ranks(devices, ddp, model, batch, steps)))
        for shape in [auto, *shapes]:
            given = chosen if shape is auto else None
            try:
                keep(shape.name, _slowest(on_ranks(devices, pipeline, model, batch, shape, given, steps)))
            except RuntimeError as error:
                best.setdefault(shape.name, Measured(0.0, math.inf, 0.0, str(error).strip().splitlines()[-1][:70]))
        print(f"round {number + 1} of {rounds} done", flush=True)
    fastest = min(found.seconds for found in best.values())
    lines = [f"{model}, batch {batch}, {devices} devices", _head()]
    for name in sorted(best, key=lambda name: best[name].seconds):
        lines.append(_row(name, best[name], batch, fastest))
    gap = best["auto"].seconds / fastest - 1
    lines.append(f"auto is {gap:.1%} slower than the fastest" if gap > 0 else "auto is the fastest")
    return "\n".join(lines)


def _count(shape: Shape) -> int:
    return 1 if shape.microbatches == "auto" else int(shape.microbatches)


def _slowest(found: list[Measured]) -> Measured:
    return dataclasses.replace(found[0], seconds=max(one.seconds for one in found))


def _head() -> str:
    columns = f"{'error':>7} {'spread':>7} {'samples/s':>10} {'of best':>8}  ran as"
    return f"{'shape':28} {'predicted':>10} {'measured':>10} {columns}"


def _row(name: str, found: Measured, batch: int, fastest: float) -> str:
    if not math.isfinite(found.seconds):
        return f"{name:28} failed: {found.what}"
    predicted = f"{found.predicted * 1e3:7.1f} ms" if found.predicted else "-"
    error = f"{found.predicted / found.seconds - 1:+.0%}" if found.predicted else "-"
    return (
        f"{name:28} {predicted:>10} {found.seconds * 1e3:7.1f} ms {error:>7} {found.spread:>7.0%} "
        f"{batch / found.seconds:10.0f} {fastest / found.seconds:>8.0%}  {found.what}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.auto", description=__doc__)
    parser.add_argument("what", nargs="*", default=["recipe"], help=f"{', '.join(NAMES)}, links")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="one number of micro-batches for the fixed shapes")
    given = parser.parse_args()
    for what in given.what:
        if what == "links":
            from tools.bench.auto.links import links

            print(links())
        elif what in NAMES:
            print(table(what, given.batch, given.devices, given.steps, given.rounds, given.quick))
        else:
            parser.error(f"{what!r} is not known: {', '.join(NAMES)}, links")


if __name__ == "__main__":
    main()
