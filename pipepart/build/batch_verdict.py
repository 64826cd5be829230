"""Whether micro-batches make up the whole batch: found out on one rank, decided the same on all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from pipepart.errors import CaptureError, PlanError
from pipepart.options import Options
from pipepart.recording import Recording
from pipepart.runtime.failure import guarded
from pipepart.runtime.meeting import broadcast_object
from pipepart.runtime.mesh import Groups
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
from pipepart.samples.pieces import Pieces
from pipepart.samples.tail import Refused, TailCut, cut_tail, persistent_writes

__all__ = ["Samples", "SamplesMeet", "agree_on_samples", "container_of", "look_at_samples"]


class SamplesMeet(UserWarning):
    """Samples of a batch meet in the model; the text says what is done about it."""


@dataclass(frozen=True)
class Samples:
    """What is done about samples that meet, and what the user is told of it."""

    cut: TailCut | None = None
    text: str = ""
    notes: tuple[str, ...] = ()
    """What is probably meant to be as it is."""
    checked: bool = False
    """Micro-batches make up the whole batch, by themselves or with the tail."""

    @property
    def lines(self) -> str:
        """The text and the notes as lines of the start message."""
        notes = "".join(f"\nnote       {note}" for note in self.notes)
        return notes + "".join(f"\nsamples    {line}" for line in self.text.splitlines())

    def options(self, options: Options) -> Options:
        """The options for planning: if the loss is known only after all forwards, the schedule must be one that waits."""
        if self.cut is None or not self.cut.loss or options.plan is not None:
            return options
        if options.schedule not in ("auto", "gpipe") and not options.schedule.endswith(".csv"):
            raise PlanError(
                f"{self.text}\nSo the loss is known when all forwards have run, and the schedule {options.schedule!r} "
                "begins with backwards before that. Use schedule='auto' or 'gpipe', microbatches=1, or loss='microbatch' "
                "(samples then meet those of their micro-batch only)."
            )
        return options if options.schedule.endswith(".csv") else replace(options, schedule="gpipe")


def agree_on_samples(
    recording: Recording,
    args: tuple[Any, ...],
    kwargs: Any,
    microbatch_size: int,
    groups: Groups | None,
    free: frozenset[int] = frozenset(),
    inside_replica: bool = False,
    loss: str = "batch",
    pieces: Pieces | None = None,
) -> Samples:
    """Check a batch on the first rank of the job, or of this replica; all get the same answer, and all must call it.

    `free` are outputs that are put together in another way than means and batches. With the loss of each "microbatch",
    nothing is checked: it is meant to be different. `pieces` cuts batches that are cut as containers.
    """
    if loss == "microbatch":
        return Samples()
    found: Samples | None = None
    with guarded(groups):
        source = groups.rank_of_stage(0) if groups is not None and inside_replica else 0
        if groups is None or groups.rank == source:
            found = look_at_samples(recording, args, kwargs, microbatch_size, free, pieces)
        if groups is not None:
            found = broadcast_object(found, source, groups, inside_replica)
    assert found is not None
    return found


def look_at_samples(
    recording: Recording,
    args: tuple[Any, ...],
    kwargs: Any,
    microbatch_size: int,
    free: frozenset[int] = frozenset(),
    pieces: Pieces | None = None,
) -> Samples:
    """Hold a batch against its micro-batches, and find the tail that makes them equal if they are not."""
    container = container_of(recording, args, kwargs, pieces)
    try:
        leaves: Sequence[Any] = recording.flatten(args, kwargs)
    except CaptureError as error:  # the whole batch has another form than its parts
        return Samples(None, describe_check(recording, BatchCheck(None, str(error).splitlines()[0]), None, ""))
    check = check_batch(recording, leaves, microbatch_size, free, weigh(recording), container)
    cut, why = None, ""
    if check.mixing is not None and (not check.mixing.same or persistent_writes(recording)):
        plain = check_batch(recording, leaves, microbatch_size, free, None, container).mixing
        try:
            if plain is not None:  # where to cut is told by the recording as it is, what to cut off by the other
                wanted = replace(plain, wrong=check.mixing.wrong, gradient=check.mixing.gradient)
                cut = cut_tail(recording, wanted)
        except Refused as refused:
            why = str(refused)
    unsplit = leaves_without_samples(recording, leaves) if container is None else []
    notes = [note for note in (describe_norms(recording), describe_leaves(unsplit)) if note]
    checked = check.mixing is not None and (check.mixing.same or cut is not None)
    return Samples(cut, describe_check(recording, check, cut, why, unsplit), tuple(notes), checked)


def container_of(recording: Recording, args: tuple[Any, ...], kwargs: Any, pieces: Pieces | None) -> Container | None:
    """A batch that is split as a container, as the recording of a call or of a step takes it; None if it is not."""
    if pieces is None:
        return None
    if recording.step is None:
        return Container(pieces, (tuple(args), dict(kwargs)), lambda call: recording.flatten(*call))
    return Container(pieces, args[0], lambda batch: recording.flatten((batch,), kwargs))
