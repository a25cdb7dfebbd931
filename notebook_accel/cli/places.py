"""Where a launch from a terminal would run: the job of SLURM, or the hosts of ssh."""

from __future__ import annotations

import shlex

from ..config import hosts, slurm
from ..config.schema import LaunchConfig

Rows = list[tuple[str, str, str]]


def describe_place(config: LaunchConfig) -> tuple[str, Rows]:
    """Return a title and rows about the job or the hosts of a launch; no rows where it runs on this machine.

    Args:
        config: all options, with the engine that they imply.
    """
    if config.engine == "slurm":
        return "Job", _describe_job(config)
    if config.engine == "ssh":
        return "Hosts", _describe_hosts(config)
    return "", []


def _describe_job(config: LaunchConfig) -> Rows:
    """Return the size of the job, and options of `sbatch` that say the same."""
    nodes, count = config.num_machines, config.num_processes
    where = f"{nodes} {'node' if nodes == 1 else 'nodes'} by SLURM"
    options = slurm.normalize(slurm.parse_pairs(config.slurm))
    tasks = [] if count is None else [f"--ntasks-per-node={count // nodes}"]
    size = f"a process for each GPU that is asked for, or one on each node, on {where}"
    if count is not None:
        size = f"{count} {'process' if count == 1 else 'processes'} on {where}, {count // nodes} on each"
    words = ["sbatch", f"--nodes={nodes}", *tasks]
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        words.append(flag if value is True else f"{flag}={value}")
    return [(size, "", ""), (shlex.join(words), "", "")]


def _describe_hosts(config: LaunchConfig) -> Rows:
    """Return each host with its ranks, as far as they are known without it."""
    try:
        found = hosts.parse_hosts(config.hosts)
    except ValueError:  # the launch says why
        return [(text, "", "") for text in config.hosts]
    rows: Rows = []
    first: int | None = 0
    for host in found:
        if host.count is None:
            ranks, first = "a rank for each GPU, or one", None
        elif first is None:
            ranks = f"{host.count} {'rank' if host.count == 1 else 'ranks'}"
        else:
            ranks = f"rank {first}" if host.count == 1 else f"ranks {first}..{first + host.count - 1}"
            first += host.count
        rows.append((host.name, ranks, ""))
    return rows
