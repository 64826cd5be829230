"""The launcher of Lightning for scripts, with processes that meet in private and end with their parent while they start."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from pipepart.errors import ConfigError
from pipepart.lightning.binding import kind_in
from pipepart.lightning.namespaces import Namespace
from pipepart.lightning.run_patches import RunPatches
from pipepart.parent import RANK_0, tied
from pipepart.runtime.rendezvous import name_job

if TYPE_CHECKING:
    from lightning.fabric.plugins import ClusterEnvironment
    from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
else:
    _SubprocessScriptLauncher = object

__all__ = ["launcher_for"]

_HOME = "strategies.launchers.subprocess_script"


def launcher_for(
    namespace: Namespace, environment: ClusterEnvironment, processes: int, nodes: int, package: str = "pytorch"
) -> Launcher:
    """The launcher for a Trainer, or for Fabric if `package` is "fabric"."""
    home = namespace.module(f"{package}.{_HOME}")
    launcher: Launcher = kind_in(Launcher, home._SubprocessScriptLauncher)(environment, processes, nodes)
    launcher.home = home
    return launcher


class Launcher(_SubprocessScriptLauncher):
    """Starts the script again for each other rank of this host.

    Until the ranks have connected, they are killed when this process ends. From then on they notice its end themselves, and
    may finish their work after a fit (`pipepart.lightning.ranks`).
    """

    home: Any
    """The module of the launcher that this class derives from."""

    @property
    def is_interactive_compatible(self) -> bool:
        """Lightning asks in a notebook only."""
        raise ConfigError(
            "a notebook cannot start its processes by running a script again. Use strategy='pipepart_notebook', or "
            "pipepart.NotebookStrategy(...) with the same options, which starts them by fork; or run a script."
        )

    def _call_children_scripts(self) -> None:
        if self.num_nodes * self.num_processes > 1:
            name_job(self.num_nodes)
        patches, home = RunPatches(), self.home
        basic, with_hydra = home._basic_subprocess_cmd, home._hydra_subprocess_cmd

        def tied_with_hydra(local_rank: int) -> tuple[Any, str]:
            command, folder = with_hydra(local_rank)
            return tied(command), folder

        patches.put(home, "_basic_subprocess_cmd", lambda: tied(basic()))
        patches.put(home, "_hydra_subprocess_cmd", tied_with_hydra)
        if self.num_nodes == 1:
            os.environ[RANK_0] = str(os.getpid())
        try:
            super()._call_children_scripts()
        finally:
            os.environ.pop(RANK_0, None)
            patches.undo()
