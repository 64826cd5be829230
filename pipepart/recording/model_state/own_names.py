"""Names of attributes that belong to torch and Lightning: all others are the user's, private ones too."""

from __future__ import annotations

import torch.nn as nn

__all__ = ["OWN_NAMES"]

OWN_NAMES = frozenset(set(vars(nn.Module())) - {"training"}) | {
    "_trainer", "_fabric", "_device", "_dtype", "_current_fx_name", "_param_requires_grad_state", "_metric_attributes",
    "_compiler_ctx", "_example_input_array", "_automatic_optimization", "_fabric_optimizers", "_jit_is_scripting",
    "_should_prevent_trainer_and_dataloaders_deepcopy", "_hparams_initial", "_hparams_name", "_log_hyperparams",
    "_strict_loading", "_pipepart_cut", "_use_distributed", "_compiled_call_impl", "prepare_data_per_node",
    "allow_zero_length_dataloader_with_multiple_devices", "_device_mesh", "trainer", "log", "log_dict",
    "manual_backward", "optimizers", "lr_schedulers", "toggle_optimizer", "untoggle_optimizer", "forward",
}  # fmt: skip
"""Attributes that torch and Lightning keep for themselves, and what stands in their place while a step is recorded."""
