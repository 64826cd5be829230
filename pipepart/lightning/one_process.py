"""A job of one process: its ranks are known, and it needs neither a launcher nor variables of a cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = ["OneProcess"]


class OneProcess:
    """The ranks of a strategy, which a job of one process does not ask the environment for."""

    num_nodes: int

    if TYPE_CHECKING:

        @property
        def num_processes(self) -> int: ...

    @property
    def _alone(self) -> bool:
        return self.num_nodes * self.num_processes == 1

    @property
    def global_rank(self) -> int:
        return 0 if self._alone else self._asked("global_rank")

    @property
    def local_rank(self) -> int:
        return 0 if self._alone else self._asked("local_rank")

    @property
    def node_rank(self) -> int:
        return 0 if self._alone else self._asked("node_rank")

    @property
    def world_size(self) -> int:
        return 1 if self._alone else self._asked("world_size")

    def _asked(self, name: str) -> int:
        base: Any = super()
        value: int = getattr(base, name)
        return value
