"""The mean of gradients over replicas that are jobs of their own, any of which may be lost in any step.

```
replica 0   backward | show g0, D0 |                      | mean of those who have shown
replica 1   backward | show g1, D1 | wait for all or lost | sum(D g) / sum(D)
```
`D` is the denominator of the loss over the batches of this step: samples or tokens. So the mean is the gradient of one process
on the samples of the replicas that are there. All replicas add in one order, so that parameters stay equal to the last bit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from pipepart.errors import PlanError
from pipepart.runtime.replica_board import Board, Shown
from pipepart.runtime.sync.buckets import BucketedSync

__all__ = ["BoardMean"]

_ALIGNED = 64
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class BoardMean(BucketedSync):
    """Averages the gradients of one stage over the replicas that take part in a step."""

    def __init__(self, board: Board, settings: Callable[[], int]) -> None:
        """`settings` returns a number of what must be the same on all replicas: the learning rates."""
        self.board, self._settings = board, settings
        self.replicas, self.own_groups = board.replicas, []
        self._parameters: list[tuple[str, nn.Parameter]] = []
        self._weight: float | None = None

    def begin(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters, self._weight = sorted(parameters.items()), None

    def weigh(self, denominator: float | None) -> None:
        self._weight = denominator

    @contextmanager
    def last_backward(self, chunk: int) -> Iterator[None]:
        yield

    def chunk_is_final(self, chunk: int) -> None:
        pass

    @torch.no_grad()
    def finish(self) -> None:
        """Show the gradients of this rank, and put the means of all that take part into `.grad`."""
        if self._weight is None:
            raise PlanError(
                "launcher.lost_replica=continue weighs each replica by the denominator of its loss, and the loss of this step "
                "has none, or several.\n  expected: one mean over samples or tokens, with a sum that pipepart can follow\n  "
                "do: use such a loss, or launcher.lost_replica=null"
            )
        settings, form, places = self._settings(), self._form(), self._places()
        size = places[-1]
        self.board.show(self._weight, settings, form, size, lambda memory: self._write(memory, places))
        self._take(self.board.gather(settings, form), places)

    def _form(self) -> int:
        """Return a number of the names, shapes, dtypes and values of all parameters, which are equal on all replicas."""
        forms = [(name, tuple(p.shape), str(p.dtype), p.requires_grad, _sum_of_bits(p)) for name, p in self._parameters]
        return int.from_bytes(hashlib.sha256(repr(forms).encode()).digest()[:7], "little")

    def _places(self) -> list[int]:
        """Return where each gradient begins, and where all of them end. First come bytes that say which of them are there."""
        places = [-(-len(self._parameters) // _ALIGNED) * _ALIGNED]
        for _, parameter in self._parameters:
            places.append(places[-1] + -(-parameter.numel() * parameter.element_size() // _ALIGNED) * _ALIGNED)
        return places

    def _write(self, memory: memoryview, places: Sequence[int]) -> None:
        for index, (_, parameter) in enumerate(self._parameters):
            memory[index] = parameter.grad is not None
            if parameter.grad is not None and parameter.numel():
                _view(memory, places[index], parameter).copy_(parameter.grad)

    def _take(self, shown: Sequence[Shown], places: Sequence[int]) -> None:
        total = sum(one.weight for one in shown)
        shares = [one.weight / total if total else 1 / len(shown) for one in shown]
        for index, (_, parameter) in enumerate(self._parameters):
            have = [(one, share) for one, share in zip(shown, shares) if one.content[index]]
            if not have:
                parameter.grad = None
                continue
            mean = torch.zeros_like(parameter)
            for one, share in have:
                if share and parameter.numel():  # a replica without targets has no gradient, perhaps 0 / 0
                    mean.add_(_view(one.content, places[index], parameter), alpha=share)
            parameter.grad = mean


def _sum_of_bits(parameter: nn.Parameter) -> int:
    """Return the sum of the values, read as integers: it is exact, in whatever order they are added."""
    integers = _INTEGERS[min(parameter.element_size(), 8)]
    return int(parameter.detach().contiguous().view(-1).view(integers).sum()) if parameter.numel() else 0


def _view(memory: memoryview, begin: int, parameter: nn.Parameter) -> torch.Tensor:
    """Return the memory as a tensor of the form of a parameter."""
    return torch.frombuffer(memory, dtype=parameter.dtype, count=parameter.numel(), offset=begin).view(parameter.shape)
