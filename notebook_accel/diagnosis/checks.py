"""Checks of this machine: each finding says what hinders launches and how to fix it."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import shlex
import shutil
import socket
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

import psutil
import torch

from .. import devices, environ, probes, requirements
from ..config import file
from ..config.argument_checks import parse_port
from ..config.schema import LaunchConfig
from ..errors import ConfigError
from ..launch import leftovers
from ..launch.agent import client
from ..launch.checks import addresses, fork_obstacles, fork_safety
from ..takeover import finder, tried
from . import compiled, hosted, packages
from .check import Check, Status
from .environment import gpus

_MIB: Final = 2**20
_GIB: Final = 2**30
_USUAL_PORT: Final = 29500  # of torchrun, and of runs on several nodes


def run_checks() -> Iterable[Check]:
    """Run one check after the other, and yield its results at once."""
    of_process = list(_run("this process", _process))  # before others count devices, which may start a driver
    of_torch_xla = list(_run("torch_xla", compiled.check_torch_xla))  # the check of a launch needs it
    for name, check in _CHECKS:
        if check is _process:
            yield from of_process
        elif check is compiled.check_torch_xla:
            yield from of_torch_xla
        elif check is _launch:
            yield from _run(name, functools.partial(_launch, of_torch_xla=of_torch_xla))
        else:
            yield from _run(name, check)


def _run(name: str, check: Callable[[str], Iterable[Check]]) -> Iterable[Check]:
    try:
        yield from check(name)
    except (OSError, psutil.Error) as error:
        yield Check(name=name, status="warning", text=f"could not be checked: {error}")
    except ValueError as error:  # a variable of the environment has no legal value
        yield Check(name=name, status="problem", text=str(error), remedy="unset it or set it to a legal one")


def _place(name: str) -> Iterable[Check]:
    """Yield which hosted place this is and what it has; nothing elsewhere."""
    if place := hosted.find_place():
        hint = f"; {hosted.MENUS[place]} has GPUs and TPUs" if hosted.lacks_accelerator() else ""
        yield Check(name=name, status="ok", text=f"{place}: {hosted.describe_machine()}{hint}")


def _launch(name: str, of_torch_xla: Iterable[Check] = ()) -> Iterable[Check]:
    """Yield what a launch would do; one on XLA devices cannot do it where torch_xla has a problem."""
    try:
        sentence, kind = hosted.describe_launch()
    except ValueError as error:
        remedy = "do what the sentence names, or pass other arguments to notebook_launcher"
        yield Check(name=name, status="problem", text=str(error), remedy=remedy)
        return
    broken = [check for check in of_torch_xla if check.status == "problem" and kind is devices.XLA]
    for check in broken:
        yield Check(
            name=name, status="problem", text=f"it needs torch_xla: {check.text}", remedy=check.remedy
        )
    if not broken:
        yield Check(name=name, status="ok", text=f"notebook_launcher(train) says: {sentence}")


def _ports(name: str) -> Iterable[Check]:
    if reason := addresses.find_listen_problem("127.0.0.1", 0):
        yield Check(
            name=name,
            status="problem",
            text=f"no port of 127.0.0.1 can be opened ({reason})",
            remedy="allow programs to listen on the loopback interface",
        )
    else:
        yield Check(name=name, status="ok", text="free ones can be opened on 127.0.0.1")
    named = environ.get("MASTER_PORT")
    config = _config()
    if named is not None and not parse_port(named):
        yield Check(
            name=name,
            status="problem",
            text=f"MASTER_PORT={named!r} is no port from 1 to 65535",
            remedy="unset MASTER_PORT, or set it to a port",
        )
    elif named is not None:
        yield _port(name, int(named), "MASTER_PORT", "problem", "set MASTER_PORT to another, or unset it")
    if config is not None and config.main_process_port:
        remedy = "`notebook-accel config update --main_process_port 0` takes any free one"
        yield _port(name, config.main_process_port, "of the default config", "problem", remedy)
    elif named is None:
        remedy = "name another one (use_port, --main_process_port) for runs on several nodes"
        yield _port(name, _USUAL_PORT, "the usual one of several nodes", "warning", remedy)


def _port(name: str, port: int, what: str, status: Status, remedy: str) -> Check:
    reason = addresses.find_listen_problem("", port)
    if not reason:
        return Check(name=name, status="ok", text=f"{port} ({what}) is free")
    text = f"{port} ({what}) cannot be opened: {reason}{_holder(port)}"
    return Check(name=name, status=status, text=text, remedy=remedy)


def _holder(port: int) -> str:
    """Say which process listens at a port, as far as the system tells."""
    try:
        for connection in psutil.net_connections(kind="tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port:
                if connection.pid is None:
                    break
                return f", by process {connection.pid} ({psutil.Process(connection.pid).name()})"
        else:
            return ""
    except psutil.Error:
        return ", the system does not say by which process"
    return ", by a process of another user"


def _shared_memory(name: str) -> Iterable[Check]:
    folder = Path("/dev/shm")
    if sys.platform != "linux" or not folder.is_dir():
        return
    usage = shutil.disk_usage(folder)
    remedy = "in Docker: --shm-size=8g, or --ipc=host; else remove what is in it"
    text = f"{_size(usage.free)} of {_size(usage.total)} are free"
    status: Status = "ok"
    if usage.free < 32 * _MIB:
        status, text = "problem", f"{text}: workers of data loaders would die of a bus error"
    elif usage.free < 512 * _MIB:
        status, text = "warning", f"{text}: large batches from workers of data loaders do not fit"
    yield Check(name=name, status=status, text=text, remedy="" if status == "ok" else remedy)


def _limits(name: str) -> Iterable[Check]:
    import resource  # here: a file beside the notebook may have this name

    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield _limit(name, "open files (ulimit -n)", files, most, least=256, enough=1024)
    processes, most = resource.getrlimit(resource.RLIMIT_NPROC)
    yield _limit(name, "processes and threads (ulimit -u)", processes, most, least=128, enough=1024)


def _limit(name: str, what: str, number: int, most: int, *, least: int, enough: int) -> Check:
    import resource

    if number == resource.RLIM_INFINITY or number >= enough:
        shown = "no limit" if number == resource.RLIM_INFINITY else str(number)
        return Check(name=name, status="ok", text=f"{what}: {shown}")
    option = what.rpartition("(")[2].rstrip(")")
    more = most == resource.RLIM_INFINITY or most >= enough
    return Check(
        name=name,
        status="problem" if number < least else "warning",
        text=f"{what}: {number} are few for several processes",
        remedy=f"`{option} {enough}` in the shell that starts Jupyter"
        if more
        else "ask who runs this machine for more (limits.conf)",
    )


def _threads(name: str) -> Iterable[Check]:
    cores = devices.share_of_cores(1)
    text = environ.get("OMP_NUM_THREADS")
    config = _config()
    processes = (config.num_processes or 1) // config.num_machines if config is not None else 1
    if text is None or not text.strip():
        yield Check(name=name, status="ok", text=f"OMP_NUM_THREADS is not set: workers share {cores} cores")
        return
    first = text.split(",")[0].strip()
    if not first.isdecimal() or int(first) == 0:
        yield Check(
            name=name,
            status="problem",
            text=f"OMP_NUM_THREADS={text!r} is no number of threads",
            remedy="unset OMP_NUM_THREADS: each worker then has its share of the cores",
        )
    elif int(first) * processes > cores:
        yield Check(
            name=name,
            status="warning",
            text=f"{processes} processes x OMP_NUM_THREADS {first} > {cores} cores: threads wait for each other",
            remedy=f"set OMP_NUM_THREADS to {devices.share_of_cores(processes)} at most, or unset it",
        )
    else:
        yield Check(name=name, status="ok", text=f"OMP_NUM_THREADS={text}, {cores} cores")


def _temp_folder(name: str) -> Iterable[Check]:
    try:
        folder = tempfile.gettempdir()
    except FileNotFoundError:
        yield Check(
            name=name,
            status="problem",
            text="there is no folder for temporary files that can be written",
            remedy="set TMPDIR to a folder that can be",
        )
        return
    free = shutil.disk_usage(folder).free
    status: Status = "problem" if free < 64 * _MIB else "warning" if free < _GIB else "ok"
    remedy = "" if status == "ok" else "make room, or set TMPDIR to a folder on another disk"
    yield Check(name=name, status=status, text=f"{folder} has {_size(free)} free", remedy=remedy)


def _driver(name: str) -> Iterable[Check]:
    found = gpus()
    usable = devices.count(devices.CUDA)
    if not found:
        text = devices.describe_count(usable, devices.CUDA) if usable else "no NVIDIA GPU"
        yield Check(name=name, status="ok", text=text)
        return
    seen = f"driver {found[0].driver}, {len(found)} {'GPU' if len(found) == 1 else 'GPUs'}"
    if torch.version.cuda is None:
        yield Check(
            name=name,
            status="problem",
            text=f"{seen}, but torch {torch.__version__} is built without CUDA",
            remedy="install a torch with CUDA, see pytorch.org/get-started",
        )
    elif usable == 0:
        visible = environ.get("CUDA_VISIBLE_DEVICES")
        hidden = visible is not None
        yield Check(
            name=name,
            status="warning" if hidden else "problem",
            text=f"{seen}, none of which torch {torch.__version__} (CUDA {torch.version.cuda}) sees"
            + (f": CUDA_VISIBLE_DEVICES={visible!r}" if hidden else ""),
            remedy="unset CUDA_VISIBLE_DEVICES to use them"
            if hidden
            else f"install a driver that knows CUDA {torch.version.cuda}, or a torch for the driver there is",
        )
    else:
        yield Check(
            name=name, status="ok", text=f"{seen}, {usable} usable, torch for CUDA {torch.version.cuda}"
        )


def _libraries(name: str) -> Iterable[Check]:
    try:
        due = packages.find_due()
    except importlib.metadata.PackageNotFoundError:
        text = "notebook_accel is not installed but on the path only: what it needs is not known"
        command = "pip install notebook-accel"
        yield Check(name=name, status="warning", text=text, remedy=command, command=command)
        return
    wrong = packages.find_unmet(due)
    for requirement, installed in wrong:
        yield Check(
            name=name,
            status="problem",
            text=f"{requirement.name} {installed}, needed is {requirement.specifier}",
            remedy=f"pip install '{requirement}'",
            command=f"pip install '{requirement}'",
        )
    if not wrong:
        yield Check(name=name, status="ok", text=f"all {len(due)} requirements are met")


def _imports(name: str) -> Iterable[Check]:
    """Yield the required libraries that are installed and cannot be used; each is imported."""
    try:
        due = packages.find_due()
    except importlib.metadata.PackageNotFoundError:  # the check before says so
        return
    unmet = [requirement for requirement, _ in packages.find_unmet(due)]
    for requirement in due:
        if requirement in unmet:
            continue
        try:
            importlib.import_module(requirements.module_of(requirement.name))
            if requirement.name == "numpy":
                torch.zeros(1, device="cpu").numpy()  # torch looked for it once, when it was imported
        except Exception as error:  # a broken installation raises anything
            yield Check(
                name=name,
                status="problem",
                text=f"{requirement.name} cannot be used ({type(error).__name__}: {error})",
                remedy=f"restart; if that does not help, pip install --force-reinstall '{requirement}'",
                command=f"pip install --force-reinstall '{requirement}'",
            )


def _leftovers(name: str) -> Iterable[Check]:
    """Yield what killed runs have left; nothing on systems that do not tell."""
    if sys.platform != "linux":
        return
    found = leftovers.find()
    paths, command = ", ".join(map(str, found)), shlex.join(["rm", "-r", *map(str, found)])
    yield Check(
        name=name,
        status="warning" if found else "ok",
        text=f"killed runs have left {paths}" if found else "killed runs have left nothing",
        remedy=command if found else "",
        command=command if found else "",
    )


def _accelerate(name: str) -> Iterable[Check]:
    if finder.is_installed():
        yield Check(
            name=name,
            status="ok",
            text=f"imports of accelerate give notebook_accel, as version {finder.VERSION}",
        )
        for library in tried.TRIED:
            if version := probes.version(library):
                yield _library(name, library, version)


def _library(name: str, library: str, version: str) -> Check:
    """Return whether the take-over was tried with the installed version of a library."""
    newest = tried.TRIED[library]
    if not tried.is_newer(library, version):
        return Check(name=name, status="ok", text=f"{library} {version} is installed, tried up to {newest}")
    return Check(
        name=name,
        status="warning",
        text=f"{library} {version} is newer than {newest}, the newest version that was tried",
        remedy=f"if it fails here and not with Accelerate, pip install '{library}=={newest}.*'",
    )


def _network(name: str) -> Iterable[Check]:
    interfaces = psutil.net_if_addrs()
    for variable, library in (("GLOO_SOCKET_IFNAME", "gloo"), ("NCCL_SOCKET_IFNAME", "NCCL")):
        wanted = environ.get(variable)
        if not wanted:
            continue
        exact = [part.lstrip("=") for part in wanted.split(",") if not part.startswith("^")]
        if exact and not any(known.startswith(part) for known in interfaces for part in exact):
            yield Check(
                name=name,
                status="problem",
                text=f"{variable}={wanted!r} is none of {', '.join(sorted(interfaces))}",
                remedy=f"unset {variable}, or name one of these",
            )
        else:
            yield Check(name=name, status="ok", text=f"{library} uses {wanted} ({variable})")
    host = socket.gethostname()
    if reason := addresses.find_host_problem(host):
        yield Check(
            name=name,
            status="warning",
            text=f"this machine's name {host} has no address ({reason}): gloo of several nodes and of torchrun fails",
            remedy=f"add `127.0.1.1 {host}` to /etc/hosts, or set GLOO_SOCKET_IFNAME",
        )
    else:
        where = socket.getaddrinfo(host, None)[0][4][0]
        holder = next(
            (n for n, known in interfaces.items() for a in known if a.address == where), "no interface"
        )
        text = f"one node: loopback; several: {holder}, where this machine's name {host} ({where}) lies"
        if str(where).startswith("127.") or where == "::1":
            text += ", which no other node reaches: set GLOO_SOCKET_IFNAME for several"
        yield Check(name=name, status="ok", text=text)


def _process(name: str) -> Iterable[Check]:
    reasons, agent = fork_obstacles.reasons(), client.find()
    if agent is not None:
        state = "has imported all that workers need" if agent.is_ready else "imports what workers need"
        text = f"an agent, process {agent.pid}, starts workers that are no forks, and {state}"
        yield Check(name=name, status="ok", text=text)
    for reason in reasons:
        if agent is not None:
            text = f"{reason}: launches start fresh processes"
            yield Check(name=name, status="ok", text=text)
            continue
        yield Check(
            name=name,
            status="warning",
            text=f"{reason}: launches start fresh processes instead of forks",
            remedy="nothing has to be done; for quicker starts, use devices inside the launched function only",
        )
    if not reasons:
        text = f"nothing was initialised: launches use start_method={fork_safety.choose_start_method(())}"
        yield Check(name=name, status="ok", text=text)


def _default_config(name: str) -> Iterable[Check]:
    path = file.default_path()
    if not path.exists():
        yield Check(name=name, status="ok", text=f"there is none at {path}")
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = file.read(path)
    except ConfigError as error:
        for problem in error.problems:
            remedy = "correct that line, or write a new file with `notebook-accel config`"
            yield Check(name=name, status="problem", text=str(problem), remedy=remedy)
        return
    if found.ignored:
        text = f"{path}: {', '.join(found.ignored)} means nothing any more"
        remedy = "`notebook-accel config update` writes it in today's words"
        yield Check(name=name, status="warning", text=text, remedy=remedy)
        return
    wanted = (found.config.num_processes or 1) // found.config.num_machines
    kind = devices.CPU if found.config.use_cpu else devices.best()
    present = devices.count(kind)
    if kind.indexed and wanted > present:
        yield Check(
            name=name,
            status="warning",
            text=f"{path}: num_processes {wanted}: this machine has {devices.describe_count(present, kind)}",
            remedy=f"`notebook-accel config update --num_processes {present}`",
        )
        return
    yield Check(name=name, status="ok", text=f"{path} can be read")


def _config() -> LaunchConfig | None:
    """Return the default config, None where it cannot be read: another check reports that."""
    if not file.default_path().exists():
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return file.read(file.default_path()).config
        except ConfigError:
            return None


def _view(name: str) -> Iterable[Check]:
    """Yield whether ipywidgets can show runs; nothing where it is not installed."""
    if not probes.has_module("ipywidgets"):
        return
    if problem := probes.find_widgets_problem():
        text = f"ipywidgets cannot be imported ({problem}): runs are shown as text"
        remedy = "install ipywidgets again, or rename the module that has its name"
        yield Check(name=name, status="warning", text=text, remedy=remedy)
    else:
        yield Check(
            name=name, status="ok", text=f"ipywidgets {probes.version('ipywidgets')} shows runs in notebooks"
        )


def _size(number: int) -> str:
    return f"{number / _GIB:.1f} GiB" if number >= _GIB else f"{number / _MIB:.0f} MiB"


_CHECKS: Final[tuple[tuple[str, Callable[[str], Iterable[Check]]], ...]] = (
    ("place", _place),
    ("launch", _launch),
    ("ports", _ports),
    ("shared memory", _shared_memory),
    ("limits", _limits),
    ("threads", _threads),
    ("temp folder", _temp_folder),
    ("driver", _driver),
    ("libraries", _libraries),
    ("imports", _imports),
    ("torch_xla", compiled.check_torch_xla),
    ("accelerate", _accelerate),
    ("network", _network),
    ("this process", _process),
    ("default config", _default_config),
    ("leftovers", _leftovers),
    ("torchao", compiled.check_torchao),
    ("view", _view),
)
