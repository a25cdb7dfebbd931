"""What a launch by SLURM asks for: what `slurm=` may be, and what it says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

_HOW: Final = "{'partition': 'gpu', 'time': '02:00:00', 'gpus_per_node': 4}"
RESERVED: Final[Mapping[str, str]] = {
    "nodes": "num_nodes= says it",
    "N": "num_nodes= says it",
    "ntasks": "num_processes= says it, on all nodes together",
    "n": "num_processes= says it, on all nodes together",
    "ntasks_per_node": "num_processes= says it, on all nodes together",
    "tasks_per_node": "num_processes= says it, on all nodes together",
    "gpus": "gpus_per_node= says it for each node",
    "G": "gpus_per_node= says it for each node",
    "gpus_per_task": "gpus_per_node= says it for each node",
    "gpus_per_socket": "gpus_per_node= says it for each node",
    "ntasks_per_gpu": "num_processes= says it, on all nodes together",
    "clusters": "the job runs on the cluster that this machine belongs to",
    "M": "the job runs on the cluster that this machine belongs to",
    "requeue": "max_restarts= says it",
    "no_requeue": "max_restarts= says it",
    "array": "a launch is one job",
    "output": "the cell shows what ranks write, and log_dir= keeps it",
    "error": "the cell shows what ranks write, and log_dir= keeps it",
    "signal": "slurm_notice= says when the function is warned",
    "wrap": "the function is what runs",
    "wait": "block= says it",
    "export": "environment= says it",
    "open_mode": "the job writes no file",
    "parsable": "the launch reads what sbatch writes",
    "quiet": "the launch reads what sbatch writes",
    "test_only": "a launch that is wrong submits nothing",
    **dict.fromkeys(("help", "usage", "version"), "sbatch submits nothing then"),
}
"""Options of `sbatch` that the launch decides, each with what says it instead."""


def parse_pairs(pairs: Sequence[str]) -> dict[str, Any]:
    """Return the options of texts such as `partition=gpu` and `exclusive`.

    Args:
        pairs: the texts; one without a value switches an option on.
    """
    parts = (text.partition("=") for text in pairs)
    return {name: value if equals else True for name, equals, value in parts}


def read_pairs(value: Any) -> Any:
    """Return the texts of a mapping, as a file may have it; other values as they are."""
    if not isinstance(value, Mapping):
        return value
    return [
        str(name) if text is True else f"{name}={text}" for name, text in value.items() if text is not False
    ]


def normalize(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with the names of Python: `gpus_per_node` for `gpus-per-node`; what is False or None is left out.

    Args:
        options: options of `sbatch`, without their dashes.
    """
    return {
        name.replace("-", "_"): value
        for name, value in options.items()
        if value is not None and value is not False
    }


def check_slurm(name: str, value: Any) -> Iterator[Exception]:
    """Check options of a job: a dict of texts, numbers and switches by name."""
    if value is None or value == ():
        return
    if not isinstance(value, Mapping):
        yield TypeError(f"{name}={value!r}: a dict of sbatch's options is needed, as in {_HOW}")
        return
    for key, text in value.items():
        if not isinstance(key, str) or not key.replace("-", "_").isidentifier() or key.startswith("-"):
            yield ValueError(f"{name} has {key!r}: names are those of sbatch's options, as in {_HOW}")
        elif key.replace("-", "_") in RESERVED:
            yield ValueError(f"{name} has {key!r}: {RESERVED[key.replace('-', '_')]}")
        elif text is not None and not isinstance(text, (str, int, float)):
            yield TypeError(
                f"{name} has {text!r} for {key!r}: a text, a number, or True for a switch is needed"
            )
        elif isinstance(text, str) and not (text.strip() and text.isprintable()):
            yield ValueError(f"{name} has {text!r} for {key!r}: a text in one line is needed")
