"""Plans in the forms of other libraries: Megatron-LM, torchtitan, `torch.distributed.pipelining`.

These divide a model into whole layers. A plan whose cuts lie inside a layer is refused, or its cuts are moved to the
nearest border of a layer (``snap``), with a note.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from pipepart.errors import PlanError, did_you_mean
from pipepart.planning.plan import Plan
from pipepart.schedule import looped_placement, to_csv

__all__ = ["TARGETS", "Exported", "export", "read_layout"]

TARGETS = ("megatron", "torchtitan", "torch")
_TITAN = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "zb_v": "ZBVZeroBubble",
    "dualpipe_v": "DualPipeV",
}
"""Schedules that torchtitan knows by name."""


@dataclass(frozen=True)
class Exported:
    """A plan in the form of another library."""

    target: str
    text: str
    """Megatron: arguments of the command line; torchtitan: a section of its TOML file; torch: JSON."""
    parts: tuple[tuple[str, ...], ...]
    """Paths of the whole modules of each chunk, below the module that holds the layers."""
    notes: tuple[str, ...] = ()
    """Parts of the plan that the target cannot express."""


@dataclass(frozen=True)
class _Units:
    """Layers and other whole modules, with the ops of each chunk that lie in them."""

    layers: str
    """Path of the module list that holds the layers."""
    ops: dict[str, Counter[int]]
    """Path of each layer, and of each other child of the module around the list -> ops by chunk, in program order."""
    outside: tuple[str, ...]
    """Modules elsewhere, which no target can place."""

    @property
    def root(self) -> str:
        return self.layers.rpartition(".")[0]

    def is_layer(self, unit: str) -> bool:
        return unit.startswith(self.layers + ".")


def export(plan: Plan, target: str, *, layers: str | None = None, snap: bool = False) -> Exported:
    """Return a plan in the form of ``target`` (see `Plan.export`)."""
    if target not in TARGETS:
        raise PlanError(f"target {target!r} is not known: {did_you_mean(target, TARGETS)}")
    if not any(plan.modules):
        raise PlanError("the plan does not name the modules of its ops, as plans of older versions; make it again")
    units = _units(plan, layers)
    homes, notes = _homes(plan, units, target, snap)
    _check_chain(plan, target)
    parts: list[list[str]] = [[] for _ in plan.placement]
    for unit, home in homes.items():
        parts[home].append(unit[len(units.root) + 1 :] if units.root else unit)
    notes += _common_notes(plan, units)
    if target == "megatron":
        layered = [[units.is_layer(unit) for unit in homes if homes[unit] == chunk] for chunk in range(len(parts))]
        text, more = _megatron(plan, parts, layered)
    else:
        text, more = _titan(plan, parts) if target == "torchtitan" else _torch(plan, parts)
    return Exported(target, text, tuple(map(tuple, parts)), (*notes, *more))


def _units(plan: Plan, layers: str | None) -> _Units:
    """Find the list of layers, which has the most members, and count the ops of each unit by chunk."""
    found: dict[str, set[str]] = {}
    for path in plan.modules:
        if numbered := re.match(r"(?:(.*?)\.)?(\d+)(?:\.|$)", path):
            found.setdefault(numbered[1] or "", set()).add(numbered[2])
    if layers is None:
        layers = max(found, key=lambda prefix: len(found[prefix]), default="")
    if not layers or len(found.get(layers, ())) < 2:
        lists = ", ".join(sorted(prefix for prefix in found if prefix)) or "none"
        raise PlanError(
            f"layers={layers!r}: expected the path of a module list with at least two layers; lists of this model: {lists}"
        )
    root = layers.rpartition(".")[0]
    before = f"{root}." if root else ""
    ops: dict[str, Counter[int]] = {}
    outside: dict[str, None] = {}
    for path, chunk in zip(plan.modules, plan.chunk_of):
        if not path or path == root:
            continue  # the code of the module around the layers itself: it has no name of its own
        if not path.startswith(before):
            if not root.startswith(path):
                outside[path] = None
            continue
        parts = path[len(before) :].split(".")
        unit = before + (".".join(parts[:2]) if path.startswith(layers + ".") else parts[0])
        if unit != layers:
            ops.setdefault(unit, Counter())[chunk] += 1
    return _Units(layers, ops, tuple(outside))


def _homes(plan: Plan, units: _Units, target: str, snap: bool) -> tuple[dict[str, int], list[str]]:
    """Return the chunk of each unit; refuse or move cuts inside one."""
    homes, notes = {}, []
    divided = [unit for unit, chunks in units.ops.items() if len(chunks) > 1]
    if divided and not snap:
        groups = [[unit] for unit in units.ops if units.is_layer(unit) or unit in divided]
        raise PlanError(
            f"{target} divides models into whole layers, but a cut of this plan lies in {', '.join(divided)}; plan again "
            f"with keep_together={groups}, or export with snap=True, which moves these cuts"
        )
    for unit, chunks in units.ops.items():
        homes[unit] = max(chunks, key=lambda chunk: (chunks[chunk], -chunk))
    if divided:
        moved = ", ".join(f"{unit} whole in chunk {homes[unit]}" for unit in divided)
        notes.append(f"cuts were moved to borders of layers: {moved}; times of the plan are for its own cuts")
    order = [homes[unit] for unit in units.ops if units.is_layer(unit)]
    if order != sorted(order):
        raise PlanError(
            f"{target} runs layers in their order, but the chunks of {units.layers} are {order} in this plan; expected "
            "chunks that do not decrease"
        )
    if empty := sorted(set(range(len(plan.placement))) - set(homes.values())):
        raise PlanError(
            f"chunk {empty[0]} of the plan has no whole module; expected at least one in each chunk. Plan with fewer "
            "stages or chunks"
        )
    return homes, notes


def _check_chain(plan: Plan, target: str) -> None:
    """Refuse traffic and ties that a chain of modules cannot express."""
    for traffic in plan.traffic:
        if traffic.skip and traffic.backward_bytes:
            raise PlanError(
                f"{target} sends to the next part only, but chunk {traffic.source} of the plan sends to chunk "
                f"{traffic.target}. Plan with split_at before whole layers if the skip is a residual inside a layer; a model "
                "with skips over several layers runs with pipepart only"
            )
    if plan.ties and target != "megatron":
        raise PlanError(
            f"{target} does not sum gradients of parameters that several stages use, but chunks "
            f"{list(plan.ties[0].chunks)} share some; put their modules together with keep_together, or untie them"
        )


def _common_notes(plan: Plan, units: _Units) -> list[str]:
    notes = []
    if any(plan.recomputes):
        chunks = ", ".join(str(chunk) for chunk, again in enumerate(plan.recomputes) if again)
        notes.append(f"chunks {chunks} recompute in this plan: switch on recomputation there")
    given = sorted({t.target for t in plan.traffic if t.skip and not t.backward_bytes})
    if given:
        notes.append(f"chunks {given} need data without gradient (masks, targets) that is not sent to them there")
    if units.outside:
        notes.append(f"modules beside the model are left out: {', '.join(units.outside[:5])}")
    if plan.slack:
        notes.append(f"slack={plan.slack} is left out")
    return notes


def _megatron(plan: Plan, parts: Sequence[Sequence[str]], is_layer: Sequence[Sequence[bool]]) -> tuple[str, list[str]]:
    """Arguments of Megatron-LM: E embedding, t layer, L head and loss; parts in the order of the chunks."""
    if plan.placement != looped_placement(plan.stages, plan.chunks_per_stage):
        raise PlanError(
            f"megatron places chunks in turn (0 1 .. 0 1 ..), but schedule {plan.schedule!r} places them {plan.placement}; "
            "plan with '1f1b' or 'interleaved'"
        )
    if plan.chunks_per_stage > 1 and plan.microbatches % plan.stages:
        raise PlanError(
            f"megatron's interleaved schedule needs a multiple of {plan.stages} micro-batches, the plan has "
            f"{plan.microbatches}"
        )
    flags = [flag for part in is_layer for flag in part]
    first, last = flags.index(True), len(flags) - 1 - flags[::-1].index(True)
    words: list[str] = []
    notes: list[str] = []
    at, end = 0, len(parts) - 1
    for chunk, (part, names) in enumerate(zip(is_layer, parts)):
        kinds = [
            "t" if flag else "E" if at + n < first else "L" if at + n > last else "?" for n, flag in enumerate(part)
        ]
        at += len(part)
        if "?" in kinds or ("E" in kinds and chunk):
            raise PlanError(
                f"megatron has the embedding in the first part and nothing between layers, but chunk {chunk} of the plan has "
                f"{', '.join(names)}; plan again with keep_together for them"
            )
        if "L" in kinds and chunk < end:
            moved = [name for name, kind in zip(names, kinds) if kind == "L"]
            notes.append(f"megatron has all that follows the layers in the last part, {', '.join(moved)} too")
        words.append(_layout_of(kinds, chunk == 0, chunk == end))
    text = (
        f'--pipeline-model-parallel-size {plan.stages} --pipeline-model-parallel-layout "{"|".join(words)}" '
        f"--micro-batch-size {plan.microbatch_size} --global-batch-size {plan.batch_size * plan.replicas}"
    )
    usual = "interleaved" if plan.chunks_per_stage > 1 else "1f1b"
    if plan.schedule != usual:
        notes.append(f"megatron runs {usual} instead of {plan.schedule}")
    return text, notes


def _layout_of(kinds: Sequence[str], first: bool, last: bool) -> str:
    count = kinds.count("t")
    layers = [f"t*{count}" if count > 1 else "t"] if count else []
    return ",".join((["E"] if first else []) + layers + (["L"] if last else []))


def read_layout(layout: str) -> list[str]:
    """Return the kinds of layers of each part of a Megatron layout, such as ``["Ett", "tt", "tL"]``.

    ``|`` divides parts, ``,`` means nothing, ``x*3`` is ``xxx`` and ``(x|)*3`` is ``x|x|x|``.
    """
    text = layout.replace(",", "").replace(" ", "")
    group = re.compile(r"\(([^()]*)\)\*(\d+)")
    while found := group.search(text):
        text = text[: found.start()] + found[1] * int(found[2]) + text[found.end() :]
    text = re.sub(r"([EtmL])\*(\d+)", lambda found: found[1] * int(found[2]), text)
    if not re.fullmatch(r"[EtmL|]*", text):
        raise PlanError(f"layout {layout!r}: expected E, t, m, L, |, x*N and (..)*N only")
    return text.split("|")


def _titan(plan: Plan, parts: Sequence[Sequence[str]]) -> tuple[str, list[str]]:
    """The section of torchtitan's TOML file."""
    looped = plan.placement == looped_placement(plan.stages, plan.chunks_per_stage)
    name, notes = _TITAN.get(plan.schedule), []
    if name is None and not looped:
        raise PlanError(
            f"torchtitan does not know schedule {plan.schedule!r}, and places chunks of a CSV file in turn (0 1 .. 0 1 ..), "
            f"not {plan.placement}; plan with 'zb_v' or 'dualpipe_v'"
        )
    lines = ["[parallelism]", f"pipeline_parallel_degree = {plan.stages}"]
    if name is None:
        lines += [
            'pipeline_parallel_schedule = "PipelineScheduleMulti"',
            'pipeline_parallel_schedule_csv = "schedule.csv"',
        ]
        notes.append("schedule.csv is the entry 'csv' of plan.export(\"torch\")")
    else:
        lines += [f'pipeline_parallel_schedule = "{name}"']
    lines += [f"pipeline_parallel_microbatch_size = {plan.microbatch_size}", "module_fqns_per_model_part = ["]
    lines += [f"    {json.dumps(list(part))}," for part in parts]
    return "\n".join([*lines, "]"]), notes


def _torch(plan: Plan, parts: Sequence[Sequence[str]]) -> tuple[str, list[str]]:
    """JSON: modules of each stage of torch, the rank of each, and the actions as CSV."""
    entries = {
        "ranks": plan.stages,
        "microbatches": plan.microbatches,
        "rank_of_stage": list(plan.placement),
        "modules_of_stage": [list(part) for part in parts],
        "csv": to_csv(plan.make_schedule()),
    }
    return json.dumps(entries, indent=1), []
