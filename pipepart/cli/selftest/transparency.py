"""Checks that a pipeline computes what one device computes: loss, all gradients and the state of small models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from pipepart.cli.selftest.crew import Place
from pipepart.cli.selftest.device_checks import can_hold
from pipepart.cli.selftest.small_models import MODELS, make_model
from pipepart.cli.selftest.verdicts import FAIL, Verdict, combined, failed, passed, skipped
from pipepart.devices import computes_on_host
from pipepart.machine import usable
from pipepart.planning.request import TRAINING_SCHEDULES

__all__ = ["Case", "cases_of", "check_transparency", "judged"]

_MICROBATCHES = 4
_SAMPLES = 8  # of each replica
_FLAT = 1e-3
"""Gradients below this part of the largest one of the model are compared at its scale: they are sums that cancel."""
_TOLERANCES = {"float64": 1e-9, "float32": 1e-3, "bfloat16": 3e-2}
"""The largest difference, relative to the largest entry of a gradient; bfloat16 is for mixed precision."""


@dataclass(frozen=True)
class Case:
    """A model on a mesh with a schedule."""

    model: str
    replicas: int
    stages: int
    schedule: str

    def __str__(self) -> str:
        return f"{self.model}, {self.replicas} x {self.stages}, {self.schedule}"


def cases_of(size: int, quick: bool) -> list[Case]:
    """Return the cases of `size` ranks: with one replica, every model with every schedule.

    With several replicas, and in a quick test, each model meets some schedules, so that every model and schedule occurs.
    """
    every = [(model, schedule) for model in MODELS for schedule in TRAINING_SCHEDULES]
    count = max(len(MODELS), len(TRAINING_SCHEDULES))
    some = [(MODELS[i % len(MODELS)], TRAINING_SCHEDULES[i % len(TRAINING_SCHEDULES)]) for i in range(count)]
    found = [Case(model, 1, size, schedule) for model, schedule in (some if quick else every)]
    for replicas in range(2, size):
        if size % replicas == 0:
            found += [Case(model, replicas, size // replicas, schedule) for model, schedule in some]
    alone = MODELS[:1] if quick else MODELS
    return found + [Case(model, size, 1, "1f1b") for model in alone]  # replicas only


def check_transparency(place: Place, case: Case) -> Verdict:
    """Run one step of a pipeline, and compare this rank's part with one device. All ranks return the names they hold."""
    from pipepart import Pipeline

    mixed, device = case.model == "mixed precision", place.device
    if mixed and computes_on_host(device) and not usable("bfloat16"):
        return skipped("products in bfloat16 end the process on this CPU")
    wide = can_hold(device, torch.float64) and not mixed
    dtype = torch.float64 if wide else torch.float32
    rule = "bfloat16" if mixed else str(dtype).removeprefix("torch.")
    replica = place.rank // case.stages
    expected = _one_device(case, device, dtype, replica)
    model = make_model(case.model, case.stages, device, dtype)
    torch.manual_seed(1)
    batch = _replica_part(model.batch(_SAMPLES * case.replicas, dtype), replica)  # type: ignore[operator]
    pipe = Pipeline(
        model,
        batch,
        stages=case.stages,
        replicas=case.replicas,
        microbatches=_MICROBATCHES,
        schedule=case.schedule,
        recompute=case.model == "recompute",
        **place.pipeline_options,
    )
    loss = pipe.step(*batch)
    got = {name: parameter.grad for name, parameter in pipe.named_parameters() if parameter.grad is not None}
    state = pipe.state_dict() if case.replicas == 1 else {}
    scale = max(float(gradient.abs().max()) for gradient in expected.gradients.values())
    pairs: list[tuple[str, torch.Tensor, torch.Tensor]] = [("the loss", loss, expected.loss)]
    pairs += [(f"the gradient of {name}", value, expected.gradients[name]) for name, value in got.items()]
    pairs += [(f"{name} after the step", value, expected.state[name]) for name, value in state.items()]
    worst, where = 0.0, "the loss"
    for name, value, other in pairs:
        difference = float((value.detach().cpu().double() - other.cpu().double()).abs().max())
        least = _FLAT * scale if name.startswith("the gradient") else 1e-30
        relative = difference / max(float(other.abs().max()), least)
        if not relative <= worst:
            worst, where = relative, name
    names = {"parameters": sorted(name for name, _ in pipe.named_parameters()), "expected": sorted(expected.gradients)}
    if not worst <= _TOLERANCES[rule]:
        text = f"{where} differs from one device by {worst:.2g}; expected at most {_TOLERANCES[rule]:g} ({rule})"
        return failed(text, difference=worst, **names)
    return passed(f"{rule}, largest difference {worst:.1g} (limit {_TOLERANCES[rule]:g})", difference=worst, **names)


def judged(verdicts: list[Verdict]) -> Verdict:
    """Return the verdict of all ranks on one case: their parts together are the whole model."""
    first = verdicts[0]
    if any(verdict.state == FAIL for verdict in verdicts) or "expected" not in first.figures:
        found = combined(verdicts)
        return Verdict(found.state, found.text, {k: v for k, v in found.figures.items() if k == "difference"})
    held = {name for verdict in verdicts for name in verdict.figures["parameters"]}
    missing = set(first.figures["expected"]) - held
    if missing:
        return failed(f"no rank holds {', '.join(sorted(missing)[:5])}")
    worst = max(verdicts, key=lambda verdict: verdict.figures["difference"])
    return Verdict(worst.state, worst.text, {"difference": worst.figures["difference"]})


@dataclass(frozen=True)
class _Expected:
    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]
    state: dict[str, torch.Tensor]


def _one_device(case: Case, device: torch.device, dtype: torch.dtype, replica: int) -> _Expected:
    """Return what one device computes: on the whole batch, or with BatchNorm on the micro-batches of the pipeline."""
    model = make_model(case.model, case.stages, device, dtype)
    torch.manual_seed(1)
    whole = tuple(t.to(device) for t in model.batch(_SAMPLES * case.replicas, dtype))  # type: ignore[operator]
    parts = list(_microbatches(whole)) if case.model == "BatchNorm" else list(_replica_parts(whole))
    losses = []
    if case.model == "BatchNorm":
        for part in parts:
            loss = model(*part)
            (loss / len(parts)).backward()
            losses.append(loss.detach())
        own = losses[replica * _MICROBATCHES : (replica + 1) * _MICROBATCHES]
        result = torch.stack(own).mean()
    else:
        model(*whole).backward()
        with torch.no_grad():
            result = model(*parts[replica])
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return _Expected(result, gradients, dict(model.state_dict()))


def _replica_parts(batch: tuple[torch.Tensor, ...]) -> Iterator[tuple[torch.Tensor, ...]]:
    yield from zip(*(tensor.split(_SAMPLES) for tensor in batch))


def _replica_part(batch: tuple[torch.Tensor, ...], replica: int) -> tuple[torch.Tensor, ...]:
    return list(_replica_parts(batch))[replica]


def _microbatches(batch: tuple[torch.Tensor, ...]) -> Iterator[tuple[torch.Tensor, ...]]:
    yield from zip(*(tensor.split(_SAMPLES // _MICROBATCHES) for tensor in batch))
