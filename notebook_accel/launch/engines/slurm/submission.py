"""Submits a job by `sbatch`. The job holds nodes until it is let go, or starts its ranks itself."""

from __future__ import annotations

import contextlib
import secrets
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from .... import interrupts
from ....config.slurm import RESERVED
from ....errors import LaunchError
from ..detached.folder import LOG
from ..remote.client import NO_PACKAGE, find_source_folder, list_pythons
from . import command

_PATIENCE_SECONDS: Final = 180  # for the first agent, once the job runs
_GRACE_SECONDS: Final = 8  # without any agent after that
_SUBMIT_SECONDS: Final = 300.0  # a busy controller takes its time
_HOLD: Final = r"""command -v flock >/dev/null || exit
umask 077; trap '' USR1 USR2; trap 'rm -f {lock}' EXIT
for _ in $(seq {patience}); do flock -n {lock} true || break; sleep 1; done
until flock {lock} true && sleep {grace} && flock -n {lock} true; do :; done"""
"""Lasts as long as an agent holds the lock, so that the job ends where the notebook is gone."""
_NO_NODES: Final = "Requested node configuration is not available"
_RESTING: Final = "down,drain,fail,maint,reserved,no_respond,unknown"
_SILENCE: Final = ("Socket timed out", "Unable to contact slurm controller", "does not answer within")
_DRIVER: Final = "notebook_accel.launch.engines.slurm.driver"
_NOWHERE: Final = "/dev/null"
_VARIABLES: Final = {"array": "SBATCH_ARRAY_INX", "mem": "SBATCH_MEM_PER_NODE", "time": "SBATCH_TIMELIMIT"}
"""Of options of sbatch whose variables have other names than theirs."""


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What is asked of SLURM.

    Attributes:
        num_nodes: number of nodes.
        ranks_per_node: number of ranks of each, a task of SLURM for each of them.
        options: options of `sbatch` by their names with underscores.
        python: the Python on the nodes; None tries that of this process, then others.
        is_requeued: whether SLURM queues the job again where a node fails, or another job takes its nodes.
        name: of the job.
    """

    num_nodes: int
    ranks_per_node: int
    options: Mapping[str, Any]
    python: str | None
    is_requeued: bool
    name: str

    @property
    def key(self) -> tuple[Any, ...]:
        """What launches that can use the same job have alike."""
        options = tuple(sorted((name, str(value)) for name, value in self.options.items()))
        return ("slurm", self.num_nodes, self.ranks_per_node, options, self.python, self.is_requeued)


def check(wish: Wish) -> list[str]:
    """Return what SLURM says against a wish, a sentence each; nothing is submitted.

    Where nodes are down or drained, `sbatch --test-only` refuses what needs them, and `sbatch` itself queues it.

    Args:
        wish: what will be asked.
    """
    script = _make_script(wish, make_hold("test"))
    try:
        command.ask(["sbatch", "--test-only"], lambda: None, script, without=_list_unwanted(wish))
    except (LaunchError, OSError) as error:
        if _NO_NODES in str(error) and _has_resting_nodes(wish):
            return []
        if any(words in str(error) for words in _SILENCE):
            return [f"engine='slurm': SLURM does not answer: {error}"]
        return [f"slurm={dict(wish.options)!r} with num_nodes={wish.num_nodes}: SLURM refuses it: {error}"]
    return []


def _has_resting_nodes(wish: Wish) -> bool:
    """Return whether nodes of the partition serve no jobs now, or do not answer, and may later."""
    partition = wish.options.get("partition")
    words = ["sinfo", "--noheader", f"--states={_RESTING}", "--format=%n"]
    try:
        return bool(
            command.ask(words + ([f"--partition={partition}"] if partition else []), lambda: None).strip()
        )
    except LaunchError:
        return False


def submit(wish: Wish) -> tuple[str, str]:
    """Submit a job.

    Args:
        wish: what is asked.

    Returns:
        The number of the job, and the path of the file that agents lock.

    Raises:
        LaunchError: SLURM refuses it.
    """
    lock = f"/tmp/notebook_accel-{secrets.token_hex(8)}"
    return _submit(wish, make_hold(lock)), lock


def submit_run(wish: Wish, folder: Path) -> str:
    """Submit a job that starts its ranks itself; return its number.

    Args:
        wish: what is asked.
        folder: of the run.

    Raises:
        LaunchError: SLURM refuses it.
    """
    log = str(folder / LOG).replace("%", "%%")  # with which sbatch begins what it fills in
    return _submit(wish, _make_run_command(wish, folder), log)


def _submit(wish: Wish, line: str, log: str = _NOWHERE) -> str:
    """Submit a job that runs a line of a shell, and return its number.

    An interrupt waits for that: whoever breaks `sbatch` off does not know whether there is a job.
    """
    script, unwanted = _make_script(wish, line, log), _list_unwanted(wish)
    with interrupts.delay_interrupt():
        try:
            said = command.ask(["sbatch", "--parsable"], lambda: None, script, _SUBMIT_SECONDS, unwanted)
        except (LaunchError, OSError) as error:
            raise LaunchError(f"sbatch has failed: {error}") from None
    job_id = said.strip().rpartition("\n")[2].partition(";")[0]  # the cluster's name may follow
    if not job_id.isdecimal():
        raise LaunchError(f"sbatch has said no number of a job: {said.strip()!r}")
    return job_id


def _list_unwanted(wish: Wish) -> set[str]:
    """Return the variables that would take the place of what the script says: of what a launch decides, and `slurm=`.

    man 1 sbatch, "INPUT ENVIRONMENT VARIABLES": they count more than the script.
    """
    names = {*RESERVED, *wish.options} - {"export"}
    return {_VARIABLES.get(name, f"SBATCH_{name.upper()}") for name in names}


def _make_script(wish: Wish, line: str, log: str = _NOWHERE) -> str:
    """Return the script of a job that runs a line of a shell.

    Args:
        wish: what is asked.
        line: runs on the first node.
        log: what the line writes is appended to this file.
    """
    options = {
        "job_name": f"notebook_accel-{wish.name}",
        **wish.options,
        "nodes": wish.num_nodes,
        "ntasks_per_node": wish.ranks_per_node,
        "output": log,
        "error": log,
        "open_mode": "append",
        "requeue" if wish.is_requeued else "no_requeue": True,
    }
    return "\n".join(["#!/bin/bash", *(_make_directive(*option) for option in options.items()), line, ""])


def _make_directive(name: str, value: object) -> str:
    """Return the line of a script for an option of `sbatch`; True switches it on."""
    word = f"--{name.replace('_', '-')}" if len(name) > 1 else f"-{name}"
    between = "=" if len(name) > 1 else " "
    return f"#SBATCH {word}" if value is True else f"#SBATCH {word}{between}{shlex.quote(str(value))}"


def make_hold(lock: str, patience: float = _PATIENCE_SECONDS, grace: float = _GRACE_SECONDS) -> str:
    """Return lines of a shell that last as long as an agent holds a lock.

    Args:
        lock: path of the file.
        patience: seconds until an agent has it first.
        grace: seconds without an agent.
    """
    return _HOLD.format(lock=lock, patience=patience, grace=grace)


def _make_run_command(wish: Wish, folder: Path) -> str:
    """Return a line of a shell that becomes the driver of a run; a Python is needed that has torch and this package."""
    source = shlex.quote(find_source_folder())
    path = f'export PYTHONPATH={source}"${{PYTHONPATH:+:$PYTHONPATH}}"; ' if find_source_folder() else ""
    has_both = "import importlib.util as u, notebook_accel; exit(not u.find_spec('torch'))"
    return (
        f'{path}for p in {list_pythons(wish.python)}; do command -v "$p" >/dev/null 2>&1 || continue; '
        f'"$p" -c "{has_both}" 2>/dev/null || continue; '
        f'exec "$p" -m {_DRIVER} {shlex.quote(str(folder))}; done; exit {NO_PACKAGE}'
    )


def cancel(job_id: str) -> None:
    """Cancel a job; one that has ended takes no harm."""
    with contextlib.suppress(LaunchError):
        command.ask(["scancel", job_id], lambda: None)
