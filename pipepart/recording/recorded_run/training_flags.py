"""Arguments of torch functions that follow the mode of their module: the graph reads the flag when it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipepart.recording.recorded_run import intrinsics, ops

if TYPE_CHECKING:
    from pipepart.recording.recorded_run.recorder import Recorder

__all__ = ["follow_training"]


def follow_training(recorder: Recorder, func: Any, name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return the arguments of a call; those that follow the mode of the module read its ``training`` flag."""
    path, module = recorder.builder.stack[-1]
    read = recorder.builder.read_attribute
    flag = f"{path}.training" if path else "training"
    position = ops.training_position(func)
    if position is not None:
        given = kwargs.get("training", args[position] if len(args) > position else None)
        without = name == "batch_norm" and kwargs.get("running_mean", args[1] if len(args) > 1 else None) is None
        if given is None or without:  # without running statistics, the flag does not depend on the mode
            return args, kwargs
        if isinstance(given, bool) and given == module.training:
            if "training" in kwargs:
                kwargs = {**kwargs, "training": read(flag)}
            else:
                args = (*args[:position], read(flag), *args[position + 1 :])
    elif name == "scaled_dot_product_attention" and module.training:
        rate = kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0)
        if isinstance(rate, float) and rate > 0:
            node = recorder.numbers.number_node(intrinsics.dropout_rate, (rate, read(flag)), rate)
            if "dropout_p" in kwargs:
                kwargs = {**kwargs, "dropout_p": node}
            else:
                args = (*args[:4], node, *args[5:])
    return args, kwargs
