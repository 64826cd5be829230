"""Random numbers of compiled graphs: each op that draws stays a call of its own, seeded as it is without a compiler.

A compiler may change the order of ops and the generator that they draw from. So an op that draws is written as
``pipepart::draw``, which carries the number of the op (`recording.execution.draws`) and draws exactly what torch would draw
for the op when its key is set. The numbers of a compiled run are therefore those of the run without a compiler.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from pipepart.recording.execution.draws import before_draw, watch_draws

__all__ = ["CannotCompile", "decompositions", "numbered_draws"]


class CannotCompile(Exception):
    """A part of a chunk that cannot be compiled. It runs as it is."""


_number: int | None = None
"""The number of the op that is traced; None if it has drawn already."""


class numbered_draws:
    """Give ops that are traced inside the number of the op that draws."""

    def __enter__(self) -> None:
        watch_draws(_is_next)

    def __exit__(self, *_: object) -> None:
        global _number
        watch_draws(None)
        _number = None


def _is_next(op: int) -> None:
    global _number
    _number = op


def _take() -> int:
    global _number
    number, _number = _number, None
    if number is None:
        raise CannotCompile("an op draws random numbers more than once")
    return number


_library = torch.library.Library("pipepart", "DEF")
_library.define("draw(Tensor like, str kind, float p, int number) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))


def _draw(like: torch.Tensor, kind: str, p: float, number: int) -> torch.Tensor:
    before_draw(number, outside=False)
    if kind == "uniform":
        return torch.rand_like(like)
    if kind == "normal":
        return torch.randn_like(like)
    if kind == "dropout" and like.device.type != "cpu":  # devices have a kernel of their own
        return torch.native_dropout(torch.empty_like(like), p, True)[1].to(like.dtype)
    return torch.empty_like(like).bernoulli_(1 - p if kind == "dropout" else p)


_library.impl("draw", _draw, "CompositeExplicitAutograd")
_library.impl("draw", lambda like, kind, p, number: torch.empty_like(like), "Meta")


def _op(like: torch.Tensor, kind: str, p: float = 0.0) -> torch.Tensor:
    return torch.ops.pipepart.draw(like, kind, p, _take())


def _native_dropout(x: torch.Tensor, p: float, train: bool | None) -> tuple[torch.Tensor, torch.Tensor]:
    if not (train is None or train):
        return x, torch.ones_like(x, dtype=torch.bool)
    if p == 1:
        return torch.zeros_like(x), torch.zeros_like(x, dtype=torch.bool)
    kept = _op(x, "dropout", p)
    return x * (kept * (1.0 / (1.0 - p))), kept.to(torch.bool)


def _bernoulli(x: torch.Tensor, p: float, generator: None = None) -> torch.Tensor:
    return _op(x, "bernoulli", p)


def _plain(kind: str) -> Callable[..., torch.Tensor]:
    def drawn(x: torch.Tensor, *, dtype: torch.dtype | None = None, **others: Any) -> torch.Tensor:
        if others.get("device") not in (None, x.device) or others.get("memory_format") not in (
            None,
            torch.preserve_format,
        ):
            raise CannotCompile("an op draws on another device, or in another layout")
        return _op(x if dtype is None else torch.empty_like(x, dtype=dtype), kind)

    return drawn


@cache
def decompositions() -> dict[Any, Callable[..., Any]]:
    """Return the decompositions of inductor, with those of the ops that draw."""
    from torch._inductor.decomposition import select_decomp_table

    aten = torch.ops.aten
    return {
        **select_decomp_table(),
        aten.native_dropout.default: _native_dropout,
        aten.bernoulli.p: _bernoulli,
        aten.rand_like.default: _plain("uniform"),
        aten.randn_like.default: _plain("normal"),
    }
