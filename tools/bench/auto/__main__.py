"""`python -m tools.bench.auto [gpt resnet ... all links memory] [--devices 2] [--batch 32] [--steps 1] [--rounds 16]`.

All shapes of a model live in the same processes and take turns, so that a slow minute of the machine hits all of them.
"""

from __future__ import annotations

import argparse
import dataclasses

from tools.bench.auto.models import NAMES, RECIPES, build, usual_batch
from tools.bench.auto.shapes import Measured, Shape, shapes_for, side_by_side
from tools.bench.runtime.processes import on_ranks


def table(model: str, batch: int | None, devices: int, steps: int, rounds: int, full: bool) -> tuple[str, float]:
    """Measured and predicted of auto, of plain DDP and of every fixed shape; how much slower auto is than the best."""
    from pipepart.errors import PipepartError
    from pipepart.graph import capture
    from pipepart.planning import plan

    batch = batch or usual_batch(model)
    module, example = build(model, batch)
    captured = capture(module, example)
    auto = plan(captured, example, devices=devices, cost="profile")
    print(f"{model}: auto is {auto.replicas} x {auto.stages}, {auto.schedule}, m={auto.microbatches}", flush=True)
    shapes = [Shape("auto", auto.stages, auto.replicas)]
    for shape in shapes_for(devices, (2 * devices, 4 * devices, 8 * devices) if full else (4 * devices,)):
        if shape.replicas > batch or int(shape.microbatches) > batch // shape.replicas:
            continue
        try:
            plan(captured, batch_size=batch, cost="analytic", **shape.options)
        except PipepartError as error:
            print(f"{model}: {shape.name} is left out: {error}", flush=True)
            continue
        shapes.append(shape)
    found = on_ranks(
        devices, side_by_side, model, batch, shapes, auto.to_json(indent=None), steps, rounds, timeout=900.0
    )
    best = {name: _slowest([ranks[name] for ranks in found]) for name in found[0]}
    fastest = min(one.seconds for one in best.values())
    lines = [f"{model}, batch {batch}, {devices} devices", _head()]
    lines += [_row(name, best[name], batch, fastest) for name in sorted(best, key=lambda name: best[name].seconds)]
    gap = best["auto"].seconds / fastest - 1
    lines.append(f"auto is {gap:.1%} slower than the fastest" if gap > 0 else "auto is the fastest")
    return "\n".join(lines), gap


def _slowest(found: list[Measured]) -> Measured:
    return dataclasses.replace(found[0], seconds=max(one.seconds for one in found))


def _head() -> str:
    columns = f"{'error':>7} {'spread':>7} {'samples/s':>10} {'of best':>8}  ran as"
    return f"{'shape':28} {'predicted':>10} {'measured':>10} {columns}"


def _row(name: str, found: Measured, batch: int, fastest: float) -> str:
    predicted = f"{found.predicted * 1e3:7.1f} ms" if found.predicted else "-"
    error = f"{found.predicted / found.seconds - 1:+.0%}" if found.predicted else "-"
    return (
        f"{name:28} {predicted:>10} {found.seconds * 1e3:7.1f} ms {error:>7} {found.spread:>7.0%} "
        f"{batch / found.seconds:10.0f} {fastest / found.seconds:>8.0%}  {found.what}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.auto", description=__doc__)
    parser.add_argument("what", nargs="*", default=["gpt"], help=f"{', '.join(NAMES)}; all (recipes), links, memory")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--batch", type=int, help="samples over all replicas; by default the recipe's own batch")
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--full", action="store_true", help="three numbers of micro-batches for the fixed shapes")
    given = parser.parse_args()
    wanted = [name for what in given.what for name in (RECIPES if what == "all" else (what,))]
    unknown = [what for what in wanted if what not in (*NAMES, "links", "memory")]
    if unknown:
        parser.error(f"{', '.join(unknown)} not known: {', '.join(NAMES)}, all, links, memory")
    gaps = {}
    for what in wanted:
        if what == "links":
            from tools.bench.auto.links import links

            print(links())
        elif what == "memory":
            from tools.bench.auto.memory import memory

            print(memory(tuple(name for name in wanted if name in NAMES) or RECIPES, given.batch, given.devices))
        elif "memory" not in wanted:
            text, gaps[what] = table(what, given.batch, given.devices, given.steps, given.rounds, given.full)
            print(text, flush=True)
    if len(gaps) > 1:
        print("auto against the fastest: " + ", ".join(f"{name} {gap:+.1%}" for name, gap in gaps.items()))


if __name__ == "__main__":
    main()
