"""The compiler of torch: AOTAutograd divides the ops of a piece into forward and backward, and inductor makes code of both.

This module alone reads names of torch that are not documented. All of them are those that `torch.compile` itself uses; the
frontend of `torch.compile` is not used, since a chunk is a graph already.
"""

from __future__ import annotations

import difflib
import operator
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.fx as fx
from torch import nn

from pipepart.errors import ConfigError
from pipepart.planning.compile_mode import CompileSettings
from pipepart.runtime.compiled.numbered_draws import CannotCompile, decompositions, numbered_draws
from pipepart.runtime.compiled.weight_split import HalvedBackward, halve
from pipepart.values import shortened

__all__ = ["check_settings", "compiled_function"]


def check_settings(settings: CompileSettings) -> None:
    """Refuse settings that inductor does not have."""
    if not settings.config:
        return
    from torch._inductor import config

    known = config.get_config_copy()
    for name in settings.config:
        if name not in known:
            near = difflib.get_close_matches(name[:80], list(known), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ". torch._inductor.config lists all of them."
            raise ConfigError(f"compile: options has {shortened(name)}, which is no setting of inductor{hint}")


def compiled_function(
    body: Callable[..., tuple[torch.Tensor, ...]],
    tensors: Sequence[torch.Tensor],
    results: int,
    settings: CompileSettings,
    halves: Callable[[], Sequence[torch.Tensor]] | None = None,
) -> Callable[..., Sequence[torch.Tensor]]:
    """Return a function with the results and gradients of `body`, for tensors of these forms.

    With `halves`, backward is compiled in two halves. It returns the first tensors of the current step: those whose gradients
    the second half computes.
    """
    from torch._functorch import config as of_autograd
    from torch._inductor import config as of_inductor
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    inner = _as_it_is if settings.backend == "aot_eager" else compile_fx_inner

    def compile_one(graph: fx.GraphModule, examples: Sequence[Any], **options: Any) -> Any:
        _check_draws(graph)
        options.pop(
            "get_decomp_fn", None
        )  # the table above has done its part, and would keep code from being found on disk
        if options.get("is_backward") and halves is not None:
            return _halved(graph, halves, inner, options)
        return inner(graph, examples, **options)

    threads = max(1, (os.cpu_count() or 1) // _processes_here())
    with ExitStack() as stack:
        stack.enter_context(of_inductor.patch({"fallback_random": True, "compile_threads": threads, **settings.config}))
        # Two halves read the values that are saved for backward, so neither may use their memory for others.
        stack.enter_context(of_autograd.patch(donated_buffer=False, enable_autograd_cache=False))
        stack.enter_context(numbered_draws())
        # Code is found on disk only if sizes could be symbols. Here all of them are numbers.
        mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
        stack.enter_context(torch._guards.tracing(torch._guards.TracingContext(mode)))
        made: Any = compile_fx(
            _module_of(body, len(tensors), results),
            [mode.from_tensor(tensor, static_shapes=True) for tensor in tensors],
            inner_compile=compile_one,
            decompositions=decompositions(),
        )
    return made


def _processes_here() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1") or 1)


def _module_of(body: Callable[..., Any], takes: int, results: int) -> fx.GraphModule:
    graph = fx.Graph()
    inputs = tuple(graph.placeholder(f"value_{i}") for i in range(takes))
    made = graph.call_function(body, inputs)
    graph.output(tuple(graph.call_function(operator.getitem, (made, i)) for i in range(results)))
    return fx.GraphModule(nn.Module(), graph)


def _check_draws(graph: fx.GraphModule) -> None:
    """Refuse a graph with an op that would draw other numbers than without a compiler."""
    for node in graph.graph.nodes:
        tags = getattr(node.target, "tags", ())
        if torch.Tag.nondeterministic_seeded not in tags or node.target is torch.ops.pipepart.draw.default:
            continue
        if _dropout_of(node) != 0.0:
            raise CannotCompile(f"the op {node.target} draws random numbers")


def _dropout_of(node: fx.Node) -> Any:
    """Return the dropout rate of a fused attention; None for other ops."""
    for position, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if argument.name == "dropout_p":
            given = node.args[position] if position < len(node.args) else argument.default_value
            return node.kwargs.get("dropout_p", given)
    return None


def _as_it_is(graph: fx.GraphModule, examples: Sequence[Any], **options: Any) -> Callable[[list[Any]], Any]:
    def run(arguments: list[Any]) -> Any:
        given = list(arguments)
        arguments.clear()
        return graph(*given)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _halved(
    graph: fx.GraphModule, tensors: Callable[[], Sequence[torch.Tensor]], inner: Callable[..., Any], options: Any
) -> Any:
    count = len(tensors())
    results = next(iter(graph.graph.find_nodes(op="output"))).args[0]
    halves = halve(graph, range(min(count, len(results))))
    options = {**options, "static_input_idxs": ()}
    made = [inner(half, _examples(half), **options) for half in (halves.first, halves.weights)]
    return HalvedBackward(halves, made[0], made[1], lambda: [tensors()[i] for i in halves.at_weights])


def _examples(graph: fx.GraphModule) -> list[Any]:
    return [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
