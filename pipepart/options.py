"""The options of a pipeline, which `PipelineStrategy` and `Pipeline` share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pipepart.errors import ConfigError, did_you_mean
from pipepart.planning import Plan
from pipepart.recording.inputs.batching import BatchDim

__all__ = ["Options", "check_loss"]

LOSSES = ("batch", "microbatch")


@dataclass(frozen=True)
class Options:
    """How the user wants it planned. Everything is ``"auto"`` by default; a plan that was saved can be given instead."""

    stages: int | str = "auto"
    replicas: int | str = "auto"
    microbatches: int | str = "auto"
    schedule: str = "auto"
    chunks: int | str = "auto"
    slack: int | str = "auto"
    keep_together: Sequence[Sequence[str]] = field(default=())
    split_at: Sequence[str] | None = None
    plan: Plan | None = None
    timeout: float = 300.0
    """Seconds after which a transfer or collective that does not finish is an error."""
    transport: str = "auto"
    """How tensors travel between stages: ``auto``, ``group`` (gloo, NCCL) or ``shared_memory``."""
    recompute: bool | str = "auto"
    """True: every chunk runs its forward again before its backward; False: none; ``auto``: where memory is short."""
    memory_limit: float | None = None
    """Bytes that one device may use."""
    batch_norm: str = "microbatch"
    """When running statistics change: with every ``microbatch``, or once per ``batch``."""
    loss: str = "batch"
    """What a loss divides by (tokens, weights, samples): that of the whole ``batch``, over all micro-batches, replicas and
    accumulated batches, as one process would; or that of each ``microbatch``, which then counts by its samples."""
    randomness: str = "op"
    """Random numbers of steps: seeded for each ``op`` that draws, so that they are the same for any number of stages and
    any schedule; or from the stream of each ``stage``."""
    verify: bool = False
    """Before training, hold the loss, logs and gradients of the pipeline against one process on the whole batch, and
    print the table."""
    batch_dim: BatchDim = 0
    """The dimension of the samples in the leaves of a batch, or a mapping from the paths of leaves to theirs (None: the
    leaf is not cut). A module with a method ``split(batch, n)`` cuts its batches itself."""


def check_loss(loss: str) -> None:
    """Refuse another value than those of `Options.loss`."""
    if loss not in LOSSES:
        raise ConfigError(f"loss {loss!r} is not known: {did_you_mean(loss, LOSSES)}")
