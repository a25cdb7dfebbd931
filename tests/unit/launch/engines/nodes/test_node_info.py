"""What nodes compare of each other."""

from __future__ import annotations

from typing import Any

import pytest

from notebook_accel.launch.engines.nodes.node_info import hash_code

IMPORTS = "import os\nimport torch.distributed as dist\n"
CODE = """def train(x):
    if x and os.environ["RANK"] != "0":
        print("go", flush=True)
    for number in range(3):
        dist.barrier()
        (lambda: dist.all_reduce(number, op=dist.ReduceOp.SUM))()
    return {0.5, x}
"""


def make(*statements: str) -> Any:
    """Return the function that statements define, compiled one by one."""
    made: dict[str, Any] = {}
    for statement in statements:
        exec(compile(statement, "a file", "exec"), made)
    return made["train"]


def test_a_function_is_the_same_in_a_script_and_in_a_notebook() -> None:
    """There each statement is compiled by itself, and Python does not see that a name is a module."""
    script, notebook = make(IMPORTS + CODE), make(IMPORTS, "\n\n" + CODE)
    assert hash_code(script) == hash_code(notebook)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (" and ", " or "),
        ("range(3)", "range(4)"),
        ("dist.barrier()", "dist.monitored_barrier()"),
        ("SUM", "MAX"),
        ("0.5", "0.25"),
        ("        dist.barrier()\n", ""),
    ],
)
def test_another_function_is_another_one(old: str, new: str) -> None:
    assert hash_code(make(CODE)) != hash_code(make(CODE.replace(old, new)))
