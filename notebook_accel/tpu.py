"""Finds the TPU chips of this machine in variables and files, without initialising the runtime of torch_xla."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal

from . import environ, probes

Mode = Literal["process", "spmd"]

MODES: Final[tuple[Mode, ...]] = ("process", "spmd")
"""`process`: each XLA device has a process. `spmd`: one process uses all devices."""
RELEASES: Final = ("2.8", "2.9")
"""Releases of torch_xla that this package works with, as far as known; each is built for the torch of its number."""
_ROOT: Final = Path("/")
_GOOGLE: Final = "0x1ae0"
_TWO_CORES: Final = "0x0027"  # TPU v2 and v3: each chip is two devices
_CHIPS: Final = {_TWO_CORES, "0x005e", "0x0056", "0x0062", "0x0063", "0x006f", "0x0076"}
"""PCI device ids, those of `torch_xla._internal.tpu`."""


def is_here(environment: Mapping[str, str] | None = None) -> bool:
    """Return True if this machine has a TPU for torch_xla; PJRT_DEVICE decides if it is set.

    TPU_NAME alone may be a setting of Google's command line tools. It counts only if torch_xla is installed.

    Args:
        environment: variables that override those of this process.
    """
    own = environ.snapshot()
    chosen = (environment or {}).get("PJRT_DEVICE") or own.get("PJRT_DEVICE")
    if chosen:
        return _device_type(chosen) == "TPU"
    is_vm = own.get("ISTPUVM", "").strip().lower() in ("1", "true")
    named = bool(own.get("TPU_NAME")) and probes.is_available("torch_xla")
    return named or is_vm or bool(_find_chips() or _files("dev/accel[0-9]*"))


def pjrt_device(environment: Mapping[str, str] | None = None) -> str:
    """Return the device type of torch_xla's runtime, such as `TPU` or `CPU`; empty where it is unknown.

    Args:
        environment: variables that override those of this process.
    """
    chosen = (environment or {}).get("PJRT_DEVICE") or environ.get("PJRT_DEVICE") or ""
    return _device_type(chosen) or ("TPU" if is_here() else "")


def chips(environment: Mapping[str, str] | None = None) -> int:
    """Return the number of chips of this machine: 0 without a TPU, 1 if there is one and its chips cannot be counted.

    Args:
        environment: variables that override those of this process.
    """
    if not is_here(environment):
        return 0
    files = _files("dev/accel[0-9]*") or _files("dev/vfio/[0-9]*")
    return len(_find_chips()) or files or _product("TPU_CHIPS_PER_HOST_BOUNDS") or 1


def num_processes(environment: Mapping[str, str] | None = None) -> int:
    """Return the number of processes that use all chips, one each, but no more than TPU_PROCESS_BOUNDS allows.

    Args:
        environment: variables that override those of this process.
    """
    number = chips(environment)
    if len(visible_chips()) == 1:
        return min(number, 1)
    return min(number, _product("TPU_PROCESS_BOUNDS") or number)


def advise_install(torch_version: str) -> str:
    """Return how to get a torch_xla that fits, as one clause.

    Args:
        torch_version: of the torch that is installed.
    """
    own, last = ".".join(torch_version.split(".")[:2]), RELEASES[-1]
    if own in RELEASES:
        return f"pip install 'torch_xla[tpu]~={own}.0', which is built for torch {own}"
    return (
        f"pip install 'torch~={last}.0' 'torch_xla[tpu]~={last}.0' and start a new kernel, because each torch_xla is "
        f"built for the torch of its number, and there is none for torch {own} as far as known"
    )


def visible_chips() -> tuple[str, ...]:
    """Return the chips that TPU_VISIBLE_CHIPS names; empty if it is not set."""
    text = environ.get("TPU_VISIBLE_CHIPS") or ""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def devices_per_chip() -> int:
    """Return 2 for TPU v2 and v3, and 1 for later ones."""
    old = _TWO_CORES in _find_chips() or (environ.get("TPU_ACCELERATOR_TYPE") or "").startswith(
        ("v2-", "v3-")
    )
    return 2 if old else 1


def _find_chips() -> list[str]:
    """Return the PCI device id of each chip."""
    found = []
    for vendor in _ROOT.glob("sys/bus/pci/devices/*/vendor"):
        try:
            if vendor.read_text().strip() == _GOOGLE:
                found.append(vendor.with_name("device").read_text().strip())
        except OSError:
            continue  # the device was removed, or we may not read it
    return [name for name in found if name in _CHIPS]


def _files(pattern: str) -> int:
    return sum(1 for _ in _ROOT.glob(pattern))


def _product(name: str) -> int:
    """Return the product of bounds such as `2,2,1`; 0 if the variable has none."""
    words = (environ.get(name) or "").split(",")
    are_numbers = all(word.strip().isdecimal() and len(word) < 10 for word in words)
    return math.prod(map(int, words)) if are_numbers else 0


def _device_type(text: str) -> str:
    return text.strip().upper().partition("_")[0]
