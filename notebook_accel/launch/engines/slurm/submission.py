"""Submits a job by submitit, which writes its script and calls `sbatch`. The job holds nodes until it is let go."""

from __future__ import annotations

import contextlib
import importlib
import secrets
import shlex
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from .... import interrupts, probes
from ....config.slurm import RESERVED
from ....errors import LaunchError
from ..detached.folder import LOG
from ..remote.client import NO_PACKAGE, find_source_folder, list_pythons
from . import command

PATIENCE_SECONDS: Final = 180.0
"""How long a job waits for the first agent, once it runs."""
GRACE_SECONDS: Final = 8.0
"""How long a job lasts without any agent after that."""
_SUBMIT_SECONDS: Final = 300.0  # a busy controller takes its time
_HOLDER: Final = Path(__file__).with_name("holder.py")
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


def find_missing() -> str:
    """Return why nothing can be submitted, as a sentence; empty where it can."""
    if not probes.is_available("submitit"):
        return "engine='slurm': submitit submits the job, which is not installed: pip install \"notebook-accel[slurm]\""
    return ""


def check(wish: Wish) -> list[str]:
    """Return what SLURM says against a wish, a sentence each; nothing is submitted.

    Where nodes are down or drained, `sbatch --test-only` refuses what needs them, and `sbatch` itself queues it.

    Args:
        wish: what will be asked.
    """
    with tempfile.TemporaryDirectory(prefix="notebook_accel_") as folder:
        try:
            executor = _make_executor(wish, folder)
            script: str = executor._make_submission_file_text(_make_command(wish, "test"), "test")
            command.ask(["sbatch", "--test-only"], lambda: None, script, without=_list_unwanted(wish))
        except (LaunchError, ValueError, TypeError) as error:
            if _NO_NODES in str(error) and _has_resting_nodes(wish):
                return []
            if any(words in str(error) for words in _SILENCE):
                return [f"engine='slurm': SLURM does not answer: {error}"]
            return [
                f"slurm={dict(wish.options)!r} with num_nodes={wish.num_nodes}: SLURM refuses it: {error}"
            ]
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
        The number of the job, and the name of the socket of its own process.

    Raises:
        LaunchError: SLURM refuses it.
    """
    holder = f"notebook_accel-{secrets.token_hex(8)}"
    with tempfile.TemporaryDirectory(prefix="notebook_accel_") as folder:
        try:
            return _submit(wish, _make_executor(wish, folder), _make_command(wish, holder)), holder
        except Exception as error:
            raise _make_error(error) from None


def submit_run(wish: Wish, folder: Path) -> str:
    """Submit a job that starts its ranks itself; return its number.

    Args:
        wish: what is asked.
        folder: of the run, see `recording`.

    Raises:
        LaunchError: SLURM refuses it.
    """
    with tempfile.TemporaryDirectory(prefix="notebook_accel_") as scripts:
        try:
            log = str(folder / LOG).replace("%", "%%")  # with which sbatch begins what it fills in
            executor = _make_executor(wish, scripts, {"output": log, "error": log, "open_mode": "append"})
            return _submit(wish, executor, _make_run_command(wish, folder))
        except Exception as error:
            raise _make_error(error) from None


def _make_error(error: Exception) -> LaunchError:
    """Return that a job could not be submitted."""
    what = str(error) if isinstance(error, LaunchError) else f"{type(error).__name__}: {error}"
    return LaunchError(f"sbatch has failed: {what}")


def _submit(wish: Wish, executor: Any, line: str) -> str:
    """Submit a job that runs a line of a shell, and return its number.

    An interrupt waits for that: whoever breaks `sbatch` off does not know whether there is a job.
    """
    with interrupts.delay_interrupt():
        script = executor._make_submission_file_text(line, secrets.token_hex(8))
        said = command.ask(["sbatch"], lambda: None, script, _SUBMIT_SECONDS, _list_unwanted(wish))
        return str(executor._get_job_id_from_submission_command(said))


def _list_unwanted(wish: Wish) -> set[str]:
    """Return the variables that would take the place of what the script says: of what a launch decides, and `slurm=`.

    man 1 sbatch, "INPUT ENVIRONMENT VARIABLES": they count more than the script.
    """
    names = {*RESERVED, *wish.options} - {"export"}
    return {_VARIABLES.get(name, f"SBATCH_{name.upper()}") for name in names}


def _make_executor(wish: Wish, folder: str, output: Mapping[str, str] | None = None) -> Any:
    submitit = importlib.import_module("submitit")
    executor = submitit.SlurmExecutor(folder=folder)
    known = executor._valid_parameters() - {
        "setup",
        "teardown",
        "additional_parameters",
        "use_srun",
        "srun_args",
    }
    own = {name: value for name, value in wish.options.items() if name in known}
    more = {name: value for name, value in wish.options.items() if name not in known}
    executor.update_parameters(
        **{"time": None, "wckey": None, "job_name": f"notebook_accel-{wish.name}", **own},
        nodes=wish.num_nodes,
        ntasks_per_node=wish.ranks_per_node,
        use_srun=False,
        additional_parameters={
            **more,
            **(output or {"output": _NOWHERE, "error": _NOWHERE}),
            "signal": "CONT@60",  # in place of submitit's, which ends processes
            "requeue" if wish.is_requeued else "no-requeue": True,
        },
    )
    return executor


def _make_command(wish: Wish, holder: str) -> str:
    words = [_HOLDER.read_text(), holder, f"{PATIENCE_SECONDS:g}", f"{GRACE_SECONDS:g}"]
    return _find_python(wish, f'exec "$p" -I -c {shlex.join(words)}')


def _make_run_command(wish: Wish, folder: Path) -> str:
    source = shlex.quote(find_source_folder())
    path = f'export PYTHONPATH={source}"${{PYTHONPATH:+:$PYTHONPATH}}"; ' if find_source_folder() else ""
    known = (
        """"$p" -c 'import importlib.util as u, notebook_accel; exit(not u.find_spec("torch"))' 2>/dev/null"""
    )
    known += " || continue"
    return path + _find_python(wish, f'{known}; exec "$p" -m {_DRIVER} {shlex.quote(str(folder))}')


def _find_python(wish: Wish, then: str) -> str:
    """Return a line of a shell that does something with the first Python that is there, as `$p`."""
    pythons = list_pythons(wish.python)
    return (
        f'for p in {pythons}; do command -v "$p" >/dev/null 2>&1 || continue; {then}; done; exit {NO_PACKAGE}'
    )


def cancel(job_id: str) -> None:
    """Cancel a job; one that has ended takes no harm."""
    with contextlib.suppress(LaunchError):
        command.ask(["scancel", job_id], lambda: None)
