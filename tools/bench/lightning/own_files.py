"""The files of Lightning's own tests in which a Trainer runs, and why some of their tests cannot pass with another strategy."""

from __future__ import annotations

__all__ = ["DDP", "FILES", "LAYERED", "REASONS"]

FILES = (
    "callbacks/progress/test_tqdm_progress_bar.py",
    "callbacks/test_callback_hook_outputs.py",
    "callbacks/test_callbacks.py",
    "callbacks/test_early_stopping.py",
    "callbacks/test_finetuning_callback.py",
    "callbacks/test_gradient_accumulation_scheduler.py",
    "callbacks/test_lambda_function.py",
    "callbacks/test_lr_monitor.py",
    "callbacks/test_model_summary.py",
    "callbacks/test_prediction_writer.py",
    "callbacks/test_timer.py",
    "checkpointing/test_checkpoint_callback_frequency.py",
    "checkpointing/test_model_checkpoint.py",
    "checkpointing/test_trainer_checkpoint.py",
    "core/test_datamodules.py",
    "core/test_lightning_module.py",
    "core/test_lightning_optimizer.py",
    "core/test_metric_result_integration.py",
    "loops/optimization/test_automatic_loop.py",
    "loops/test_evaluation_loop.py",
    "loops/test_evaluation_loop_flow.py",
    "loops/test_loops.py",
    "loops/test_prediction_loop.py",
    "loops/test_training_epoch_loop.py",
    "loops/test_training_loop.py",
    "loops/test_training_loop_flow_dict.py",
    "loops/test_training_loop_flow_scalar.py",
    "models/test_cpu.py",
    "models/test_hooks.py",
    "models/test_hparams.py",
    "models/test_restore.py",
    "plugins/test_checkpoint_io_plugin.py",
    "plugins/test_async_checkpoint.py",
    "trainer/connectors/test_callback_connector.py",
    "trainer/connectors/test_checkpoint_connector.py",
    "trainer/connectors/test_data_connector.py",
    "trainer/connectors/test_signal_connector.py",
    "trainer/dynamic_args/test_multiple_eval_dataloaders.py",
    "trainer/flags/test_check_val_every_n_epoch.py",
    "trainer/flags/test_fast_dev_run.py",
    "trainer/flags/test_inference_mode.py",
    "trainer/flags/test_limit_batches.py",
    "trainer/flags/test_min_max_epochs.py",
    "trainer/flags/test_overfit_batches.py",
    "trainer/flags/test_val_check_interval.py",
    "trainer/logging_/test_eval_loop_logging.py",
    "trainer/logging_/test_logger_connector.py",
    "trainer/logging_/test_loop_logging.py",
    "trainer/logging_/test_train_loop_logging.py",
    "trainer/optimization/test_backward_calls.py",
    "trainer/optimization/test_manual_optimization.py",
    "trainer/optimization/test_multiple_optimizers.py",
    "trainer/optimization/test_optimizers.py",
    "trainer/properties/test_estimated_stepping_batches.py",
    "trainer/test_config_validator.py",
    "trainer/test_dataloaders.py",
    "trainer/test_states.py",
    "trainer/test_trainer.py",
    "tuner/test_lr_finder.py",
    "tuner/test_scale_batch_size.py",
    "tuner/test_tuning.py",
)
"""Below tests/tests_pytorch."""

DDP = (
    "overrides/test_distributed.py",
    "strategies/test_ddp.py",
    "strategies/test_ddp_integration.py",
    "strategies/test_ddp_integration_comm_hook.py",
    "trainer/logging_/test_distributed_logging.py",
    "trainer/test_ddp_sigterm_handling.py",
)

LAYERED = (
    "callbacks/test_callback_hook_outputs.py::test_train_step_no_return",
    "callbacks/test_callbacks.py::test_resume_callback_state_saved_by_type_stateful",
    "callbacks/test_gradient_accumulation_scheduler.py::test_trainer_accumulate_grad_batches_with_callback",
    "callbacks/test_gradient_accumulation_scheduler.py::test_trainer_accumulate_grad_batches_zero_grad",
    "callbacks/test_lambda_function.py::test_lambda_call",
    "callbacks/test_timer.py::test_timer_duration_min_steps_override",
    "callbacks/test_timer.py::test_timer_stops_training",
    "callbacks/test_timer.py::test_timer_track_stages",
    "callbacks/test_timer.py::test_timer_zero_duration_stop",
    "checkpointing/test_trainer_checkpoint.py::test_finetuning_with_ckpt_path",
    "loops/test_evaluation_loop.py::test_log_epoch_metrics_before_on_evaluation_end",
    "loops/test_evaluation_loop.py::test_evaluation_loop_when_batch_idx_argument_is_not_given",
    "loops/test_training_loop.py::test_fit_loop_done_log_messages",
    "loops/test_training_loop.py::test_on_train_batch_start_return_minus_one",
    "loops/test_training_loop.py::test_should_stop_mid_epoch",
    "trainer/connectors/test_checkpoint_connector.py::test_restore_callbacks_in_non_fit_phases",
    "trainer/connectors/test_checkpoint_connector.py::test_strict_loading",
    "trainer/flags/test_check_val_every_n_epoch.py::test_check_val_every_n_epoch",
    "trainer/flags/test_check_val_every_n_epoch.py::test_check_val_every_n_epoch_with_max_steps",
    "trainer/flags/test_min_max_epochs.py::test_min_max_steps_epochs",
    "trainer/flags/test_val_check_interval.py::test_val_check_interval",
    "trainer/logging_/test_eval_loop_logging.py::test__validation_step__log",
    "trainer/logging_/test_eval_loop_logging.py::test__validation_step__epoch_end__log",
    "trainer/logging_/test_eval_loop_logging.py::test_eval_epoch_logging",
    "trainer/logging_/test_eval_loop_logging.py::test_multi_dataloaders_add_suffix_properly",
    "trainer/logging_/test_eval_loop_logging.py::test_log_works_in_val_callback",
    "trainer/logging_/test_train_loop_logging.py::test__training_step__log",
    "trainer/logging_/test_train_loop_logging.py::test__training_step__epoch_end__log",
    "trainer/logging_/test_train_loop_logging.py::test_log_works_in_train_callback",
    "trainer/logging_/test_train_loop_logging.py::test_sanity_metrics_are_reset",
    "trainer/test_states.py::test_trainer_fn_while_running",
)
"""Tests that also run with 2 stages, with all their parameters."""

_BACKWARD = (
    "it puts a mock into the base class of strategies that calls the strategy's own `backward`, which calls that of its base "
    "class: it calls itself. A `backward` that does not call the base class is not counted"
)
_CLASS = "it asks for the class of a part of Lightning, of which ours takes the place"
_MOCKS = "it replaces parts of Lightning or of torch by mocks"
_PATH = "a mock asks for the path that is written to; checkpoints are written under another name and renamed"
_TIME = (
    "the run ends after 0.1 s, and planning with its first batch is a part of it; with 2 stages, it looks for a line that the "
    "first rank prints"
)
_WORLD_SIZE = "it sets strategy.world_size, which strategies of several processes compute"
REASONS = {
    "callbacks/test_timer.py::test_timer_stops_training": _TIME,
    "checkpointing/test_trainer_checkpoint.py::test_trainer_save_checkpoint_storage_options": _PATH,
    "loops/optimization/test_automatic_loop.py::test_skip_training_step_not_allowed": _WORLD_SIZE,
    "plugins/test_checkpoint_io_plugin.py::test_multi_wrapped_checkpoint_io_initialization": _CLASS,
    "trainer/connectors/test_checkpoint_connector.py::test_strict_loading": "with 2 stages: a mock takes the place of "
    "load_state_dict, which loads the part of each stage",
    "trainer/logging_/test_logger_connector.py::test_fx_validator_integration": "it expects the error of self.log in a "
    "predict_step at the call, which is noted while the step is recorded",
    "trainer/optimization/test_backward_calls.py::test_backward_count_simple": _MOCKS,
    "trainer/optimization/test_backward_calls.py::test_backward_count_with_closure": _MOCKS,
    "trainer/optimization/test_backward_calls.py::test_backward_count_with_grad_accumulation": _MOCKS,
    "trainer/optimization/test_manual_optimization.py::test_multiple_optimizers_manual_call_counts": _BACKWARD,
    "trainer/optimization/test_manual_optimization.py::test_multiple_optimizers_manual_log": _BACKWARD,
    "trainer/optimization/test_manual_optimization.py::test_step_with_optimizer_closure": _BACKWARD,
    "trainer/optimization/test_manual_optimization.py::test_step_with_optimizer_closure_2": _BACKWARD,
    "trainer/test_trainer.py::test_trainer_config_strategy": _CLASS,
}
"""Why a test does not pass, by its name without parameters."""
