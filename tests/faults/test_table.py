"""Where each fault is tested, in this folder and elsewhere: look here before you add one."""

from __future__ import annotations

import ast

import pytest

from tests.structure.source import ROOT

TESTED: dict[str, tuple[str, ...]] = {
    "a kill while a checkpoint is written: at random, and before each system call": (
        "unit/checkpointing/test_write_crash.py::test_a_process_killed_at_any_instant_leaves_a_whole_checkpoint",
        "unit/checkpointing/test_write_crash.py::test_a_process_may_die_before_any_change_to_a_folder",
        "unit/checkpointing/test_write_crash.py::test_a_process_that_saves_a_model_may_die_before_any_change_to_a_folder",
        "faults/test_kills.py::test_ranks_while_they_save",
    ),
    "a kill of the kernel: in each form of a launch, while ranks hang, in any phase": (
        "notebooks/test_endings.py::test_an_end_of_the_kernel",
        "notebooks/test_stopping.py::test_workers_die_with_the_kernel",
        "faults/test_kills.py::test_kernels_in_any_phase",
        "faults/test_kernel_state.py::test_what_a_failing_worker_started_ends_without_the_notebook",
    ),
    "an interrupt: in each form of a launch, while ranks hang, at random": (
        "notebooks/test_endings.py::test_an_interrupt",
        "notebooks/test_stopping.py::test_interrupt_ends_every_worker",
        "faults/test_interrupted_lines.py::test_a_session_is_never_left_busy",
        "faults/test_interrupted_lines.py::test_a_session_that_is_interrupted_at_its_start_leaves_no_worker",
        "faults/test_interrupted_lines.py::test_a_session_that_is_interrupted_as_it_starts_anew_is_closed_and_says_so",
        "faults/test_interrupted_lines.py::test_a_run_that_is_interrupted_is_over",
        "faults/test_interrupted_lines.py::test_the_end_of_a_run_is_whole_also_where_patience_is_lost",
        "faults/test_interrupts.py::test_launches",
        "faults/test_interrupts.py::test_a_callback_that_never_ends_can_be_interrupted",
        "faults/test_interrupts.py::test_sessions",
        "faults/test_kernel_state.py::test_an_interrupt_ends_the_wait_for_an_agent",
    ),
    "several kernels": ("faults/test_kills.py::test_one_of_two_kernels",),
    "a full disk: under checkpoints, logs, an executed notebook, a config, temporary files": (
        "unit/checkpointing/test_write_crash.py::test_a_full_small_disk",
        "notebooks/test_background.py::test_a_full_disk_does_not_end_the_run",
        "faults/test_disks.py::test_logs_on_a_full_disk",
        "faults/test_disks.py::test_a_notebook_on_a_full_disk_keeps_what_was_written",
        "faults/test_disks.py::test_a_config_on_a_full_disk",
        "faults/test_disks.py::test_no_room_for_temporary_files",
    ),
    "a limit on the size of files": (
        "unit/checkpointing/test_write_crash.py::test_a_full_disk",
        "faults/test_disks.py::test_files_may_not_grow",
    ),
    "a slow disk, and a pipe that nobody reads": (
        "unit/checkpointing/test_rawio.py::test_a_slow_disk_keeps_the_writer_back",
        "faults/test_disks.py::test_training_goes_on_while_a_slow_disk_takes_a_checkpoint",
        "faults/test_disks.py::test_an_interrupt_while_a_slow_disk_takes_a_checkpoint",
        "faults/test_disks.py::test_a_log_that_is_a_pipe_which_nobody_reads",
    ),
    "a limit on memory, and a rank that is killed for it": (
        "faults/test_limits.py::test_a_rank_that_the_system_kills_for_its_memory",
        "faults/test_limits.py::test_a_script_that_the_system_kills_for_its_memory",
        "faults/test_limits.py::test_somebody_else_kills_a_rank",
    ),
    "a killed or stopped agent, and what killed processes leave": (
        "faults/test_kernel_state.py::test_sockets_of_killed_workers_go_with_the_notebook",
        "faults/test_kernel_state.py::test_a_stopped_agent_is_told",
        "faults/test_kills.py::test_an_agent_that_was_killed_is_replaced",
        "unit/launch/agent/test_client.py::test_an_agent_that_is_killed_while_it_imports",
        "unit/launch/agent/test_client.py::test_all_end_with_a_process_that_is_killed",
        "unit/launch/agent/test_server.py::test_a_killed_template_costs_one_launch",
        "unit/launch/agent/test_server.py::test_a_module_that_ends_the_process_is_passed_over",
    ),
    "what ranks have started does not obey, and shared memory that they forget": (
        "faults/test_leftovers.py::test_by_a_function",
        "faults/test_leftovers.py::test_by_a_script",
        "faults/test_leftovers.py::test_by_a_session",
        "faults/test_leftovers.py::test_what_goes_on_starting_processes",
        "faults/test_leftovers.py::test_what_has_a_session_of_its_own",
        "faults/test_leftovers.py::test_a_daemon_that_does_not_obey",
        "unit/launch/test_leftovers.py::test_a_number_that_is_anothers_by_now",
        "faults/test_leftovers.py::test_sockets_of_killed_loader_workers",
    ),
    "all of these at random": ("faults/test_soak.py::test_some_steps",),
    "a stranger on a port, also one who knows the protocol": (
        "faults/test_strangers.py::test_a_run_goes_on_whatever_a_stranger_says",
        "faults/test_strangers.py::test_who_passes_a_challenge_on_to_a_node_can_say_nothing_of_his_own",
        "unit/launch/engines/nodes/test_nodes_strangers.py::test_another_secret_and_a_recorded_proof_are_refused",
        "faults/test_strangers.py::test_a_rank_that_claims_anothers_place_gets_it_once",
    ),
    "any bytes in messages, output, files and variables": (
        "faults/test_fuzzed_messages.py::test_messages_of_nodes",
        "faults/test_fuzzed_messages.py::test_frames_of_workers",
        "faults/test_fuzzed_output.py::test_any_bytes_are_lines",
        "faults/test_fuzzed_output.py::test_words_of_ranks_are_text_on_the_page",
        "faults/test_fuzzed_files.py::test_weights",
        "faults/test_fuzzed_files.py::test_a_config",
        "faults/test_fuzzed_words.py::test_variables_of_ranks",
        "faults/test_fuzzed_words.py::test_a_page_may_send_any_text",
    ),
    "no further process, no further descriptor, more descriptors than select takes": (
        "faults/test_limits.py::test_no_further_process_can_start",
        "faults/test_limits.py::test_no_further_thread_can_start",
        "faults/test_limits.py::test_too_few_descriptors",
        "unit/launch/agent/test_client.py::test_one_that_cannot_start_leaves_nothing",
        "unit/launch/agent/test_server.py::test_a_worker_that_cannot_start",
        "faults/test_kernel_state.py::test_forked_workers_hold_no_descriptor_of_other_runs",
        "faults/test_kernel_state.py::test_more_descriptors_than_select_takes",
        "faults/test_kernel_state.py::test_a_kept_error_of_a_start_keeps_nothing_else",
    ),
    "a leak that grows with each launch": (
        "notebooks/test_background.py::test_two_hundred_runs_leave_nothing",
    ),
    "more ranks than cores": ("faults/test_limits.py::test_many_ranks_on_few_cores",),
    "a small /dev/shm": ("faults/test_limits.py::test_no_shared_memory",),
    "standard streams that are closed": (
        "notebooks/test_hard_cases.py::test_closed_standard_streams",
        "faults/test_output.py::test_a_notebook_without_standard_streams",
    ),
    "output that is no text, and lines of megabytes": (
        "faults/test_output.py::test_garbage",
        "faults/test_output.py::test_garbage_of_a_script",
    ),
    "exceptions that cannot be pickled, printed or compared, that are huge, or lead to themselves": (
        "notebooks/test_failures.py::test_errors_that_cannot_be_made_again_still_speak",
        "notebooks/test_hard_cases.py::test_errors_with_odd_attributes",
        "faults/test_exceptions.py::test_of_a_session",
        "faults/test_exceptions.py::test_of_a_launch",
    ),
    "configs, parameters and notebooks that are made to harm": (
        "unit/config/test_config.py::test_broken_files",
        "faults/test_hostile_files.py::test_configs_in_yaml",
        "faults/test_hostile_files.py::test_configs_in_json",
        "faults/test_hostile_files.py::test_values_of_parameters",
        "faults/test_hostile_files.py::test_notebooks",
    ),
    "a clock that jumps, and files of the future": (
        "faults/test_clock.py::test_launches",
        "faults/test_clock.py::test_the_cause_of_a_failure",
        "faults/test_kills.py::test_the_cause_while_the_kernel_stood_still",
        "faults/test_clock.py::test_the_seconds_of_a_failure",
        "faults/test_clock.py::test_hangs_are_noticed_neither_early_nor_never",
        "faults/test_clock.py::test_files_of_the_future",
    ),
    "exit codes that others take, children that never end": (
        "faults/test_kernel_state.py::test_sigchld_is_ignored",
        "faults/test_kernel_state.py::test_scripts_have_exit_codes_where_sigchld_is_ignored",
        "faults/test_kernel_state.py::test_other_code_waits_for_the_workers",
        "faults/test_kernel_state.py::test_a_child_that_writes_for_ever_ends_with_its_worker",
        "faults/test_kernel_state.py::test_a_worker_that_does_not_end_is_left_behind",
    ),
}


@pytest.mark.parametrize("fault", TESTED)
def test_the_tests_are_there(fault: str) -> None:
    for place in TESTED[fault]:
        path, _, name = place.partition("::")
        tree = ast.parse((ROOT / "tests" / path).read_text(encoding="utf-8"))
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, place


def test_no_file_of_this_folder_is_left_out() -> None:
    named = {place.partition("::")[0] for places in TESTED.values() for place in places}
    here = {f"faults/{path.name}" for path in (ROOT / "tests" / "faults").glob("test_*.py")}
    assert here - named == {"faults/test_table.py"}
