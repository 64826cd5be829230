"""Weights & Biases logger for runs that must not depend on its server."""

from __future__ import annotations

import os
from typing import Any

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.utilities import rank_zero_warn

__all__ = ["SafeWandbLogger"]


class SafeWandbLogger(WandbLogger):
    """Lightning's logger, offline by default. A run never fails because of it.

    With `offline=False` the records are sent during the run. If the server does not answer within `timeout` seconds, or
    nobody is logged in, they are kept on this machine, to be sent later with ``wandb sync``.
    """

    def __init__(self, *, offline: bool = True, timeout: float = 30.0, **options: Any) -> None:
        super().__init__(offline=offline, **options)
        self._timeout = timeout

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        if self._experiment is None and not self._offline:
            import wandb

            self._wandb_init.setdefault("settings", wandb.Settings(init_timeout=self._timeout))
            try:
                return super().experiment
            except wandb.errors.Error as error:
                rank_zero_warn(
                    f"wandb cannot be reached ({str(error).splitlines()[0]}). The run is kept in "
                    f"{str(self._save_dir or '.')!r} and can be sent later with `wandb sync`."
                )
                self._offline = True
                self._wandb_init.update(mode="offline")
                os.environ["WANDB_MODE"] = "offline"
        return super().experiment
