"""One compiled piece of a chunk: a compiled function for each form of its inputs and each state of its modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from pipepart.planning.compile_mode import CompileSettings
from pipepart.recording.op import op_of
from pipepart.runtime.compiled.chunk_pieces import Piece, is_watched, sites_of
from pipepart.runtime.compiled.inductor import compiled_function
from pipepart.runtime.compiled.numbered_draws import CannotCompile

__all__ = ["CompiledPiece"]

_MOST = 12
"""The number of forms of its inputs that a piece is compiled for. Others run as they are."""
_FIXED = (torch.Tensor, bool, int, str, type(None), torch.Size, torch.dtype, torch.device)
"""Kinds of inputs: others may change with each micro-batch."""
_PLAIN = (bool, int, float, str, type(None))


class CompiledPiece:
    """Runs a piece with compiled code, or as it is if that cannot be."""

    def __init__(self, piece: Piece, settings: CompileSettings, halves: bool, note: Callable[[str], None]) -> None:
        assert piece.traced is not None
        self._piece, self._traced, self._settings, self._halves, self._note = (
            piece,
            piece.traced,
            settings,
            halves,
            note,
        )
        self._sites, self._modules, self._values = sites_of(piece.traced)
        self._functions: dict[Any, Callable[..., Sequence[Any]] | None] = {}
        self._states: dict[Any, int] = {}
        self._state: int | None = None
        self._tensors: list[torch.Tensor] = []
        self._places: list[int] = []
        """For each site the index of its tensor."""
        self._trained: list[torch.Tensor] = []

    def begin(self) -> None:
        """Read the parameters, flags and numbers of the modules. It is called before each step."""
        indices: dict[int, int] = {}
        self._tensors, self._places = [], []
        for site in self._sites:
            tensor = site.value
            if id(tensor) not in indices:
                indices[id(tensor)] = len(self._tensors)
                self._tensors.append(tensor)
            self._places.append(indices[id(tensor)])
        if any(map(is_watched, self._modules)) or any(_is_special(tensor) for tensor in self._tensors):
            self._state = None
            self._note("a hook, or a tensor of a class of its own, is there")
            return
        state = (
            tuple(self._places),
            tuple((tuple(t.shape), t.stride(), t.dtype, t.device, t.requires_grad) for t in self._tensors),
            tuple(_plain(site.value) for site in self._values),
            tuple(tuple(v for v in vars(module).values() if _is_plain(v)) for module in self._modules),
        )
        self._state = self._states.setdefault(state, len(self._states))

    def __call__(self, given: Sequence[Any], surroundings: Any) -> Sequence[Any]:
        """Run the piece. `surroundings` are the modes of the process that change what ops do."""
        if self._state is None:
            return self._piece.graph.forward(*given)
        if not all(isinstance(value, _FIXED) for value in given):
            self._note("it reads a number that a tensor holds, or a tuple")
            return self._piece.graph.forward(*given)
        form = tuple(
            (tuple(v.shape), v.stride(), v.dtype, v.requires_grad) if isinstance(v, torch.Tensor) else v for v in given
        )
        key = (self._state, surroundings, form)
        function: Any = self._functions.get(key, self)
        if function is self:
            function = self._functions[key] = self._compiled(given)
        if function is None:
            return self._piece.graph.forward(*given)
        return function(*self._tensors, *(value for value in given if isinstance(value, torch.Tensor)))

    def _compiled(self, given: Sequence[Any]) -> Callable[..., Sequence[Any]] | None:
        if len(self._functions) >= _MOST:
            self._note(f"it has had inputs of {_MOST} forms, and the next ones are not compiled")
            return None
        try:
            return self._make(given)
        except Exception as error:
            if self._settings.whole:
                raise
            reason = str(error).strip().splitlines()
            self._note(f"{type(error).__name__}: {reason[0] if reason else 'no reason is given'}")
            return None

    def _make(self, given: Sequence[Any]) -> Callable[..., Sequence[Any]]:
        nodes = next(iter(self._traced.graph.find_nodes(op="output"))).args[0]
        plain = [index for index, node in enumerate(nodes) if op_of(node).is_number]
        rest = [index for index, node in enumerate(nodes) if index not in plain]
        if any(op_of(nodes[index]).shape is None for index in rest):
            raise CannotCompile("a value that is no tensor leaves it")
        if any(isinstance(value, torch.Tensor) and _is_special(value) for value in given):
            raise CannotCompile("an input is a tensor of a class of its own")
        numbers: dict[int, Any] = {}
        count = len(self._tensors)

        def body(*flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
            own = iter(flat[count:])
            arguments = [next(own) if isinstance(value, torch.Tensor) else value for value in given]
            with self._swapped(flat):
                results = self._traced.forward(*arguments)
            numbers.update((index, results[index]) for index in plain)
            return tuple(results[index] for index in rest)

        flat = [*self._tensors, *(value for value in given if isinstance(value, torch.Tensor))]
        halves = (lambda: self._tensors) if self._halves and torch.is_grad_enabled() else None
        function = compiled_function(body, flat, len(rest), self._settings, halves)
        given = [value if not isinstance(value, torch.Tensor) else torch.empty(0) for value in given]
        if not plain:
            return function

        def with_numbers(*flat: torch.Tensor) -> list[Any]:
            made = iter(function(*flat))
            return [numbers[index] if index in numbers else next(made) for index in range(len(nodes))]

        return with_numbers

    @contextmanager
    def _swapped(self, flat: Sequence[torch.Tensor]) -> Iterator[None]:
        """Put other tensors into the places of the modules inside."""
        before = [site.value for site in self._sites]
        try:
            for site, place in zip(self._sites, self._places):
                site.holder[site.name] = flat[place]
            yield
        finally:
            for site, tensor in zip(self._sites, before):
                site.holder[site.name] = tensor


def _is_special(tensor: torch.Tensor) -> bool:
    return type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout != torch.strided


def _plain(value: Any) -> Any:
    return value if isinstance(value, _PLAIN) else id(value)


def _is_plain(value: Any) -> bool:
    """Return whether an attribute of a module is a number, a text, or a tuple of them, as a stride is."""
    return isinstance(value, _PLAIN) or (type(value) is tuple and all(isinstance(part, _PLAIN) for part in value))
