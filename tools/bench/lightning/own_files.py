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

LAYERED: tuple[str, ...] = ()

REASONS: dict[str, str] = {}
