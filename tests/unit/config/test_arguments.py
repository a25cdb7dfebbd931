"""Names of arguments, of options in files and of flags."""

from __future__ import annotations

from notebook_accel.config import arguments


def test_a_message_about_arguments_names_them_as_files_and_flags_do() -> None:
    text = "num_processes=3 with num_nodes=2: use_port=1 is taken; my_num_nodes, num_nodes_here"
    assert arguments.name_as_in_files(text) == (
        "num_processes=3 with num_machines=2: main_process_port=1 is taken; my_num_nodes, num_nodes_here"
    )
