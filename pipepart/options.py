"""The options of a pipeline, which `PipelineStrategy`, `Pipeline` and the command line share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

from pipepart.errors import ConfigError, PlanError
from pipepart.planning import Plan, PlanOptions
from pipepart.recording.inputs.batching import BatchDim, check_batch_dim
from pipepart.values import Seconds, shortened

__all__ = ["Options", "words_of"]


@dataclass(frozen=True, kw_only=True)
class Options(PlanOptions):
    """The one declaration of names, types and defaults. Options with an invalid value cannot be made.

    Signatures, the configuration and the tables of the docs repeat them for the reader; tests/test_options.py compares
    each of them with this class.
    """

    plan: Plan | str | Path | None = None
    """A plan that was saved, or the path of its file, which is read at once. Its stages and replicas are then used."""
    timeout: Seconds = 300.0
    """Seconds after which a transfer or collective that does not finish is an error."""
    transport: Literal["auto", "group", "shared_memory"] = "auto"
    """How tensors travel between stages: ``group`` (gloo, NCCL), ``shared_memory``, or ``auto``: the faster that fits."""
    batch_norm: Literal["microbatch", "batch"] = "microbatch"
    """When running statistics change: with every ``microbatch``, or once per ``batch``."""
    loss: Literal["batch", "microbatch"] = "batch"
    """What a loss divides by (tokens, weights, samples): that of the whole ``batch``, over all micro-batches, replicas and
    accumulated batches, as one process would; or that of each ``microbatch``, which then counts by its samples."""
    randomness: Literal["op", "stage"] = "op"
    """Random numbers of steps: seeded for each ``op`` that draws, so that they are the same for any number of stages and
    any schedule; or from the stream of each ``stage``."""
    verify: bool = False
    """Before training, hold the loss, logs and gradients of the pipeline against one process on the whole batch, and
    print the table."""
    batch_dim: BatchDim = 0
    """The dimension of the samples in the leaves of a batch, or a mapping from the paths of leaves to theirs (None: the
    leaf is not cut). A module with a method ``split(batch, n)`` cuts its batches itself."""

    def __post_init__(self) -> None:
        if self.randomness not in words_of(Options, "randomness"):
            raise ConfigError(
                f"randomness={shortened(self.randomness)} is not known: expected 'op' (each op that draws is seeded by the "
                "seed, the step, the replica, the micro-batch and itself) or 'stage' (each process draws from its own stream)."
            )
        check_batch_dim(self.batch_dim)
        if not isinstance(self.plan, (Plan, str, Path, type(None))):
            raise PlanError(f"plan must be a Plan or the path of a file with one, got {type(self.plan).__name__}")
        super().__post_init__()
        try:
            plan = Plan.load(self.plan) if isinstance(self.plan, (str, Path)) else self.plan
        except ValueError as error:  # a path that cannot be one
            raise PlanError(f"plan {shortened(self.plan)} cannot be read: {error}") from error
        if plan is not None:
            for name, value in {"plan": plan, "stages": plan.stages, "replicas": plan.replicas}.items():
                object.__setattr__(self, name, value)

    @property
    def given_plan(self) -> Plan | None:
        """`plan`, after its file was read."""
        assert not isinstance(self.plan, (str, Path))
        return self.plan


@cache
def words_of(options: type, name: str) -> tuple[Any, ...]:
    """The words that an option takes, which its type lists."""
    return get_args(get_type_hints(options)[name])
