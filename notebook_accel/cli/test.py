"""`notebook-accel test`: tries whether launches work on this machine."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import rich_click as click
import torch

from .. import devices
from ..config import file
from ..config.schema import LaunchConfig
from ..diagnosis.check import as_line
from ..diagnosis.checks import run_checks
from ..launch import preflight
from ..launch.engines.base import Engine
from ..launch.job import Job
from ..launch.registry import open_run
from ..launch.request import LaunchRequest
from .progress import Progress

_ROWS: Final = 97  # no multiple of any number of processes: the last batches are uneven
_STEPS: Final = 4
_WAIT: Final = timedelta(
    seconds=60
)  # for another rank, so that a network that swallows messages is a failure


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """What the tests run on.

    Attributes:
        num_processes: of each launch.
        kind: of the devices.
        environment: variables of the workers.
    """

    num_processes: int
    kind: devices.DeviceKind
    environment: Mapping[str, str]

    def run(self, function: Callable[..., Any], *args: Any, num_processes: int | None = None) -> list[Any]:
        """Return what each rank returned."""
        job, engine = self.prepare(function, *args, num_processes=num_processes or self.num_processes)
        values: list[Any] = open_run(job, engine, []).call()
        return values

    def prepare(self, function: Callable[..., Any], *args: Any, num_processes: int) -> tuple[Job, Engine]:
        """Return a job, and what runs it."""
        request = LaunchRequest(
            function=function,
            args=args,
            options={
                "num_processes": num_processes,
                "returns": "all",
                "output": "none",
                "environment": self.environment,
            },
            quiet=True,
        )
        return preflight.check(request, "notebook-accel test")


@click.command()
@click.option(
    "--config-file",
    "--config_file",
    type=click.Path(exists=True, dir_okay=False),
    help="Config that says how many processes, and whether on the CPU.",
)
@click.option(
    "--num-processes",
    "--num_processes",
    type=click.IntRange(min=2),
    help="Processes of a launch [default: one for each GPU, 2 without several]",
)
def test(config_file: str | None, num_processes: int | None) -> None:
    """Try out whether launches work on this machine.

    Starts processes, lets them talk, shares out data and trains a small model. The exit code is 1 where a test failed.
    """
    try:
        failed = run_trials(config_file, num_processes)
    except ValueError as error:  # a variable of the environment has no legal value
        raise click.ClickException(str(error)) from None
    sys.exit(failed > 0)


def run_trials(config_file: str | None = None, num_processes: int | None = None) -> int:
    """Print a line for each trial, and return how many failed.

    Args:
        config_file: says how many processes, and whether on the CPU.
        num_processes: of a launch, at least 2.

    Raises:
        ValueError: a variable of the environment has no legal value.
    """
    config = LaunchConfig() if config_file is None else file.read(config_file).config
    machine = _find_machine(num_processes or config.num_processes, use_cpu=config.use_cpu or None)
    failed = 0
    for name, trial in _TRIALS:
        started = time.monotonic()
        with Progress(name):
            try:
                text, passed = trial(machine), True
            except Exception as error:
                text, passed = _describe_error(error), False
        failed += not passed
        status = click.style("ok    ", fg="green") if passed else click.style("failed", fg="red")
        click.echo(f"{status} {time.monotonic() - started:6.1f} s  {name}: {text}")
    if not failed:
        click.echo("all passed: launches work on this machine")
        return 0
    # what doctor says of this process is due to the trials
    found = [check for check in run_checks() if check.status != "ok" and check.name != "this process"]
    click.echo(
        f"{failed} of {len(_TRIALS)} failed; `notebook-accel doctor` finds {'this:' if found else 'nothing else'}"
    )
    for check in found:
        click.echo(as_line(check))
    return failed


def _find_machine(num_processes: int | None, use_cpu: bool | None = None) -> Machine:
    """Return the devices to test, the CPU where there are fewer than processes; at least two processes."""
    kind = devices.best(use_cpu)
    number = max(2, num_processes or devices.count_usable(kind))
    if kind is not devices.CPU and (number > devices.count_usable(kind) or kind.backend is None):
        kind = devices.CPU
    environment = {"ACCELERATE_USE_CPU": "true"} if kind is devices.CPU else {}
    return Machine(num_processes=number, kind=kind, environment=environment)


def _try_devices(machine: Machine) -> str:
    best = devices.best()
    number = devices.count(best)
    found = f"{number} {best.label if number == 1 else best.plural}"
    return found if best is machine.kind else f"{found}, fewer than processes: the tests use the CPU"


def _try_start(machine: Machine) -> str:
    job, _ = machine.prepare(_read_rank, num_processes=machine.num_processes)
    method = job.start_method
    ranks = machine.run(_read_rank)
    _expect("ranks", ranks, list(range(machine.num_processes)))
    return f"{machine.num_processes} by start_method={method}"


def _try_collective(machine: Machine) -> str:
    sums = machine.run(_sum_ranks, num_processes=2)
    _expect("sums of 1 and 2", sums, [3.0, 3.0])
    return f"2 {machine.kind.plural} by {machine.kind.backend}"


def _try_sharding(machine: Machine) -> str:
    shares = machine.run(_read_rows)
    _expect(
        "rows of all ranks together", sorted(row for share in shares for row in share), list(range(_ROWS))
    )
    return (
        f"{_ROWS} rows, each on one rank, in shares of {', '.join(str(len(share)) for share in shares[:8])}"
    )


def _try_training(machine: Machine) -> str:
    """Train on N processes, then on one, which is this one: nothing can be forked from here afterwards."""
    together = machine.run(_train, 8)
    for rank, weights in enumerate(together):
        _expect(f"weights of rank {rank}", weights, together[0])
    alone = machine.run(_train, 8 * machine.num_processes, num_processes=1)[0]
    difference = float((torch.tensor(alone) - torch.tensor(together[0])).abs().max())
    if difference > 1e-4:
        raise AssertionError(f"weights of 1 and {machine.num_processes} processes differ by {difference:.2g}")
    return f"1 and {machine.num_processes} processes agree (difference {difference:.1g})"


def _read_rank() -> int:
    return int(_make_accelerator().process_index)


def _sum_ranks() -> float:
    accelerator = _make_accelerator()
    own = torch.tensor([accelerator.process_index + 1.0], device=accelerator.device)
    total: torch.Tensor = accelerator.reduce(own, "sum")
    return float(total)


def _read_rows() -> list[int]:
    """Return the rows of this rank."""
    accelerator = _make_accelerator()
    accelerator.even_batches = False  # nothing is seen twice to even out the last batches
    loader: Any = accelerator.prepare(torch.utils.data.DataLoader(torch.arange(_ROWS), batch_size=4))  # type: ignore[arg-type]
    return [row for batch in loader for row in batch.tolist()]


def _train(batch_size: int) -> list[float]:
    """Return the weights of a small model after a few steps on batches of this size a rank."""
    accelerator = _make_accelerator()
    torch.manual_seed(0)
    rows = batch_size * accelerator.num_processes * _STEPS
    data = torch.utils.data.TensorDataset(torch.randn(rows, 4), torch.randn(rows, 1))
    plain = torch.nn.Linear(4, 1)
    model, optimizer, loader = accelerator.prepare(
        plain,
        torch.optim.SGD(plain.parameters(), lr=0.1),
        torch.utils.data.DataLoader(data, batch_size=batch_size),
    )
    for inputs, targets in loader:
        optimizer.zero_grad()
        accelerator.backward(torch.nn.functional.mse_loss(model(inputs), targets))
        optimizer.step()
    return [float(x) for part in plain.parameters() for x in part.detach().flatten().cpu()]


def _make_accelerator() -> Any:
    from ..accelerator import Accelerator
    from ..handlers import InitProcessGroupKwargs

    return Accelerator(mixed_precision="no", kwargs_handlers=[InitProcessGroupKwargs(timeout=_WAIT)])


def _expect(what: str, found: Any, wanted: Any) -> None:
    if found != wanted:
        raise AssertionError(f"{what} are {found}, expected {wanted}")


def _describe_error(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no reason given'}"


_TRIALS: Final[tuple[tuple[str, Callable[[Machine], str]], ...]] = (
    ("devices", _try_devices),
    ("process start", _try_start),
    ("collective", _try_collective),
    ("data sharding", _try_sharding),
    ("training", _try_training),
)
