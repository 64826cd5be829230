"""The verdict on a batch: whether the results of micro-batches make up those of the whole batch.

One rank checks the batch and sends the verdict to all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from pipepart.build.job import Example, Job, Recorded
from pipepart.errors import CaptureError, PlanError
from pipepart.options import Options
from pipepart.recording import Recording
from pipepart.runtime.failure import guarded
from pipepart.runtime.meeting import broadcast_object
from pipepart.samples import weigh
from pipepart.samples.batch_check import (
    BatchCheck,
    Container,
    check_batch,
    describe_check,
    describe_leaves,
    describe_norms,
    leaves_without_samples,
)
from pipepart.samples.kept_state import persistent_writes
from pipepart.samples.pieces import Pieces
from pipepart.samples.tail import Refused, TailCut, cut_tail

__all__ = ["Samples", "SamplesMeet", "agree_on_samples", "container_of", "look_at_samples", "together"]


class SamplesMeet(UserWarning):
    """An op of the model combines samples of a batch. The text names the op and the consequence."""


@dataclass(frozen=True)
class Samples:
    """The treatment of ops that combine samples, and its description for the user."""

    cut: TailCut | None = None
    text: str = ""
    notes: tuple[str, ...] = ()
    """Remarks on behaviour that is probably intended, such as BatchNorm on micro-batches."""
    checked: bool = False
    """Whether the results of micro-batches, alone or with the tail, make up those of the whole batch."""

    @property
    def lines(self) -> str:
        """The notes and the text as lines of the start message."""
        notes = "".join(f"\nnote       {note}" for note in self.notes)
        return notes + "".join(f"\nsamples    {line}" for line in self.text.splitlines())

    def options(self, options: Options) -> Options:
        """Return the options for planning: a loss that is known after all forwards needs the schedule ``gpipe``."""
        if self.cut is None or not self.cut.loss or options.plan is not None:
            return options
        if options.schedule not in ("auto", "gpipe") and not options.schedule.endswith(".csv"):
            raise PlanError(
                f"{self.text}\nSo the loss is known only after all forwards, but the schedule {options.schedule!r} starts "
                "backwards before that. Use schedule='auto' or 'gpipe', microbatches=1, or loss='microbatch' (samples are then "
                "combined within their micro-batch only)."
            )
        return options if options.schedule.endswith(".csv") else replace(options, schedule="gpipe")


def together(verdicts: Sequence[Samples]) -> Samples:
    """Return the verdict on a step that is run in segments, from those on the segments."""
    if len(verdicts) == 1:
        return verdicts[0]
    text = "\n".join(dict.fromkeys(verdict.text for verdict in verdicts if verdict.text))
    notes = dict.fromkeys(note for verdict in verdicts for note in verdict.notes)
    return Samples(None, text, tuple(notes), all(verdict.checked for verdict in verdicts))


def agree_on_samples(
    job: Job, recorded: Recorded, batch: Any, example: Example, inside_replica: bool = False
) -> Samples:
    """Check a batch on the first rank of the job, or of this replica, and return the verdict. All of its ranks must call it.

    With ``loss="microbatch"`` nothing is checked, since the result is meant to differ.
    """
    if job.options.loss == "microbatch":
        return Samples()
    found: Samples | None = None
    with guarded(job.groups):
        if job.decides(inside_replica):
            size = example.sizes.sizes[0]
            args, kwargs = job.arguments(batch)
            kwargs = {**kwargs, **recorded.numbers}
            found = look_at_samples(recorded.recording, args, kwargs, size, recorded.free, example.pieces)
        if job.groups is not None:
            found = broadcast_object(found, job.source(inside_replica), job.groups, inside_replica)
    assert found is not None
    return found


_ONE_SAMPLE = (
    "the batch has no tensor with a dimension for the samples: it is not split, and each step has one micro-batch"
)


def look_at_samples(
    recording: Recording,
    args: tuple[Any, ...],
    kwargs: Any,
    microbatch_size: int,
    free: frozenset[int] = frozenset(),
    pieces: Pieces | None = None,
) -> Samples:
    """Compare a batch with its micro-batches and, if they differ, find the tail that makes them equal.

    `free`: outputs that are neither averaged nor concatenated; `pieces`: the way a container is split.
    """
    in_pieces = container_of(recording, args, kwargs, pieces)
    try:
        leaves: Sequence[Any] = recording.flatten(args, kwargs)
    except CaptureError as error:  # the whole batch has another form than its parts
        return Samples(None, describe_check(recording, BatchCheck(None, str(error).splitlines()[0]), None, ""))
    check = check_batch(recording, leaves, microbatch_size, free, weigh(recording), in_pieces)
    cut, why = None, ""
    if check.mixing is not None and (not check.mixing.same or persistent_writes(recording)):
        plain = check_batch(recording, leaves, microbatch_size, free, None, in_pieces).mixing
        try:
            # The plain recording determines the place of the cut, and the weighed one determines the outputs that need it.
            if plain is not None:
                wanted = replace(plain, wrong=check.mixing.wrong, gradient=check.mixing.gradient)
                cut = cut_tail(recording, wanted)
        except Refused as refused:
            why = str(refused)
    disagree = leaves_without_samples(recording, leaves) if in_pieces is None else []
    whole = _ONE_SAMPLE if pieces is not None and pieces.undivided else ""
    notes = [note for note in (describe_norms(recording), describe_leaves(disagree), whole) if note]
    checked = check.mixing is not None and (check.mixing.same or cut is not None)
    return Samples(cut, describe_check(recording, check, cut, why, disagree), tuple(notes), checked)


def container_of(recording: Recording, args: tuple[Any, ...], kwargs: Any, pieces: Pieces | None) -> Container | None:
    """Return a batch that is split as a container, in the form that the recording takes; None for other batches."""
    if pieces is None:
        return None
    if recording.step is None:
        return Container(pieces, (tuple(args), dict(kwargs)), lambda call: recording.flatten(*call))
    return Container(pieces, args[0], lambda batch: recording.flatten((batch,), kwargs))
