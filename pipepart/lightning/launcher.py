"""The launcher of Lightning for scripts, with processes that meet in private and end with their parent while they start."""

from __future__ import annotations

import os
from typing import Any

from lightning.pytorch.strategies.launchers import subprocess_script

from pipepart.lightning.run_patches import RunPatches
from pipepart.parent import RANK_0, tied
from pipepart.runtime.rendezvous import name_job

__all__ = ["Launcher"]


class Launcher(subprocess_script._SubprocessScriptLauncher):
    """Starts the script again for each other rank of this host.

    Until the ranks have connected, they are killed when this process ends. From then on they notice its end themselves, and
    may finish their work after a fit (`pipepart.lightning.ranks`).
    """

    def _call_children_scripts(self) -> None:
        name_job(self.num_nodes)
        patches = RunPatches()
        basic, with_hydra = subprocess_script._basic_subprocess_cmd, subprocess_script._hydra_subprocess_cmd

        def tied_with_hydra(local_rank: int) -> tuple[Any, str]:
            command, folder = with_hydra(local_rank)
            return tied(command), folder

        patches.put(subprocess_script, "_basic_subprocess_cmd", lambda: tied(basic()))
        patches.put(subprocess_script, "_hydra_subprocess_cmd", tied_with_hydra)
        if self.num_nodes == 1:
            os.environ[RANK_0] = str(os.getpid())
        try:
            super()._call_children_scripts()
        finally:
            os.environ.pop(RANK_0, None)
            patches.undo()
