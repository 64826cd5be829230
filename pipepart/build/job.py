"""The inputs of set-up: the job, its steps, and the example on which they are recorded."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from pipepart.errors import PlanError
from pipepart.options import Options
from pipepart.planning import auto_microbatches
from pipepart.recording import Recording
from pipepart.recording.inputs import trees
from pipepart.recording.inputs.batching import Batching, batching_of
from pipepart.runtime import Groups, Mesh
from pipepart.runtime.meeting import broadcast_object
from pipepart.runtime.microbatch import MicrobatchSizes, microbatch_sizes, slice_leaves
from pipepart.samples.pieces import Pieces, pieces_of
from pipepart.schedule import read_csv

__all__ = ["Example", "Job", "Recorded", "Step", "example_microbatch", "no_samples", "root_of", "seed_of_rank_zero"]


@dataclass(frozen=True)
class Job:
    """A model, the options of its user, and the processes that run it."""

    root: nn.Module
    options: Options
    mesh: Mesh
    groups: Groups | None
    device: torch.device
    call: bool = False
    """Whether a batch is a pair of positional and named arguments; otherwise it is one argument."""
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    """The context in which steps run: the precision."""
    precision: str = ""
    """The name of the precision."""

    def arguments(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a recorded call for a batch."""
        args, kwargs = batch if self.call else ((batch,), {})
        return args, kwargs

    def source(self, inside_replica: bool = False) -> int:
        """Return the rank that decides for all ranks, or for all stages of its replica."""
        return self.groups.rank_of_stage(0) if self.groups is not None and inside_replica else 0

    def decides(self, inside_replica: bool = False) -> bool:
        """Return whether this rank decides for all ranks, or for all stages of its replica."""
        return self.groups is None or self.groups.rank == self.source(inside_replica)


@dataclass(frozen=True)
class Example:
    """The first micro-batch of an example batch, and the usual split of that batch."""

    batch: Any
    sizes: MicrobatchSizes
    batching: Batching
    others: tuple[Any, ...] = ()
    """Further batches to record on, if the batch is split as a container."""
    pieces: Pieces | None = None
    """The way a container is split; None for batches that are split leaf by leaf."""


@dataclass(frozen=True)
class Recorded:
    """A recorded step and properties of its outputs."""

    recording: Recording
    free: frozenset[int] = frozenset()
    """Outputs that are neither averaged nor concatenated."""
    averaged: frozenset[int] = frozenset()
    """Outputs whose values are averaged over replicas after the step."""
    numbers: Mapping[str, Any] = field(default_factory=dict)
    """The numbers of the step that was recorded (such as ``batch_idx``), by the names of their inputs."""
    counts: bool = False
    """Whether Python numbers of the result become those of the whole batch; else the caller combines those of micro-batches."""


@dataclass(frozen=True)
class Step:
    """One step of the model, with the function that records it on an example."""

    name: str
    record: Callable[[Example], Recorded]
    trains: bool = True
    mode: Callable[[], Any] = lambda: None
    """Sets the mode of the model for this step; the modes of its modules are restored afterwards."""
    segments: Callable[[], Sequence[Step]] | None = None
    """Returns the segments of this step, which are run in its place, after it was recorded; None: it is run itself."""
    inside: Callable[[], AbstractContextManager[Any]] = nullcontext
    """The context in which the step is checked: only its own parameters are trained."""
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    """The context around the recording of the step at set-up, on every rank."""


def example_microbatch(
    example: Any, options: Options, mesh: Mesh, root: nn.Module | None = None, call: bool = False, fewer: bool = False
) -> Example:
    """Return the first micro-batch of an example, which may be any nesting of containers.

    `root` may have a method ``split(batch, n)``; `call`: the example is a pair of positional and named arguments;
    `fewer`: a batch with fewer samples than micro-batches is split into fewer.
    """
    leaves, tree = trees.flatten(example)
    fixed = _fixed_count(options)
    pieces = pieces_of(example, root, options.batch_dim, call, 2 if fixed is None else fixed)
    if pieces is not None:
        total = pieces.samples(example)
        if not total:
            raise no_samples("the example")
        if pieces.undivided and fixed is not None and fixed > 1 and not fewer:
            raise _undivided(leaves, fixed)
        found = pieces.split(example, min(total, fixed or auto_microbatches(mesh.stages, total)))
        first, sizes = found[0], MicrobatchSizes(tuple(piece.samples for piece in found))
        others = [example] if len(found) > 1 else [piece.batch for piece in pieces.split(example, 2)[1:]]
        return Example(first.batch, sizes, Batching((None,) * len(leaves), first.samples), tuple(others), pieces)
    paths = [path[3:] if call else path for path in trees.leaf_paths(tree)]
    batching = batching_of(leaves, paths, options.batch_dim)
    if not batching.samples:
        raise no_samples("the example")
    count = fixed or auto_microbatches(mesh.stages, batching.samples)
    sizes = microbatch_sizes(batching.samples, min(count, batching.samples) if fewer else count)
    part = slice_leaves(batching.first(leaves), sizes, batching.places)[0]
    first_batching = dataclasses.replace(batching, samples=sizes.sizes[0])
    return Example(trees.unflatten(batching.back(part), tree), sizes, first_batching)


def no_samples(step: str, groups: Groups | None = None, replica: int = 0) -> PlanError:
    """Return the error for a batch without samples; `replica` is the number of the replica that has it, from 1."""
    whose = f" of replica {replica - 1}" if groups is not None and groups.mesh.replicas > 1 and replica else ""
    return PlanError(
        f"{step}: the batch{whose} has no samples.\n  expected: at least one sample\n  do: leave empty batches out in the "
        "dataset, the sampler or `collate_fn`; no rank has run this batch"
    )


def _undivided(leaves: Sequence[Any], count: int) -> PlanError:
    """Return the error for a batch that is one sample, where several micro-batches were asked for."""
    kinds = sorted({type(leaf).__name__ for leaf in leaves})
    return PlanError(
        f"the batch cannot be split into {count} micro-batches: it has no tensor with a dimension for the samples, but leaves "
        f"of type {kinds}.\n  expected: at least one tensor leaf with a batch dimension\n  do: name the dimension "
        "(batch_dim=...), give the module a method `split(batch, n)` that splits its batches, or use microbatches=1"
    )


def _fixed_count(options: Options) -> int | None:
    """Return the number of micro-batches that the options fix, or None."""
    if options.given_plan is not None:
        return options.given_plan.microbatches
    if options.microbatches == "auto" and options.schedule.endswith(".csv"):
        return read_csv(options.schedule).microbatches
    return None if options.microbatches == "auto" else int(options.microbatches)


def root_of(module_or_step: nn.Module | Callable[..., Any]) -> nn.Module:
    """Return the module that holds the parameters of a step: the step itself, or the module whose method it is."""
    root = module_or_step if isinstance(module_or_step, nn.Module) else getattr(module_or_step, "__self__", None)
    if not isinstance(root, nn.Module):
        raise PlanError(
            f"expected a module or a bound method of a module, got {type(module_or_step).__name__}. "
            "Make the step a method of the module that holds the parameters."
        )
    return root


def seed_of_rank_zero(groups: Groups | None) -> int:
    """Return the seed of rank 0, on all ranks. All of them must call it."""
    seed = torch.initial_seed()
    return seed if groups is None else int(broadcast_object(seed, 0, groups))
