"""The op at fault when the outcome of a recording differs from that of the model.

Two observed runs, of the model and of the recording, keep the value of each op and its gradient edge in autograd's graph.
Values are compared from the inputs on, and gradients from the loss back. The op at fault has right inputs and a wrong
result or, for gradients, a right gradient of its result and a wrong gradient of an input or a parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.fx as fx

from pipepart.recording.execution.ops_run import resolve
from pipepart.recording.op import where_is
from pipepart.recording.proof.differences import Difference, differ
from pipepart.recording.proof.outcome import compact
from pipepart.recording.recorded_run.tensors import gradient_edge, storage_of

if TYPE_CHECKING:
    from pipepart.recording.recorded import Recording
    from pipepart.recording.recorded_run.recorder import Recorder

__all__ = ["SeenValues", "blame"]


class SeenValues:
    """The values of a run, op by op, and after `backward` their gradients."""

    def __init__(self) -> None:
        self.values: dict[str, torch.Tensor] = {}
        self.edges: dict[str, Any] = {}
        self.gradients: dict[str, torch.Tensor | None] = {}

    def see(self, name: str, tensor: torch.Tensor) -> None:
        """Keep the value of an op at the time it is computed: later ops may change it."""
        with torch._C.DisableTorchFunction():
            self.values[name] = compact(tensor.detach()).clone()
            edge = gradient_edge(tensor) if tensor.requires_grad and not tensor.is_inference() else None
            if edge is not None:
                self.edges[name] = edge
            else:
                self.edges.pop(name, None)

    def backward(self, roots: Sequence[torch.Tensor], cotangents: Sequence[torch.Tensor]) -> None:
        """Compute the gradients of all values; autograd's graph is kept for `through`."""
        if not roots or not self.edges:
            return
        found = torch.autograd.grad(
            list(roots), list(self.edges.values()), list(cotangents), allow_unused=True, retain_graph=True
        )
        self.gradients = {name: None if g is None else g.detach() for name, g in zip(self.edges, found)}

    def through(self, outputs: dict[str, torch.Tensor], target: Any) -> torch.Tensor | None:
        """Return the gradient of `target` (a value by name, or a tensor) that follows from these gradients of values."""
        known = {name: g for name, g in outputs.items() if name in self.edges}
        edge = self.edges.get(target) if isinstance(target, str) else target
        if not known or edge is None:
            return None
        found = torch.autograd.grad(
            [self.edges[name] for name in known], [edge], list(known.values()), allow_unused=True, retain_graph=True
        )
        return None if found[0] is None else found[0].detach()


class _Case:
    """The observed runs of the model and of the recording, side by side."""

    def __init__(self, model: SeenValues, recorded: SeenValues, recorder: Recorder, recording: Recording):
        self.model, self.recorded, self.root = model, recorded, recording.root
        self.facts = recorder.facts
        self.nodes = {node.name: node for node in recorder.graph.nodes}
        self.position = {name: i for i, name in enumerate(self.nodes)}
        self.kept = {node.name: node for node in recording.graph.nodes}

    def op(self, name: str) -> str:
        """Return an op in words: its name and its place."""
        node = self.kept.get(name)
        if node is not None and node.op not in ("get_attr", "output"):
            return f"op {name} ({where_is(node)})"
        if name in self.nodes:
            missing = "" if name in self.kept else ", which is missing in the recording"
            fact = self.facts[self.nodes[name]]
            return f"op {name} (module {fact.module!r} at {fact.source}){missing}"
        return f"op {name}"

    # ---------------------------------------------------------------- values

    def first_value(self) -> str | None:
        for exact in (False, True):
            for name, value in self.model.values.items():
                if name in self.recorded.values and differ(self.recorded.values[name], value, exact=exact):
                    return self._missing_before(name) or name
        return None

    def _missing_before(self, name: str) -> str | None:
        """Return an op that the model runs directly before this one, and the recording does not."""
        for source in self.nodes[name].all_input_nodes:
            if source.name not in self.kept and self.facts[source].number is None and source.op.startswith("call"):
                return source.name
        return None

    def writer_of(self, buffer: str) -> str | None:
        """Return the first op that writes to a buffer, preferably one that is missing in the recording."""
        memory = storage_of(resolve(self.root, buffer))
        writing = [name for name, node in self.nodes.items() if memory in self.facts[node].mutates]
        users = self.users_of_tensor(buffer)
        writing += [name for name in users if self.nodes[name].op == "call_module"]
        lost = [name for name in writing if name not in self.kept]
        return next(iter([*lost, *writing, *users]), None)

    # ---------------------------------------------------------------- gradients

    def first_mode(self) -> tuple[str, bool] | None:
        """Return the first op that runs with gradients in one run only, and whether that is the run of the model."""
        for name in self.model.values:
            if name in self.recorded.values and (name in self.model.edges) != (name in self.recorded.edges):
                return self._missing_before(name) or name, name in self.model.edges
        return None

    def first_gradient(self, wrong: Iterable[str]) -> tuple[str, str] | None:
        """Return the op whose backward is at fault, and the input or parameter whose gradient is wrong."""
        things: list[tuple[int, str, list[str], Any]] = []
        for name in self.nodes:
            a, b = self.recorded.gradients.get(name), self.model.gradients.get(name)
            if self.nodes[name].op == "get_attr":
                continue
            if (name in self.recorded.edges or name in self.model.edges) and differ(a, b):
                users = [user.name for user in self.nodes[name].users]
                things.append((self._last(users, name), name, users, name))
        for name in wrong:
            if name.startswith("input "):
                continue
            users = self.users_of_tensor(name)
            things.append((self._last(users, ""), f"parameter {name!r}", users, resolve(self.root, name)))
        if not things:
            return None
        _, thing, users, target = max(things, key=lambda item: item[0])
        return self._culprit(thing, users, target), thing

    def _last(self, users: list[str], name: str) -> int:
        return max((self.position[user] for user in users), default=self.position.get(name, -1))

    def _culprit(self, thing: str, users: list[str], target: Any) -> str:
        users = sorted((user for user in users if self.nodes[user].op != "output"), key=self.position.__getitem__)
        silent = []
        for user in users:
            parts = [user, *(part.name for part in self.nodes[user].users if _is_part(part))]
            flow = {name: g for name in parts if (g := self.model.gradients.get(name)) is not None}
            if not flow:
                silent.append(user)
                continue
            if not any(name in self.kept for name in parts):
                return user
            try:
                a, b = self.recorded.through(flow, target), self.model.through(flow, target)
            except RuntimeError:
                continue
            if differ(a, b):
                hooks = [n.name for n in self.nodes[user].users if n.target == "register_hook"]
                return next(iter(hooks), user)  # gradients are seen before the hooks of a tensor change them
        lost = [user for user in users if user not in self.kept]
        choice = next(iter([*lost, *silent]), None)
        return choice or (thing if thing in self.nodes else users[-1] if users else thing)

    def users_of_tensor(self, name: str) -> list[str]:
        """Return the ops that use a parameter or buffer under any of its names, in program order."""
        tensor = resolve(self.root, name)
        found = []
        for node in self.nodes.values():
            if node.op == "call_module":
                module = self.root.get_submodule(str(node.target))
                if any(tensor is own for own in [*module.parameters(), *module.buffers()]):
                    found.append(node.name)
            elif any(source.op == "get_attr" and self._reads(source, tensor) for source in node.all_input_nodes):
                found.append(node.name)
        return found

    def _reads(self, node: fx.Node, tensor: torch.Tensor) -> bool:
        try:
            return resolve(self.root, str(node.target)) is tensor
        except AttributeError:  # a constant of the recording
            return False


def _is_part(node: fx.Node) -> bool:
    return node.op == "call_function" and getattr(node.target, "__name__", "") in ("getitem", "getattr")


def blame(
    model: SeenValues, recorded: SeenValues, recorder: Recorder, recording: Recording, found: Sequence[Difference]
) -> str:
    """Return one sentence on the op at fault; empty if no op is found. `recorder` made the observed run of the model."""
    case = _Case(model, recorded, recorder, recording)
    if any(item.kind == "output" for item in found):
        name = case.first_value()
        return f"values differ from {case.op(name)} on: its inputs are right, its result is wrong" if name else ""
    buffers = [item.name for item in found if item.kind == "buffer"]
    if buffers:
        name = case.first_value() or case.writer_of(buffers[0])
        return f"buffer {buffers[0]!r} is written by {case.op(name)}" if name else ""
    mode = case.first_mode()
    if mode is not None:
        where = ("model", "recording") if mode[1] else ("recording", "model")
        needs = "requires a gradient in the {} and not in the {}".format(*where)
        return f"gradients differ at {case.op(mode[0])}: from here on the result {needs}"
    culprit = case.first_gradient(item.name for item in found)
    if culprit is None:
        return ""
    op, thing = culprit
    if op == thing:
        return f"gradients differ at {case.op(op)}: the gradients of all its users are right, its own is wrong"
    if case.nodes[op].target == "register_hook":
        return f"gradients differ at {case.op(op)}: its hook changes the gradient in another way than in the model"
    of = thing if thing.startswith("parameter") else f"its input {thing}"
    return f"gradients differ at {case.op(op)}: the gradient of its result is right, the gradient of {of} is wrong"
