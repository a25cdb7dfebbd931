"""The block of a bug report: versions, devices, settings, with secrets left out."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil
import torch

from .. import devices, environ, probes
from ..config import document, file
from ..errors import ConfigError
from ..launch.checks import fork_obstacles, fork_safety
from ..takeover import finder, tried

PACKAGES: Final = (
    "accelerate",
    "ipykernel",
    "ipywidgets",
    "jupyter-client",
    "jupyterlab",
    "notebook",
    "nbclient",
    "numpy",
    "cloudpickle",
    "psutil",
    "pydantic",
    "safetensors",
    *tried.TRIED,
    "deepspeed",
    "torch-xla",
)
_PREFIXES: Final = (
    "ACCELERATE_",
    "CUDA_",
    "DEEPSPEED_",
    "FSDP_",
    "GLOO_",
    "KMP_",
    "MKL_",
    "NCCL_",
    "NVIDIA_",
    "OMP_",
    "PARALLELISM_CONFIG_",
    "PJRT_",
    "PYTORCH_",
    "SLURM_",
    "TORCH",
    "TPU_",
    "XLA_",
)
_SECRET_NAME: Final = re.compile(r"TOKEN|SECRET|PASS|CREDENTIAL|AUTH|(^|_)KEY|COOKIE", re.IGNORECASE)
_SECRET_TEXT: Final = re.compile(
    r"(?<=://)[^/\s@]+@|\b(?:hf_|ghp_|github_pat_|sk-|xox[a-z]-|AKIA|glpat-)[\w-]{8,}"
)
_LEFT_OUT: Final = "(left out)"
_QUERY: Final = "--query-gpu=name,memory.total,driver_version,uuid"
_SECONDS: Final = 20
_LONG: Final = 400  # characters of a variable: images with CUDA have one of two thousand


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """A GPU as its driver shows it; this process need not be allowed to use it.

    Attributes:
        name: the product's name.
        memory: its memory, with the unit.
        driver: version of the driver.
    """

    name: str
    memory: str
    driver: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """Facts about this machine and this process.

    Attributes:
        version: of this package.
        python: version of Python.
        executable: path of the interpreter.
        platform: operating system and machine.
        torch: version of torch.
        torch_cuda: the CUDA or ROCm version that torch is built for, or `none`.
        driver: version of NVIDIA's driver, empty without one.
        devices: what a launch would use, such as `2 CUDA GPUs`.
        gpus: NVIDIA's GPUs.
        cores: CPU cores of the machine.
        usable_cores: the cores that this process may run on.
        memory_gib: memory of the machine, in GiB.
        start_method: how a launch from this process would start workers.
        start_reasons: why it would not fork; empty where it would.
        as_accelerate: whether imports of accelerate give this package.
        packages: versions of installed packages, by name.
        variables: environment variables that matter to launches, without secrets.
        config_path: path of the default config, which need not exist.
        config: its text without secrets, or why it cannot be read; None where there is none.
    """

    version: str
    python: str
    executable: str
    platform: str
    torch: str
    torch_cuda: str
    driver: str
    devices: str
    gpus: tuple[Gpu, ...]
    cores: int
    usable_cores: int
    memory_gib: float
    start_method: str
    start_reasons: tuple[str, ...]
    as_accelerate: bool
    packages: Mapping[str, str]
    variables: Mapping[str, str]
    config_path: str
    config: str | None


def collect(config_file: str | os.PathLike[str] | None = None) -> Environment:
    """Look at this machine and process.

    Args:
        config_file: the config to show; by default the one that launches look for.
    """
    reasons = tuple(map(str, fork_obstacles.reasons()))
    found = gpus()
    path = file.default_path() if config_file is None else document.expand(config_file)
    return Environment(
        version=probes.version("notebook-accel") or "not installed, on the path only",
        python=platform.python_version(),
        executable=sys.executable,
        platform=platform.platform(),
        torch=torch.__version__,
        torch_cuda=str(torch.version.cuda or getattr(torch.version, "hip", None) or "none"),
        driver=found[0].driver if found else "",
        devices=_devices(),
        gpus=found,
        cores=psutil.cpu_count() or 1,
        usable_cores=devices.share_of_cores(1),
        memory_gib=round(psutil.virtual_memory().total / 2**30, 1),
        start_method=fork_safety.choose_start_method(reasons),
        start_reasons=reasons,
        as_accelerate=finder.is_installed(),
        packages={name: number for name in PACKAGES if (number := probes.version(name)) is not None},
        variables=select_relevant(environ.snapshot()),
        config_path=str(path),
        config=_config(path) if path.exists() else None,
    )


def _describe_takeover(found: Environment) -> list[str]:
    newer = [
        f"{name} {version} is newer than {tried.TRIED[name]}, the newest version that was tried"
        for name, version in found.packages.items()
        if name in tried.TRIED and tried.is_newer(name, version)
    ]
    return ["- " + "; ".join(["imports of accelerate give notebook_accel", *newer])]


def gpus() -> tuple[Gpu, ...]:
    """Return NVIDIA's GPUs as `nvidia-smi`, a process of its own, lists them; empty where it does not."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    try:
        done = subprocess.run(
            [program, _QUERY, "--format=csv,noheader"], capture_output=True, text=True, timeout=_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):
        return ()
    rows = [[word.strip() for word in line.split(",")] for line in done.stdout.splitlines()]
    return tuple(Gpu(name=row[0], memory=row[1], driver=row[2]) for row in rows if len(row) == 4)


def select_relevant(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that matter to launches, with a note in place of each value that may be a secret."""
    names = sorted(name for name in variables if name in environ.TABLE or name.startswith(_PREFIXES))
    return {
        name: _LEFT_OUT if _SECRET_NAME.search(name) else leave_out_secrets(variables[name]) for name in names
    }


def leave_out_secrets(text: str) -> str:
    """Return the text with a note in place of each token, and of each password in an address."""
    return _SECRET_TEXT.sub(_LEFT_OUT, text)


def as_text(found: Environment) -> str:
    """Return a block to paste into a bug report."""
    gpu_lines = [f"  - {gpu.name}, {gpu.memory}" for gpu in found.gpus]
    cores = f"{found.cores}, {found.usable_cores} of them usable"
    start = found.start_method + (f" ({'; '.join(found.start_reasons)})" if found.start_reasons else "")
    lines = [
        f"- notebook_accel: {found.version}",
        f"- torch: {found.torch} (CUDA or ROCm build: {found.torch_cuda})",
        f"- Python: {found.python} ({found.executable})",
        f"- platform: {found.platform}",
        f"- NVIDIA driver: {found.driver or 'none found'}",
        f"- devices of a launch: {found.devices}",
        *gpu_lines,
        f"- CPU cores: {cores}",
        f"- memory: {found.memory_gib} GiB",
        f"- start method of a launch: {start}",
        f"- packages: {', '.join(f'{name} {number}' for name, number in found.packages.items())}",
        *(_describe_takeover(found) if found.as_accelerate else []),
        "- environment variables:" + ("" if found.variables else " none that matter"),
        *(f"  - {name}={_shorten(value)}" for name, value in found.variables.items()),
        f"- default config: {found.config_path}" + ("" if found.config is not None else " (there is none)"),
        *(f"  {line}" for line in (found.config or "").splitlines()),
    ]
    return "\n".join(lines)


def _shorten(value: str) -> str:
    if len(value) <= _LONG:
        return value
    return f"{value[: _LONG // 2]} ... {value[-_LONG // 2 :]} ({len(value):,} characters)"


def _devices() -> str:
    try:
        kind = devices.best()
    except ValueError as error:  # a variable asks for what there is not
        return str(error)
    return devices.describe_count(devices.count(kind), kind)


def _config(path: Path) -> str:
    """Return the config in a file as a file would hold it, its secrets left out; or why it cannot be read."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = file.read(path).config
    except ConfigError as error:
        return leave_out_secrets(f"cannot be read: {error}")
    texts = {
        name: _LEFT_OUT if _SECRET_NAME.search(name) else value for name, value in found.environment.items()
    }
    pod = tuple(
        f"{text.partition('=')[0]}={_LEFT_OUT}" if _SECRET_NAME.search(text.partition("=")[0]) else text
        for text in found.tpu_env
    )
    return leave_out_secrets(file.as_yaml(found.model_copy(update={"environment": texts, "tpu_env": pod})))
