"""Recording of a module or a function: runs at several sizes, until one graph is right for all of them."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.fx as fx
import torch.nn as nn

from pipepart.errors import CaptureError
from pipepart.machine import check_products, products
from pipepart.recording.fallbacks import Failure, Retry, fall_back, found_caches
from pipepart.recording.generalise import variants
from pipepart.recording.generalise.simplify import put_back, simplify
from pipepart.recording.generalise.study import Study
from pipepart.recording.inputs import trees
from pipepart.recording.inputs.batching import Batching, first_in_result
from pipepart.recording.inputs.leaves import describe_leaf, named, short_path
from pipepart.recording.model_state import state
from pipepart.recording.model_state.places import Place, is_number, number_of
from pipepart.recording.model_state.side_effects import Effects
from pipepart.recording.parameter_updates import changed_parameters
from pipepart.recording.proof.prove import prove_call
from pipepart.recording.recorded import ANY, GuardError, Input, Recording
from pipepart.recording.recorded_run.facts import annotate
from pipepart.recording.recorded_run.python_state import is_watched
from pipepart.recording.recorded_run.runs import Call, Run, RunFailed, Settings, eager, run_once

__all__ = ["Call", "call_of", "record", "record_call"]


def record(
    target: nn.Module | Callable[..., Any],
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    root: nn.Module | None = None,
    like: Recording | None = None,
    numbers: Sequence[Place] = (),
    batching: Batching | None = None,
    others: Sequence[tuple[tuple[Any, ...], Mapping[str, Any]]] = (),
) -> Recording:
    """Record a module, a bound method of a module, or a function that uses the modules of `root`.

    The target is run on the example in the current mode (train or eval); buffers, gradients and random state stay as
    they are. `like` is a recording of the same call in the other mode: sizes that are fixed there are fixed here too.
    `numbers` are places of the Python state whose numbers are inputs of the graph. `batching` names the leaves that
    hold the samples; `others` are further examples, for batches whose rows cannot be left out.
    """
    return record_call(call_of(target, args, kwargs, root, batching, others), like, numbers)


def call_of(
    target: nn.Module | Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    root: nn.Module | None,
    batching: Batching | None = None,
    others: Sequence[tuple[tuple[Any, ...], Mapping[str, Any]]] = (),
) -> Call:
    """Return the call of a module, a bound method of one, or a function with `root`, as a function of flat leaves."""
    if isinstance(target, nn.Module):
        root = root or target
    elif root is None:
        root = getattr(target, "__self__", None)
        if not isinstance(root, nn.Module):
            raise CaptureError(f"record({target!r}): give root=, the module whose parameters the function uses")
    leaves, tree = trees.flatten((tuple(args), dict(kwargs or {})))
    paths = [short_path(target, path) for path in trees.leaf_paths(tree)]
    leaves = leaves if batching is None else batching.first(leaves)
    inputs = tuple(describe_leaf(leaf, path, numbers=False) for leaf, path in zip(leaves, paths))
    moved: list[int] = []

    def run(values: list[Any]) -> tuple[Any, list[Any]]:
        given, named = trees.unflatten(values if batching is None else batching.back(values), tree, True)
        return first_in_result(target(*given, **named), values, batching, moved), []

    flat = [trees.flatten((tuple(a), dict(k))) for a, k in others]
    further = tuple(tuple(its) for its, shape in flat if shape == tree)
    entry = target.forward if isinstance(target, nn.Module) else target
    return Call(root, run, tuple(leaves), inputs, tree, None, (entry,), batching, further, moved)


def record_call(
    call: Call, like: Recording | None = None, numbers: Sequence[Place] = (), converting: bool = False
) -> Recording:
    """Record a call, with the fallbacks of `fallbacks` until a run succeeds or none is left.

    `numbers` are places of the Python state whose numbers are inputs of the graph, after the leaves of the call. With
    `converting`, the results of ``float``, ``int`` and functions of `math` are followed from the first run on.
    """
    state.refuse_wrapped(call.root)
    call = _with_state(call, numbers)
    call = dataclasses.replace(call, inputs=named(call.inputs))
    _check_products(call)
    with ExitStack() as stack:
        stack.enter_context(state.no_collection())
        stack.enter_context(state.not_compiled())
        target = state.device_of(call.leaves)
        abstract = state.is_abstract(call.root, target)
        mode = stack.enter_context(state.stand_ins(call.root, target)) if abstract else None
        names = state.names_of(call.root)
        leaves = [_fake(leaf, mode, target) for leaf in call.leaves]
        settings, before = Settings(converting=converting), state.Snapshot(names.listed)
        settings.initial = before.plain_attributes()
        around = Effects(names.listed, lambda module, path: False)
        while True:
            try:
                recording = _record(call, leaves, names, settings, mode, like)
                around.restore(settings.whole if settings.settled else None)
                return recording
            except Retry:
                gc.collect(0)  # objects that the frames of the failed run have kept alive
            except Exception:
                if settings.settled:
                    before.restore_setup()
                around.restore()
                raise


def _with_state(call: Call, numbers: Sequence[Place]) -> Call:
    places = [place for place in numbers if is_number(place.read())]
    if not places:
        return call
    count = len(call.leaves)
    values = tuple(number_of(place.read()) for place in places)
    inputs = tuple(
        Input(f"state{i}", place.text, "number", value=type(value), place=place)
        for i, (place, value) in enumerate(zip(places, values))
    )
    return dataclasses.replace(
        call,
        run=lambda given: call.run(given[:count]),
        leaves=(*call.leaves, *values),
        inputs=(*call.inputs, *inputs),
    )


def _check_products(call: Call) -> None:
    """Refuse 16-bit products on the CPU where they would end the process, before the first one is computed."""
    if products() is None:
        return
    tensors = (*call.root.parameters(), *call.root.buffers(), *call.leaves)
    dtypes = {leaf.dtype for leaf in tensors if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu"}
    if torch.is_autocast_enabled("cpu"):
        dtypes.add(torch.get_autocast_dtype("cpu"))
    check_products(str(dtype).removeprefix("torch.") for dtype in dtypes)


def _fake(leaf: Any, mode: Any, target: torch.device) -> Any:
    if mode is None or not isinstance(leaf, torch.Tensor):
        return leaf
    with mode:
        device = target if leaf.is_meta else leaf.device
        made = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=device)
        return made.requires_grad_() if leaf.requires_grad else made


def _record(
    call: Call, leaves: list[Any], names: state.Names, settings: Settings, mode: Any, like: Recording | None
) -> Recording:
    pieces = call.batching is not None and call.batching.in_pieces
    dims = [] if pieces else variants.dimensions(leaves, None if call.batching is None else call.batching.places)
    batch = dims[0] if dims else None
    base_leaves = leaves
    if batch is not None and batch.size == 1:  # size 1 broadcasts: nothing can be learned from it
        base_leaves, batch = (leaves, None) if settings.single else _two_samples(call, leaves, batch, mode)
    as_it_is = base_leaves is leaves and not settings.compiling
    base = _attempt(call, base_leaves, names, settings, mode, as_it_is and mode is None and call.has_backward)
    study = Study(call, base_leaves, base, names, settings, mode, like.sizes if like is not None else {})
    if pieces:
        target = state.device_of(call.leaves)
        others = [(*other, *leaves[len(other) :]) for other in call.others]
        study.examples([[_fake(leaf, mode, target) for leaf in other] for other in others])
    if batch is not None:
        study.vary(batch)
    failed = [dim for dim in dims[1:] if not study.vary(dim)]
    ignored = study.ignored_strings()
    for dim in variants.together(failed):
        study.vary(dim)
    nodes = list(base.recorder.graph.nodes)
    simplify([run.recorder for run in study.runs])
    for (index, position), explanation in study.explained.items():
        put_back(base.recorder, nodes[index], position, explanation)
    inputs = tuple(
        _with_dynamic(dataclasses.replace(spec, value=ANY) if i in ignored else spec, i, study.proved)
        for i, spec in enumerate(call.inputs)
    )
    equal = tuple(dim.places for dim in study.proved if len(dim.places) > 1)
    try:
        recording = _recording(call, base, inputs, equal, settings, study)
        _refuse_changes(call, recording)
        notes = prove_call(recording, call, leaves, names, settings, mode, base.outcome if as_it_is else None)
        return dataclasses.replace(recording, notes=(*recording.notes, *notes)) if notes else recording
    except GuardError as error:  # results with two samples do not hold for the one that was given
        if base_leaves is leaves or settings.single:
            raise
        settings.single = str(error).splitlines()[0]
        raise Retry from None


def _refuse_changes(call: Call, recording: Recording) -> None:
    """Refuse a call that changes parameters, unless the caller takes these ops out of the recording."""
    changed = [] if is_watched(call.root) else changed_parameters(recording)
    if changed:
        names = ", ".join(changed[:3]) + (f" and {len(changed) - 3} more" if len(changed) > 3 else "")
        raise CaptureError(
            f"{call.what} changes parameters in place ({names}), which would happen once for each micro-batch\n"
            "  do: update them between steps; steps of a LightningModule may update them by other parameters"
        )


def _two_samples(
    call: Call, leaves: list[Any], batch: variants.Dimension, mode: Any
) -> tuple[list[Any], variants.Dimension | None]:
    """Return an example of one sample as one of two, if the model can be run on it."""
    try:
        resized = variants.resize(leaves, batch, 2)
        with torch.no_grad():
            eager(call, resized, mode)
    except Exception:
        return leaves, None
    return resized, variants.Dimension(2, batch.places, True)


def _attempt(call: Call, leaves: list[Any], names: state.Names, settings: Settings, mode: Any, backward: bool) -> Run:
    """Record once; if that fails, ask for a new attempt with other settings, or raise an error with the reason."""
    try:
        run = run_once(call, leaves, names, settings, mode, backward)
    except RunFailed as failed:
        fall_back(Failure(call, leaves, mode, failed.error, failed.modules), settings)
    found_caches(run, settings)
    return run


def _with_dynamic(spec: Input, index: int, proved: Sequence[variants.Dimension]) -> Input:
    if spec.shape is None:
        return spec
    free = {place for dim in proved for place in dim.places}
    dynamic = tuple((index, dim) in free for dim in range(len(spec.shape)))
    return dataclasses.replace(spec, dynamic=dynamic)


def _recording(
    call: Call,
    base: Run,
    inputs: tuple[Input, ...],
    equal: tuple[tuple[tuple[int, int], ...], ...],
    settings: Settings,
    study: Study,
) -> Recording:
    recorder = base.recorder
    graph = recorder.graph
    output: fx.Node = next(reversed(graph.nodes))
    results: Any = output.args[0]
    flat = list(results)
    extras = []
    index = base.output_count
    for extra in base.extras:
        if not extra.is_module:
            computed = isinstance(flat[index], fx.Node)
            extra = dataclasses.replace(
                extra, value=None if computed else flat[index], output=index if computed else None
            )
            index += 1
        extras.append(extra)
    recording = Recording(
        graph=graph,
        root=call.root,
        inputs=inputs,
        loss_index=base.loss_index,
        extras=tuple(extras),
        training=call.root.training,
        constants=dict(recorder.constants),
        input_tree=call.tree,
        output_tree=base.output_tree,
        step=call.step,
        equal_sizes=equal,
        leaves=tuple(sorted(settings.whole)),
        notes=(
            *(item for item in settings.history if item.startswith("kept")),
            *recorder.notes,
            *_notes(len(recorder.builder.checkpoints), study, settings),
        ),
        sizes=study.sizes,
        guards=recorder.guards_of_state,
        checkpoints=tuple(recorder.builder.checkpoints),
        batching=call.batching,
        moved=tuple(call.moved),
        updates=dict(recorder.updates),
        device=state.device_of(call.leaves),
    )
    annotate(graph, recorder.facts)
    return recording


def _notes(regions: int, study: Study, settings: Settings) -> list[str]:
    notes = study.notes()
    if regions:
        notes.insert(
            0, f"activation checkpointing inside the model is kept: {regions} regions are run again in backward"
        )
    if settings.single:
        notes.append(
            "batch size: fixed; the recording holds for one sample only, since the model computes other ops for more "
            f"({settings.single})"
        )
    return notes
