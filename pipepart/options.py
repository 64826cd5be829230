"""The options of a pipeline, shared by `PipelineStrategy`, `Pipeline` and the command line.

This module knows plans. It must not know processes or Lightning.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

from pipepart.errors import ConfigError, PlanError
from pipepart.planning import Plan, PlanOptions
from pipepart.planning.compile_mode import CompileOption, CompileSettings
from pipepart.planning.sync_mode import SyncMode
from pipepart.recording.inputs.batching import BatchDim, check_batch_dim
from pipepart.values import Seconds, shortened

__all__ = ["Options", "words_of"]


@dataclass(frozen=True, kw_only=True)
class Options(PlanOptions):
    """The names, types and defaults of all options. An invalid value raises an error.

    Signatures, the configuration and the tables in the docs repeat the options for the reader; tests/test_options.py
    compares each of them with this class.
    """

    plan: Plan | str | Path | None = None
    """A plan, or the path of its file, which is read at once. The plan determines stages and replicas."""
    timeout: Seconds = 300.0
    """Seconds after which an unfinished transfer or collective is an error."""
    transport: Literal["auto", "group", "shared_memory"] = "auto"
    """The transport between stages: ``group`` (gloo, NCCL), ``shared_memory``, or ``auto``: the faster possible one."""
    batch_norm: Literal["microbatch", "batch"] = "microbatch"
    """When running statistics of BatchNorm change: with every ``microbatch``, or once per ``batch``."""
    loss: Literal["batch", "microbatch"] = "batch"
    """The denominator of a loss (tokens, weights, samples): that of the whole ``batch``, over all micro-batches, replicas
    and accumulated batches, as in one process; or that of each ``microbatch``, whose weight is its share of samples."""
    randomness: Literal["op", "stage"] = "op"
    """The source of random numbers: a seed for each ``op`` that draws, so that they are the same for any number of stages
    and any schedule; or the stream of each ``stage``."""
    verify: bool = False
    """Compare the loss, logs and gradients of the pipeline with one process on the whole batch before training, and print
    a table."""
    batch_dim: BatchDim = 0
    """The dimension of samples in the leaves of a batch, or a mapping from paths of leaves to dimensions (None: the leaf is
    not split). A module with a method ``split(batch, n)`` splits its batches itself."""

    compile: CompileOption = False
    """Compile the chunks of each stage; ``auto``: if a trial during the run says that it wins time; or a mapping with options
    of `torch.compile`."""

    @property
    def compile_settings(self) -> CompileSettings | None:
        """The settings of the compiler; None if nothing is compiled."""
        return CompileSettings.of(self.compile)

    @property
    def sync_mode(self) -> SyncMode:
        """The mode in which replicas are kept in step, with its settings."""
        return SyncMode.of(self.sync)

    def __post_init__(self) -> None:
        if self.randomness not in words_of(Options, "randomness"):
            raise ConfigError(
                f"randomness={shortened(self.randomness)} is not known: expected 'op' (each op that draws is seeded by the "
                "seed, the step, the replica, the micro-batch and itself) or 'stage' (each process draws from its own stream)."
            )
        check_batch_dim(self.batch_dim)
        CompileSettings.of(self.compile)
        if not isinstance(self.plan, (Plan, str, Path, type(None))):
            raise PlanError(f"plan must be a Plan or the path of a file with one, got {type(self.plan).__name__}")
        super().__post_init__()
        self._check_borrowing()
        try:
            plan = Plan.load(self.plan) if isinstance(self.plan, (str, Path)) else self.plan
        except ValueError as error:  # an invalid path
            raise PlanError(f"plan {shortened(self.plan)} cannot be read: {error}") from error
        if plan is not None:
            for name, value in {"plan": plan, "stages": plan.stages, "replicas": plan.replicas}.items():
                object.__setattr__(self, name, value)

    def _check_borrowing(self) -> None:
        """Refuse what needs parameters that stay where they are, if replicas borrow them from each other."""
        if self.sync_mode.mode != "fsdp":
            return
        unsuited = {"compile": (self.compile, False), "batch_norm": (self.batch_norm, "microbatch")}
        for name, (given, fine) in {**unsuited, "verify": (self.verify, False)}.items():
            if given != fine:
                raise ConfigError(
                    f"{name}={shortened(given)} is not supported with sync='fsdp', whose parameters come and go during a step. "
                    f"Use {name}={fine!r}, or sync='sharded', which divides gradients and optimizer states."
                )

    @property
    def given_plan(self) -> Plan | None:
        """The plan, after its file was read."""
        assert not isinstance(self.plan, (str, Path))
        return self.plan


@cache
def words_of(options: type, name: str) -> tuple[Any, ...]:
    """Return the values of an option that its type lists."""
    return get_args(get_type_hints(options)[name])
