"""Which TPU chips this machine has: read from its variables and files, the runtime stays untouched."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal

from . import environ, probes

Mode = Literal["process", "spmd"]

MODES: Final[tuple[Mode, ...]] = ("process", "spmd")
_ROOT: Final = Path("/")
_GOOGLE: Final = "0x1ae0"
_TWO_CORES: Final = "0x0027"  # TPU v2 and v3: each chip is two devices
_CHIPS: Final = {_TWO_CORES, "0x005e", "0x0056", "0x0062", "0x0063", "0x006f", "0x0076"}
"""PCI device ids, those of `torch_xla._internal.tpu`."""


def is_here(environment: Mapping[str, str] | None = None) -> bool:
    """Whether this machine has a TPU that torch_xla is to use: PJRT_DEVICE decides where it is set.

    TPU_NAME alone may be a setting of Google's command line tools, so it counts where torch_xla is installed.

    Args:
        environment: variables that count more than this process's.
    """
    chosen = (environment or {}).get("PJRT_DEVICE") or environ.get("PJRT_DEVICE")
    if chosen:
        return _device_type(chosen) == "TPU"
    named = bool(environ.get("TPU_NAME")) and probes.is_available("torch_xla")
    return named or _is_vm() or bool(_attached() or _files("dev/accel[0-9]*"))


def pjrt_device(environment: Mapping[str, str] | None = None) -> str:
    """Return what torch_xla's runtime runs on: `TPU`, `CPU` and so on; empty where nothing says it.

    Args:
        environment: variables that count more than this process's.
    """
    chosen = (environment or {}).get("PJRT_DEVICE") or environ.get("PJRT_DEVICE") or ""
    return _device_type(chosen) or ("TPU" if is_here() else "")


def chips(environment: Mapping[str, str] | None = None) -> int:
    """Return the chips of this machine; 1 where there is a TPU and nothing counts them, 0 where there is none.

    Args:
        environment: variables that count more than this process's.
    """
    if not is_here(environment):
        return 0
    files = _files("dev/accel[0-9]*") or _files("dev/vfio/[0-9]*")
    return len(_attached()) or files or _product("TPU_CHIPS_PER_HOST_BOUNDS") or 1


def num_processes(environment: Mapping[str, str] | None = None) -> int:
    """Return the processes that use all chips, one each: no more than TPU_PROCESS_BOUNDS has.

    Args:
        environment: variables that count more than this process's.
    """
    number = chips(environment)
    if len(visible_chips()) == 1:
        return min(number, 1)
    return min(number, _product("TPU_PROCESS_BOUNDS") or number)


def visible_chips() -> tuple[str, ...]:
    """Return the chips that TPU_VISIBLE_CHIPS names; empty where it does not."""
    text = environ.get("TPU_VISIBLE_CHIPS") or ""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def devices_per_chip() -> int:
    """Return 2 for TPU v2 and v3, and 1 for later ones."""
    old = _TWO_CORES in _attached() or (environ.get("TPU_ACCELERATOR_TYPE") or "").startswith(("v2-", "v3-"))
    return 2 if old else 1


def _is_vm() -> bool:
    return (environ.get("ISTPUVM") or "").strip().lower() in ("1", "true")


def _attached() -> list[str]:
    """Return the PCI device id of each chip."""
    found = []
    for vendor in _ROOT.glob("sys/bus/pci/devices/*/vendor"):
        try:
            if vendor.read_text().strip() == _GOOGLE:
                found.append(vendor.with_name("device").read_text().strip())
        except OSError:
            continue  # it was taken out, or is not ours to read
    return [name for name in found if name in _CHIPS]


def _files(pattern: str) -> int:
    return sum(1 for _ in _ROOT.glob(pattern))


def _product(name: str) -> int:
    """Return the product of bounds like `2,2,1`, 0 where the variable has none."""
    words = (environ.get(name) or "").split(",")
    return math.prod(map(int, words)) if all(word.strip().isdecimal() for word in words) else 0


def _device_type(text: str) -> str:
    return text.strip().upper().partition("_")[0]
