"""Judge the runs of a case: equal, equal with a note, refused, flagged, different or crash."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tools.bench.lightning.modules_case import Case

__all__ = ["BAD", "Answer", "Row", "judge"]

BAD = ("different", "crash", "broken")
"""States that must not be: a silent difference, a crash, a case that does not run on one device."""
_INSIDE = (
    "device meta",
    "expected device",
    "Proxy",
    "Boolean value of Tensor",
    "unexpected keyword argument",
    "NoneType",
)
"""Words of an error that speak of our own inside instead of the user's program."""


@dataclass
class Answer:
    """What one process of a run found."""

    kind: str
    """`done`, `refused` (an error of pipepart), `failed` (another error), `died` or `no end`."""
    text: str = ""
    record: dict[str, Any] | None = None
    said: list[str] = field(default_factory=list)
    """Notes and warnings of pipepart."""


@dataclass
class Row:
    """The row of one case."""

    name: str
    state: str
    """`equal`, `note` (equal, with a note), `refused`, `flagged` (differs, with a warning before), one of `BAD`, `missing`."""
    words: list[str] = field(default_factory=list)
    difference: float = 0.0
    """The largest relative difference of losses, logs and parameters."""
    steps: int = 0
    seconds: float = 0.0

    @property
    def library(self) -> str:
        return self.name.partition(".")[0]


def judge(case: Case, answers: Sequence[Answer]) -> Row:
    """The row of a case, from the answers of one device and of all ranks."""
    one, ranks = answers[0], answers[1:]
    if one.kind != "done" or one.record is None:
        return Row(case.name, "broken", [f"on one device: {one.text}"])
    if not one.record["steps"]:
        return Row(case.name, "broken", ["on one device: no training step was seen"])
    if not any(one.record["moved"]):
        return Row(case.name, "broken", ["on one device: training changed no parameter"])
    bad = [answer for answer in ranks if answer.kind != "done"]
    if bad:
        refused = [answer for answer in ranks if answer.kind == "refused"]
        inside = [word for answer in refused for word in _INSIDE if word in answer.text]
        if len(refused) == len(ranks) and not inside:
            return Row(case.name, "refused", [refused[0].text])
        texts = [f"rank {rank} {answer.kind}: {answer.text}" for rank, answer in enumerate(ranks)]
        return Row(case.name, "crash", texts)
    problems: list[str] = []
    largest = 0.0
    for rank, answer in enumerate(ranks):
        assert answer.record is not None
        found, difference = _differences(one.record, answer.record, case.relative, written=rank == 0)
        problems += [f"rank {rank}: {problem}" for problem in found]
        largest = max(largest, difference)
    said = ranks[0].said
    row = Row(case.name, "equal", [], largest, one.record["steps"])
    if problems:
        flagged = any("SamplesMeet" in line for line in said)
        row.state, row.words = ("flagged" if flagged else "different"), [*problems[:3], *said]
    elif said or case.remark:
        row.state, row.words = ("note" if said else "equal"), [*said, *([case.remark] if case.remark else [])]
    return row


def _differences(one: Any, other: Any, relative: float, written: bool) -> tuple[list[str], float]:
    """What differs, in words, and the largest relative difference. Only rank 0 writes logs."""
    problems: list[str] = []
    largest = 0.0

    def compare(what: str, expected: Any, got: Any, allowed: float) -> None:
        nonlocal largest
        expected, got = (torch.as_tensor(value).double() for value in (expected, got))
        if expected.shape != got.shape:
            problems.append(f"{what} has the shape {list(got.shape)} instead of {list(expected.shape)}")
            return
        both = expected.isfinite() & got.isfinite()
        if not torch.equal(expected[~both].nan_to_num(7.0), got[~both].nan_to_num(7.0)):
            problems.append(f"{what} is not a number on one side only")
            return
        if not both.any():
            return
        difference = float((expected - got)[both].abs().max()) / (float(expected[both].abs().max()) + 1e-6)
        largest = max(largest, difference)
        if difference > allowed:
            problems.append(f"{what} differs by {difference:.1e}")

    for what in ("losses", "states", "results", *(["logged"] if written else [])):
        if len(one[what]) != len(other[what]):
            problems.append(f"{len(other[what])} {what} instead of {len(one[what])}")
    if one["steps"] != other["steps"]:
        problems.append(f"{other['steps']} steps instead of {one['steps']}")
    compare("losses", one["losses"], other["losses"], relative)
    for number, (expected, got) in enumerate(zip(one["states"], other["states"])):
        if list(expected) != list(got):
            problems.append(f"names of state {number} differ: {sorted({*expected} ^ {*got})[:3]}")
        for key in expected.keys() & got.keys():
            compare(f"{key} after fit {number}", expected[key], got[key], 10 * relative)
    for (name, expected), (_, got) in zip(one["results"], other["results"]):
        if len(expected) != len(got):
            problems.append(f"{name} returned {len(got)} values instead of {len(expected)}")
        for index, (a, b) in enumerate(zip(expected, got)):
            compare(f"value {index} of {name}", a, b, max(relative, 1e-6))
    if written:
        for (step, expected), (_, got) in zip(one["logged"], other["logged"]):
            if list(expected) != list(got):
                problems.append(f"names logged at step {step} differ: {sorted({*expected} ^ {*got})[:3]}")
            for key in expected.keys() & got.keys():
                compare(f"{key} logged at step {step}", expected[key], got[key], max(relative, 1e-6))
    return problems, largest
