"""The progress of a run: one bar over all steps with the loss; lines where there is no terminal."""

from __future__ import annotations

import sys
import time
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from tqdm import tqdm

__all__ = ["Progress"]


class Progress(ProgressBar):
    """A bar over the steps of the whole run (epochs of a pipeline's data are of no interest here)."""

    def __init__(self, refresh_rate: int = 5, lines: int = 10) -> None:
        super().__init__()
        self._refresh_rate, self._lines = refresh_rate, lines
        self._enabled = True
        self._bar: Any = None
        self._started, self._first = 0.0, 0

    def disable(self) -> None:
        self._enabled = False

    def enable(self) -> None:
        self._enabled = True

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._started, self._first = time.monotonic(), trainer.global_step
        if self._shows(trainer) and sys.stdout.isatty():
            self._bar = tqdm(
                total=self._total(trainer),
                initial=trainer.global_step,
                desc="training",
                unit="step",
                colour="cyan",
                dynamic_ncols=True,
                file=sys.stdout,
            )

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if not self._shows(trainer):
            return
        step, total = trainer.global_step, self._total(trainer)
        last = total is not None and step >= total
        if self._bar is not None:
            if step % self._refresh_rate == 0 or last:
                self._bar.set_postfix_str(self._values(trainer, pl_module), refresh=False)
                self._bar.update(step - self._bar.n)
        elif step == self._first + 1 or last or step % max(1, (total or 1000) // self._lines) == 0:
            speed = (step - self._first) / max(time.monotonic() - self._started, 1e-9)
            of = f"/{total}" if total is not None else ""
            print(f"step {step}{of}  {self._values(trainer, pl_module)}  {speed:.2f} steps/s", flush=True)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._bar is not None:
            self._bar.set_postfix_str(self._values(trainer, pl_module))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._bar is None and self._shows(trainer) and trainer.global_step > self._first:
            spent = time.monotonic() - self._started
            print(f"done in {spent:.0f} s  {self._values(trainer, pl_module)}", flush=True)  # the last validation, too
        self._close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._close()

    def print(self, *args: Any, **kwargs: Any) -> None:
        text = kwargs.get("sep", " ").join(map(str, args))
        tqdm.write(text, file=sys.stdout) if self._bar is not None else print(text, flush=True)

    def _shows(self, trainer: Trainer) -> bool:
        return self._enabled and trainer.is_global_zero

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _values(self, trainer: Trainer, module: LightningModule) -> str:
        found = {key: value for key, value in self.get_metrics(trainer, module).items() if key != "v_num"}
        return "  ".join(
            f"{key} {value:.3f}" if isinstance(value, float) else f"{key} {value}" for key, value in found.items()
        )

    @staticmethod
    def _total(trainer: Trainer) -> int | None:
        total = trainer.estimated_stepping_batches
        return int(total) if total != float("inf") else None
