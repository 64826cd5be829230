"""A case of the suite: a program that trains a LightningModule of a library, with what its runs need to be comparable."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Case", "Cases"]


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    name: str
    """`library.model`."""
    program: Callable[[], Any]
    """Builds data and module and trains, as a user of the library does."""
    microbatches: int = 2
    """1 where statistics of the batch (batch norm) or batches in one piece need it."""
    strategy: dict[str, Any] = field(default_factory=dict)
    """Further options of the strategy."""
    trainer: dict[str, Any] = field(default_factory=dict)
    """Further options of every trainer, on one device as well."""
    draws: bool = False
    """Whether the module draws random numbers: they are fixed, on one device as well, and dropout is off."""
    relative: float = 1e-7
    """The difference that rounding may make."""
    remark: str = ""
    """What was set for the comparison."""

    @property
    def library(self) -> str:
        return self.name.partition(".")[0]


class Cases(dict[str, Case]):
    """Cases by name, in the order in which they are declared."""

    def add(self, name: str, **options: Any) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
        """A decorator for the program of a case."""

        def declare(program: Callable[[], Any]) -> Callable[[], Any]:
            self[name] = Case(name, program, **options)
            return program

        return declare
