"""Division of a backward graph into the gradient of the input (`I`) and the gradients of the weights (`W`).

AOTAutograd gives the backward of a chunk as one graph of plain ops. An op belongs to `I` if the gradient of an import needs
it. All other ops belong to `W`. If a chunk has no import with a gradient, an op that the gradients of several layers need
belongs to `I`: the chain through the layers is done there, as it is without a compiler, and activations are free early.

```
saved, gradients of exports ->  I  -> gradients of imports
                                |
                       values that both need
                                v
                                W  -> gradients of weights
```
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from pipepart.runtime.deferred import later_or_now

__all__ = ["HalvedBackward", "Halves", "halve"]


@dataclass(frozen=True)
class Halves:
    """The two graphs. Each takes some inputs of the whole backward, and `weights` takes values that `first` returns, too."""

    first: fx.GraphModule
    weights: fx.GraphModule
    first_takes: tuple[int, ...]
    """Inputs of the whole backward that `I` takes."""
    weights_takes: tuple[int, ...]
    """Inputs of the whole backward that `W` takes; values of `I` follow them."""
    at_first: tuple[int, ...]
    """Outputs of the whole backward that `I` returns; values for `W` follow them."""
    at_weights: tuple[int, ...]
    """Outputs of the whole backward that `W` returns."""
    count: int
    """The number of outputs of the whole backward."""


def halve(backward: fx.GraphModule, of_weights: Collection[int]) -> Halves:
    """Divide a backward graph. `of_weights` are its outputs that are gradients of weights."""
    graph = backward.graph
    results = list(next(iter(graph.find_nodes(op="output"))).args[0])
    inputs = list(graph.find_nodes(op="placeholder"))
    weights = [i for i in of_weights if isinstance(results[i], fx.Node)]
    others = [i for i in range(len(results)) if i not in of_weights and isinstance(results[i], fx.Node)]
    first = _ancestors([results[i] for i in others])
    if not others:
        first = _shared([results[i] for i in weights])
    late = [node for node in graph.nodes if node.op not in ("placeholder", "output") and node not in first]
    # A view costs nothing, and what it looks at is often needed by both anyway.
    needed = dict.fromkeys([s for n in late for s in n.all_input_nodes] + [results[i] for i in weights])
    views = _views_to_repeat([node for node in needed if node in first], first)
    inside = {*late, *views}
    late = [node for node in graph.nodes if node in inside]
    needed = dict.fromkeys([s for n in late for s in n.all_input_nodes] + [results[i] for i in weights])
    carried = [node for node in graph.nodes if node in needed and node not in inside and node not in inputs]
    early = [node for node in graph.nodes if node in first and node.op != "placeholder"]
    first_takes = [i for i, node in enumerate(inputs) if any(node in n.all_input_nodes for n in early) or node in first]
    weights_takes = [i for i, node in enumerate(inputs) if node in needed]
    return Halves(
        _part(backward, [inputs[i] for i in first_takes], early, [*(results[i] for i in others), *carried]),
        _part(backward, [*(inputs[i] for i in weights_takes), *carried], late, [results[i] for i in weights]),
        tuple(first_takes),
        tuple(weights_takes),
        tuple(others),
        tuple(weights),
        len(results),
    )


def _ancestors(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting.extend(node.all_input_nodes)
    return found


def _shared(weights: Sequence[fx.Node]) -> set[fx.Node]:
    """Return the ops that several of these gradients need, with all that they need themselves."""
    counts = Counter(node for one in weights for node in _ancestors([one]))
    return _ancestors([node for node, count in counts.items() if count > 1 and node.op != "placeholder"])


_VIEWS = frozenset({"view", "_unsafe_view", "permute", "t", "transpose", "expand", "unsqueeze", "squeeze", "reshape"})


def _views_to_repeat(needed: Sequence[fx.Node], first: set[fx.Node]) -> set[fx.Node]:
    """Return views in `I` that `W` makes again instead of taking them."""
    found: set[fx.Node] = set()
    for node in needed:
        while node.op == "call_function" and _is_view(node) and len(node.all_input_nodes) == 1 and node not in found:
            found.add(node)
            node = node.all_input_nodes[0]
    return found


def _is_view(node: fx.Node) -> bool:
    packet = getattr(node.target, "overloadpacket", None)
    return getattr(packet, "__name__", "") in _VIEWS


def _part(whole: fx.GraphModule, inputs: Sequence[fx.Node], ops: Sequence[fx.Node], results: Sequence[Any]) -> Any:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in ops:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    output = graph.output(tuple(copies[node] for node in results))
    output.meta["user_visible_output_idxs"] = list(range(len(results)))  # with exactly the strides that follow
    return fx.GraphModule(whole, graph)


class HalvedBackward:
    """The compiled backward of a chunk in two halves, called by autograd as one.

    While a queue of `deferring` is open, it returns no gradients of weights, and the second half goes into the queue.
    """

    def __init__(
        self,
        halves: Halves,
        first: Callable[..., Any],
        weights: Callable[..., Any],
        parameters: Callable[[], Sequence[torch.Tensor]],
    ) -> None:
        """`parameters` returns the tensors of the current step to which the outputs of `weights` belong."""
        self._halves, self._first, self._weights, self._parameters = halves, first, weights, parameters
        self._boxed_call = True  # takes one list, which it empties: read by torch

    def __call__(self, arguments: list[Any]) -> tuple[Any, ...]:
        halves = self._halves
        results: list[Any] = [None] * halves.count
        kept = [arguments[i] for i in halves.weights_takes]
        taken = [arguments[i] for i in halves.first_takes]
        arguments.clear()
        made = self._first(taken) if len(halves.first.graph.nodes) > 1 else ()
        for index, value in zip(halves.at_first, made):
            results[index] = value
        kept += made[len(halves.at_first) :]
        if not halves.at_weights:
            return tuple(results)

        def work() -> tuple[torch.Tensor | None, ...]:
            shared = {value.untyped_storage().data_ptr() for value in kept if isinstance(value, torch.Tensor)}
            own = []
            for gradient, parameter in zip(self._weights(list(kept)), parameters):
                place = gradient.untyped_storage().data_ptr()
                if place in shared or gradient.stride() != parameter.stride():
                    gradient = torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)
                shared.add(place)
                own.append(gradient)
            return tuple(own)

        parameters = tuple(self._parameters())
        for index, value in zip(halves.at_weights, later_or_now(work, parameters)):
            results[index] = value
        return tuple(results)
