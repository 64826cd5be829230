"""What the search needs of a problem, whatever the number of chunks: made once, kept for the next question.

A planner asks about the same model for many numbers of chunks and micro-batches. Classes, reductions, orders and
downsets stay the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from pipepart.partition.downsets import all_downsets
from pipepart.partition.instance import Instance, make_instance
from pipepart.partition.lattice import LatticeStates
from pipepart.partition.linear import LinearStates
from pipepart.partition.orders import linear_orders
from pipepart.partition.problem import Problem
from pipepart.partition.quotient import Quotient, quotient
from pipepart.partition.reduce import reduce_instance

__all__ = ["Prepared", "classes", "full_instance", "prepare"]

_MOST_DOWNSETS = 60_000
_MOST_BYTES = 200_000_000
_KEPT_BYTES = 100_000_000
_LARGE = 3000


@lru_cache(maxsize=4)
def classes(problem: Problem) -> Quotient:
    """The classes of ops that stay together."""
    return quotient(problem)


@lru_cache(maxsize=4)
def full_instance(problem: Problem, chunks: int, require_work: bool) -> Instance:
    """Integer costs before any reduction. ``chunks``: see `prepare`."""
    return make_instance(problem, classes(problem), chunks, require_work=require_work)


@lru_cache(maxsize=2)
def prepare(problem: Problem, chunks: int, require_work: bool, memory_matters: bool) -> Prepared:
    """The reduced instance and its states. ``chunks`` is 0 where all links are the same, so that it does not matter."""
    full = full_instance(problem, chunks, require_work)
    instance, merged = reduce_instance(full, memory_matters=memory_matters)
    return Prepared(instance, merged)


@dataclass(eq=False)
class Prepared:
    """A reduced instance with the states that searches work on."""

    instance: Instance
    merged: Quotient
    """Classes of the problem -> classes of the instance."""

    @cached_property
    def orders(self) -> list[tuple[str, LinearStates]]:
        """Linear orders to slice; fewer of them for large graphs."""
        orders = linear_orders(self.instance)
        if self.instance.classes > _LARGE:
            orders = orders[:3]
        return [(name, LinearStates(self.instance, order)) for name, order in orders]

    @cached_property
    def chain(self) -> LinearStates | None:
        """The only topological order, if every class feeds the next one (and maybe later ones)."""
        if all(c + 1 in after for c, after in enumerate(self.instance.successors[:-1])):
            return LinearStates(self.instance, range(self.instance.classes), complete=True)
        return None

    @cached_property
    def lattice(self) -> LatticeStates | None:
        """All downsets, if they are few enough."""
        downsets = all_downsets(self.instance, min(_MOST_DOWNSETS, _MOST_BYTES // self._bytes_per_downset))
        return None if downsets is None else LatticeStates(self.instance, downsets, complete=True)

    @property
    def _bytes_per_downset(self) -> int:
        # The bits themselves, the sums and the borders.
        return self.instance.classes // 8 + 8 * len(self.instance.compute) * 3 + 1000

    def forget(self) -> None:
        """Let go of what is too large to be kept for the next question."""
        for _, states in self.orders:
            states.tables.clear()
        if self.chain is not None:
            self.chain.tables.clear()
        lattice = self.__dict__.get("lattice")
        if lattice is not None:
            lattice.tables.clear()
            if len(lattice.work) * self._bytes_per_downset > _KEPT_BYTES:
                del self.__dict__["lattice"]
