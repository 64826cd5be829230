"""Callback that records the execution of a pipeline in every logger of the trainer and in files."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from pipepart.devices import peak_memory_of
from pipepart.errors import ConfigError, PlanError
from pipepart.files import may_fail
from pipepart.lightning.announce import tell
from pipepart.lightning.artifacts import log_files
from pipepart.lightning.binding import OwnCallback
from pipepart.lightning.live_record import LiveRecord
from pipepart.lightning.namespaces import either, loaded
from pipepart.lightning.pipeline_strategy import PipelineStrategy
from pipepart.lightning.remote_files import RemoteFile, is_remote
from pipepart.recording.inputs import trees
from pipepart.report import save_graph, save_timeline, write_report
from pipepart.report.account import save_account
from pipepart.report.figures import measured_step, plan_figures, step_figures
from pipepart.runtime import StageRuntime
from pipepart.runtime.failure import guarded
from pipepart.runtime.meeting import exchange_objects, reduce_numbers
from pipepart.runtime.microbatch import batch_size_of

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.loggers import Logger

__all__ = ["PipelineMonitor"]

_log = logging.getLogger("pipepart.report")  # separate, for programs that print the paths themselves


class PipelineMonitor(OwnCallback):
    """Records times of stages, bubble, memory, throughput and predicted against measured times, every `every_n_steps`.

    ```python
    trainer = L.Trainer(strategy=PipelineStrategy(stages=2), callbacks=[PipelineMonitor()], logger=CSVLogger("runs"))
    ```

    All loggers of the trainer get the same figures, on rank 0. At the end, after the last checkpoint, `plan.json`,
    `graph.json`, `trace.json`, `account.json` (where the time of a step went) and `report.html` are in `folder` (by default
    the trainer's log directory; an address such as `s3://bucket/run` is possible); Weights & Biases has them as artifacts
    and the page as a panel. While the run lasts, `live.json` and `trace.json` there are renewed (`pipepart view --live
    FOLDER`), unless the folder is an address. If a logger fails or a file cannot be written, a warning names it, and the
    run continues without it. `title` is the title of the page (by default the name of the module's class).
    """

    def __init__(
        self,
        every_n_steps: int | None = None,
        folder: str | Path | None = None,
        report: bool = True,
        title: str | None = None,
    ) -> None:
        if every_n_steps is not None and (isinstance(every_n_steps, bool) or every_n_steps < 1):
            raise ConfigError(f"PipelineMonitor: every_n_steps must be at least 1 or None, got {every_n_steps!r}")
        self._every_given, self._folder_given, self._report, self._title = every_n_steps, folder, report, title
        self.files: dict[str, Path] = {}
        """Written files by name, on rank 0."""
        self._every = 0
        self._waits = True
        """Whether there is no plan yet whose execution can be recorded."""
        self._batch = self._samples = 0
        self._seen_steps = 0
        self._norm: float | None = None
        self._folder = Path()
        self._address: str | None = None
        self._silenced: set[int] = set()
        self._untrace: Callable[[], None] = lambda: None
        self._live: LiveRecord | None = None

    def writes_report(self, folder: Path) -> bool:
        """Whether this callback writes the report of the current run, in this folder."""
        return self._every > 0 and not self._waits and self._report and self._folder.absolute() == folder.absolute()

    # ---- hooks

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._every = 0
        strategy = trainer.strategy
        if not isinstance(strategy, PipelineStrategy):
            tell(f"pipepart: PipelineMonitor has nothing to record under {type(strategy).__name__}")
            return
        self._every = self._every_given or max(1, int(getattr(trainer, "log_every_n_steps", 0) or 50))
        self._batch, self._samples, self._seen_steps, self._norm = 0, 0, len(strategy.step_times), None
        place = trainer.log_dir  # all ranks must read it
        self._place_files(self._folder_given or place or trainer.default_root_dir)
        self._untrace()
        self._waits = True
        self._begun(trainer)

    def _begun(self, trainer: Trainer) -> bool:
        """Whether figures are recorded: from the plan of the training step on, which may be made with its first batch."""
        strategy: Any = trainer.strategy
        if self._every and self._waits and strategy.plans_training:
            self._waits = False
            self._untrace = strategy.runtime.tracing.also(lambda: self._due)
            if trainer.is_global_zero:
                self._record_plan(trainer, strategy)
                title = self._title or type(trainer.lightning_module).__name__
                shown = self._report and self._address is None
                self._live = LiveRecord(self._folder, title, trainer) if shown else None
        return self._every > 0 and not self._waits

    def _place_files(self, place: Any) -> None:
        """Files for an address are written into a temporary folder, and copied one by one."""
        self._address = str(place) if is_remote(place) else None
        if self._address is not None:
            self._temporary = tempfile.TemporaryDirectory(prefix="pipepart-report-")
        self._folder = Path(place if self._address is None else self._temporary.name)

    @property
    def _due(self) -> bool:
        """Whether the figures of this batch are recorded. All ranks give the same answer."""
        return self._every > 0 and self._batch % self._every == 0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._batch += 1

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        # With accumulation the last optimizer step may come some batches before the figures are recorded.
        if self._begun(trainer) and -self._batch % self._every < trainer.accumulate_grad_batches:
            assert isinstance(trainer.strategy, PipelineStrategy)
            self._norm = float(trainer.strategy.runtime.gradient_norm())

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self._begun(trainer):
            return
        strategy = trainer.strategy
        assert isinstance(strategy, PipelineStrategy)
        runtime = strategy.runtime
        self._samples += _samples_of(batch, strategy.plan.batch_size)
        if not self._due:
            return
        samples, self._samples = _in_all_replicas(runtime, self._samples), 0
        memory = _memory_by_stage(runtime)
        if not trainer.is_global_zero:
            return
        figures = step_figures(
            strategy.plan,
            strategy.step_times[self._seen_steps :],
            samples=samples,
            timeline=runtime.timeline,
            memory=memory,
            gradient_norm=self._norm,
        )
        self._seen_steps, self._norm = len(strategy.step_times), None
        self._with_loggers(trainer, lambda logger: logger.log_metrics(figures, step=trainer.global_step))
        if self._live is not None:
            self._live.add(trainer, runtime.timeline, memory, figures)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._untrace()
        if self._every and self._waits:
            tell(
                "pipepart: PipelineMonitor has recorded nothing: the training step has no plan, or no batch was trained on"
            )

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Checkpoint callbacks write their last file in `on_train_end`, after all other callbacks.
        strategy = trainer.strategy
        if (
            self._every
            and not self._waits
            and self._report
            and trainer.is_global_zero
            and isinstance(strategy, PipelineStrategy)
        ):
            self._write_report(trainer, strategy)
        self._end_live("the job has ended")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._untrace()
        self._end_live(f"the job has failed with {type(exception).__name__}")

    def _end_live(self, how: str) -> None:
        if self._live is not None:
            self._live.end(how)
            self._live = None

    # ---- files and loggers (rank 0)

    def _record_plan(self, trainer: Trainer, strategy: PipelineStrategy) -> None:
        plan, figures = strategy.plan, plan_figures(strategy.plan)
        files: dict[str, Path] = {}
        if self._report:
            runtime = strategy.runtime
            files |= self._written("plan.json", plan.save)
            files |= self._written("graph.json", lambda path: save_graph(path, runtime.graph, runtime.costs))

        def record(logger: Any) -> None:
            if isinstance(logger, either("TensorBoardLogger")):
                logger.experiment.add_text("pipepart/plan", f"```\n{plan.describe()}\n```")
            else:
                logger.log_hyperparams({"plan": figures})
            if isinstance(logger, either("WandbLogger")) and files:
                log_files(logger, f"plan-{plan.hash}", "plan", files, figures)

        self._with_loggers(trainer, record)

    def _write_report(self, trainer: Trainer, strategy: PipelineStrategy) -> None:
        plan, timeline, steps = strategy.plan, strategy.runtime.timeline, strategy.step_times
        files: dict[str, Path] = {}
        if timeline is not None:
            files |= self._written("trace.json", lambda path: save_timeline(path, timeline))
        account = strategy.account
        if account is not None:
            files |= self._written("account.json", lambda path: save_account(path, account))
        files |= self._written(
            "report.html",
            lambda path: write_report(
                path,
                plan,
                graph=strategy.runtime.graph,
                costs=strategy.runtime.costs,
                measured=timeline,
                measured_step=measured_step(steps),
                account=account,
                title=self._title or type(trainer.lightning_module).__name__,
            ),
        )

        def record(logger: Any) -> None:
            if isinstance(logger, either("WandbLogger")) and files:
                log_files(logger, f"report-{plan.hash}", "report", files, plan_figures(plan))

        self._with_loggers(trainer, record)
        if "report.html" in files:
            _log.info(f"pipepart: report {files['report.html']}")

    def _written(self, name: str, write: Callable[[Path], Any]) -> dict[str, Path]:
        """Write a file into the folder, and return it by its name. If it cannot be written, warn and return nothing."""
        path = self._folder / name
        with may_fail(str(path)):
            path.parent.mkdir(parents=True, exist_ok=True)
            write(path)
            self.files[name] = path
            if self._address is not None:
                (RemoteFile.at(self._address) / name).send(path)
            return {name: path}
        return {}

    def _with_loggers(self, trainer: Trainer, action: Callable[[Logger], None]) -> None:
        """Call `action` for each logger. A logger that fails does not end the run, and is left out from then on."""
        for logger in trainer.loggers:
            if id(logger) in self._silenced:
                continue
            try:
                action(logger)
            except Exception as error:
                self._silenced.add(id(logger))
                loaded().rank_zero_warn(
                    f"{type(logger).__name__} failed ({type(error).__name__}: {error}); it gets no more figures"
                )


def _samples_of(batch: Any, otherwise: int) -> int:
    """The number of samples of a batch. The last batch of an epoch may be smaller than planned."""
    try:
        return batch_size_of(trees.leaves_of(batch))
    except PlanError:  # without tensors
        return otherwise


def _in_all_replicas(runtime: StageRuntime, samples: int) -> int:
    """The samples that all replicas have trained on. Correct on the first stages, which read the data."""
    groups = runtime.groups
    if groups is None or groups.numbers is None or groups.stage != 0:
        return samples
    if runtime.parameters.loose is not None:  # replicas do not wait for each other
        return samples * groups.mesh.replicas
    total = torch.tensor(samples)
    with guarded(groups):
        reduce_numbers(total, groups, groups.numbers, dist.ReduceOp.SUM)
    return int(total)


def _memory_by_stage(runtime: StageRuntime) -> list[float]:
    """Peak bytes of each stage: allocated on its device, or the resident memory of its process on the CPU."""
    mine = float(peak_memory_of(runtime.device))
    groups = runtime.groups
    if groups is None or groups.mesh.stages == 1:
        return [mine]
    with guarded(groups):
        return exchange_objects(mine, groups, inside_replica=True)
