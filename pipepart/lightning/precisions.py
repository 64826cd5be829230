"""Precision plugins: those of Lightning that work, classes that users derive from them, and refusals of all others."""

from __future__ import annotations

from typing import Any

from pipepart.errors import ConfigError

__all__ = ["check_precision"]

_PRECISIONS = ("Precision", "MixedPrecision", "HalfPrecision", "DoublePrecision")
"""Precision plugins of Lightning that work, and from which users may derive their own."""
_OTHER_PRECISIONS = {
    "TransformerEnginePrecision": "it replaces layers by those of Transformer Engine, whose scales for float8 are no "
    "parameters and are shared by all ranks, also by those of other stages",
    "BitsandbytesPrecision": "it replaces weights by quantised ones when they reach a GPU, and stages would record the layers "
    "before and run those after",
}
_PRECISION_HOOKS = {
    "backward": "the backward runs inside the schedule",
    "pre_backward": "the backward has run inside the schedule by then",
    "clip_grad_by_norm": "gradients are clipped by their norm over all stages",
    "train_step_context": "steps run in parts, inside forward_context()",
    "val_step_context": "steps run in parts, inside forward_context()",
    "test_step_context": "steps run in parts, inside forward_context()",
    "predict_step_context": "steps run in parts, inside forward_context()",
}
"""Methods of a precision plugin that a pipeline does not call, or not where Lightning does, with the reason."""


def check_precision(plugin: Any) -> None:
    """Refuse precision plugins of other strategies, and classes of the user that change what a pipeline does itself."""
    homes = ("lightning.", "pytorch_lightning.")
    place = next(i for i, kind in enumerate(type(plugin).__mro__) if kind.__module__.startswith(homes))
    own, base = type(plugin).__mro__[:place], type(plugin).__mro__[place]
    use = "Use '32-true', 'bf16-mixed', '16-mixed', 'bf16-true', '16-true' or '64-true'."
    if base.__name__ not in _PRECISIONS:
        reason = _OTHER_PRECISIONS.get(base.__name__, "it belongs to another strategy")
        raise ConfigError(
            f"the precision plugin {type(plugin).__name__} is not supported in a pipeline: {reason}. {use}"
        )
    for hook, reason in _PRECISION_HOOKS.items():
        if any(hook in vars(kind) for kind in own):
            raise ConfigError(
                f"the precision plugin {type(plugin).__name__} overrides {hook}(), but {reason}. Override forward_context(), "
                f"convert_module(), convert_input() or optimizer_step() instead. {use}"
            )
