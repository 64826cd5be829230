"""Tests that `make test` leaves out, so that it stays below its limit of 15 minutes. `make test-long` runs them.

Each repeats, with another model, shape, launcher or phase, what a test of `make test` shows already.
"""

from __future__ import annotations

import pytest

__all__ = ["LONG", "mark_long"]

LONG = {
    "tests/docs/test_site.py::test_the_site_is_built_without_a_warning",
    *(
        f"tests/docs/test_pages.py::test_the_programs_of_a_page[{name}.md]"
        for name in (
            *(
                "start",
                "moving/ddp",
                "moving/deepspeed",
                "moving/fsdp",
                "moving/torch_pipelining",
                "tutorials/failures",
            ),
            *("tutorials/large_model", "tutorials/machines", "tutorials/plans", "tutorials/pytorch"),
        )
    ),
    *(
        f"tests/docs/test_pages.py::test_the_programs_of_a_guide[howto/{name}.md]"
        for name in ("checkpoints", "evaluation", "losses", "microbatches", "transports")
    ),
    "tests/cli/test_cli_launching.py::test_a_task_does_not_wait_for_one_that_could_not_start",
    "tests/cli/test_cli_restarts.py::test_a_killed_rank[0]",
    "tests/faults/test_another_user.py::test_a_job_goes_on_under_attack[script]",
    "tests/faults/test_job_ends.py::test_all_processes_end_with_the_cause[script raises]",
    "tests/hosts/test_slurm.py::test_the_launcher_submits_a_run_on_two_nodes",
    "tests/lightning/test_realistic.py::test_equal_to_one_device[2-2]",
    "tests/lightning/test_remote_checkpoints.py::test_kill_during_a_save[shards]",
    "tests/lightning/test_remote_checkpoints.py::test_ranks_save_to_a_store_and_another_shape_goes_on_from_it[plain]",
    "tests/report/test_report_browser.py::test_large_graph_keeps_the_page_small",
    "tests/runtime/compiled/test_compiled_chunks.py::test_equal_to_chunks_as_they_are[plain]",
    "tests/cli/test_cli_launching.py::test_submitit_runs_every_job_on_its_own_tasks",
    "tests/cli/test_cli_lost_replica.py::test_the_others_go_on_and_the_lost_one_joins[2x2]",
    "tests/faults/test_job_ends.py::test_all_processes_end_with_the_cause[torchrun killed]",
    "tests/transparency/test_shapes.py::test_every_schedule_on_every_shape[1-1-gpt]",
    "tests/transparency/test_shapes.py::test_every_schedule_on_every_shape[1-2-gpt]",
    "tests/transparency/test_shapes.py::test_every_schedule_on_every_shape[3-1-gpt]",
    "tests/transparency/test_shapes.py::test_every_schedule_on_every_shape[2-2-resnet]",
    "tests/transparency/test_shapes.py::test_every_schedule_on_every_shape[4-1-frozen]",
    "tests/cli/test_cli_launching.py::test_srun_starts_ranks_that_find_each_other",
    "tests/cli/test_cli_launching.py::test_the_command_on_two_machines",
    "tests/cli/test_cli_selftest.py::test_an_interrupted_run_leaves_no_process",
    "tests/faults/test_job_ends.py::test_all_processes_end_with_the_cause[script killed]",
    "tests/hosts/test_slurm.py::test_a_script_is_requeued_and_goes_on_where_it_was",
    "tests/recipes/test_recipes_train.py::test_two_replicas_of_two_stages[finetune_hf]",
    "tests/runtime/compiled/test_compiled_chunks.py::test_equal_to_chunks_as_they_are[recompute]",
    "tests/cli/test_cli_launching.py::test_torchrun_on_two_machines",
    "tests/cli/test_cli_lost_replica.py::test_the_others_go_on_and_the_lost_one_joins[2x1]",
    "tests/cli/test_cli_lost_replica.py::test_the_others_go_on_and_the_lost_one_joins[first-raises]",
    "tests/cli/test_cli_secrets.py::test_a_sharded_run_is_resumed",
    "tests/faults/test_job_ends.py::test_all_processes_end_with_the_cause[torchrun raises]",
    "tests/faults/test_parent_killed.py::test_ranks_end_with_their_parent[script, ranks start]",
    "tests/hosts/test_equal_on_hosts.py::test_three_hosts_equal_one_process",
    "tests/hosts/test_host_faults.py::test_a_dead_host_ends_the_job_on_the_other_one[with rank 0]",
    "tests/hosts/test_host_faults.py::test_a_dead_host_ends_the_job_on_the_other_one[without rank 0]",
    "tests/hosts/test_host_faults.py::test_a_host_without_power_is_missed_by_two_others",
    "tests/hosts/test_launching_on_hosts.py::test_a_sharded_checkpoint_needs_a_disk_that_hosts_share[False]",
    "tests/hosts/test_launching_on_hosts.py::test_a_sharded_checkpoint_needs_a_disk_that_hosts_share[True]",
    "tests/hosts/test_launching_on_hosts.py::test_the_address_may_be_a_name",
    "tests/hosts/test_launching_on_hosts.py::test_torchrun_trains_a_recipe",
    "tests/hosts/test_slurm.py::test_a_job_that_reaches_its_time_limit_ends_on_all_nodes",
    "tests/lightning/test_capture_step.py::test_a_step_of_the_other_namespace_is_captured_as_a_step",
    "tests/lightning/test_launching.py::test_two_nodes_under_slurm",
    "tests/lightning/test_realistic.py::test_equal_to_one_device[2-4]",
    "tests/recipes/test_recipes_train.py::test_two_replicas_of_two_stages[llama_hf]",
    "tests/recording/test_capture_contract.py::"
    "test_another_process_the_same_hash_on_the_meta_device_and_ten_billion_parameters_without_memory",
    "tests/schedule/test_schedule_formulas.py::test_every_formula_up_to_64_microbatches[p8]",
    "tests/standin/test_standin_lightning.py::test_a_fit_is_equal_to_a_plain_loop[gpt-3-options2]",
    "tests/standin/test_standin_lightning.py::test_mixed_precision[bf16-mixed-False-None-1]",
    "tests/transparency/test_real_code.py::test_experts_of_transformers[grouped_mm-dtype1]",
    "tests/cli/test_cli_selftest.py::test_an_accelerator_passes",
    "tests/cli/test_cli_verify.py::test_a_recipe_on_two_processes",
    "tests/faults/test_another_user.py::test_a_job_goes_on_under_attack[torchrun]",
    "tests/faults/test_one_port.py::test_both_jobs_train",
    "tests/faults/test_parent_killed.py::test_ranks_end_with_their_parent[script, ranks import]",
    "tests/faults/test_parent_killed.py::test_ranks_end_with_their_parent[script, ranks set up]",
    "tests/faults/test_parent_killed.py::test_ranks_end_with_their_parent[train, ranks start]",
    "tests/lightning/test_fabric.py::test_programs_equal_one_device[1-1]",
    "tests/lightning/test_fabric.py::test_programs_equal_one_device[1-2]",
    "tests/lightning/test_manual.py::test_equal_to_one_device[1-2-names1]",
    "tests/lightning/test_manual.py::test_equal_to_one_device[3-1-names2]",
    "tests/lightning/test_realistic.py::test_equal_to_one_device[3-3]",
    "tests/machine/test_products.py::test_torch_imported_first_is_early_enough",
    "tests/recipes/test_finetune.py::test_equal_to_a_plain_loop_and_saved_for_others[gpt2 with adapters]",
    "tests/runtime/test_posts_end.py::test_the_posts_of_every_schedule_end[8]",
    "tests/standin/test_standin_lightning.py::test_a_checkpoint_resumes_at_another_shape[meta-built]",
    "tests/standin/test_standin_lightning.py::test_mixed_precision[16-mixed-False-None-1]",
    "tests/standin/test_standin_lightning.py::test_mixed_precision[16-mixed-True-None-1]",
    "tests/standin/test_standin_pipeline.py::test_models_of_a_library[llama]",
    "tests/faults/test_every_place.py::test_all_ranks_end_and_name_the_cause[kill in gradients of sharded]",
    "tests/faults/test_every_place.py::test_all_ranks_end_and_name_the_cause[raise in parameters of master]",
    "tests/lightning/test_loss_scaling.py::test_one_decision_for_stages_and_replicas[True-master]",
    "tests/lightning/test_loss_scaling.py::test_one_decision_for_stages_and_replicas[False-fsdp]",
    "tests/lightning/test_sync_fit.py::test_each_rank_writes_the_states_that_it_has",
    "tests/lightning/test_sync_fit.py::test_hooks_see_all_gradients_and_accumulated_batches_count",
    "tests/lightning/test_sync_fit.py::test_replicas_that_keep_shares_write_and_read_all_checkpoints",
    *(
        f"tests/runtime/compiled/test_compiled_chunks.py::test_equal_to_chunks_as_they_are[{name}]"
        for name in ("tied", "frozen", "checkpoint")
    ),
    *(
        f"tests/runtime/compiled/test_compiled_chunks.py::test_schedules_of_two_stages[{name}]"
        for name in ("1f1b", "interleaved", "zb_h1", "zb_h2")
    ),
    "tests/runtime/compiled/test_compiled_code.py::test_compiled_once_and_kept_on_disk[zb_h1]",
    "tests/runtime/test_sync_modes.py::test_equal_to_one_process[adagrad]",
    "tests/runtime/test_sync_modes.py::test_equal_to_one_process[master]",
    "tests/runtime/test_sync_modes.py::test_equal_to_one_process[nested]",
    "tests/runtime/test_sync_modes.py::test_equal_to_one_process[fsdp]",
    "tests/runtime/test_sync_fsdp.py::test_several_chunks_of_a_stage_and_a_batch_of_one_sample[step-zb_v]",
    "tests/runtime/test_sync_modes.py::test_whole_gradients_and_compressed_ones",
    *(
        f"tests/export/test_export_formats.py::test_onnx_equals_torch_and_int8_is_small[{recipe}]"
        for recipe in ("llama_hf", "vit", "resnet", "unet", "seq2seq")
    ),
    *(
        f"tests/recipes/test_recipes_train.py::test_two_replicas_of_two_stages[{recipe}]"
        for recipe in ("moe", "resnet", "rnn", "seq2seq", "unet")
    ),
    *(
        f"tests/schedule/test_schedule_formulas.py::test_every_formula_up_to_64_microbatches[p{stages}]"
        for stages in (5, 6, 7, 9, 10, 11, 12, 13, 14, 15)
    ),
    *(
        f"tests/schedule/test_schedule_published.py::{test}[{model} m={count}]"
        for test in ("test_bubble_rates_are_those_of_the_paper", "test_throughput_between_schedules_is_as_measured")
        for model, counts in {
            "1.5B": (64,),
            "6.2B": (64,),
            "14.6B": (48, 64, 128),
            "28.3B": (96, 128, 256),
        }.items()
        for count in counts
    ),
    "tests/planning/test_export.py::test_torch_runs_it[interleaved]",
    "tests/transparency/test_activation_memory.py::test_peaks_are_those_that_were_planned",
    *(
        f"tests/transparency/test_shapes.py::test_every_schedule_on_every_shape[{shape}-{model}]"
        for shape, models in {
            "3-1": ("unet", "resnet", "mixed", "frozen"),
            "4-1": ("gpt", "unet", "resnet", "mixed"),
            "2-2": ("unet", "mixed", "frozen"),
        }.items()
        for model in models
    ),
}


def mark_long(items: list[pytest.Item]) -> None:
    """Give the mark `long` to the tests of the list. `tests/test_side_by_side.py` finds names that no longer exist."""
    for item in items:
        if item.nodeid in LONG:
            item.add_marker(pytest.mark.long)
