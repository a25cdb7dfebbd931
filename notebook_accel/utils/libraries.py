"""Tells which libraries and kinds of devices there are, under Accelerate's names; none of it imports a library."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import torch

from .. import devices, probes
from ..state import AcceleratorState, DistributedType
from .availability import is_torch_xla_available

USE_TORCH_XLA: Final = is_torch_xla_available()


def _make_probe(name: str, *modules: str) -> Callable[[], bool]:
    """Return a function that tells whether one of these modules can be imported."""

    def probe() -> bool:
        return any(map(probes.is_available, modules))

    probe.__name__ = probe.__qualname__ = name
    probe.__doc__ = f"Return True if {' or '.join(modules)} is installed."
    return probe


def _make_device_probe(name: str, kind: str) -> Callable[..., bool]:
    """Return a function that tells whether there is a device of a kind."""

    def probe(check_device: bool = False) -> bool:
        return devices.count(kind) > 0

    probe.__name__ = probe.__qualname__ = name
    probe.__doc__ = f"Return True if there is a device of the kind {kind!r}; `check_device` has no effect."
    return probe


is_amdsmi_available = _make_probe("is_amdsmi_available", "amdsmi")
is_boto3_available = _make_probe("is_boto3_available", "boto3")
is_import_timer_available = _make_probe("is_import_timer_available", "import_timer")
is_lomo_available = _make_probe("is_lomo_available", "lomo_optim")
is_matplotlib_available = _make_probe("is_matplotlib_available", "matplotlib")
is_peft_available = _make_probe("is_peft_available", "peft")
is_pynvml_available = _make_probe("is_pynvml_available", "pynvml")
is_pytest_available = _make_probe("is_pytest_available", "pytest")
is_sagemaker_available = _make_probe("is_sagemaker_available", "sagemaker")
is_schedulefree_available = _make_probe("is_schedulefree_available", "schedulefree")
is_timm_available = _make_probe("is_timm_available", "timm")
is_torchdata_available = _make_probe("is_torchdata_available", "torchdata")
is_torchvision_available = _make_probe("is_torchvision_available", "torchvision")
is_triton_available = _make_probe("is_triton_available", "triton")

is_mlu_available = _make_device_probe("is_mlu_available", "mlu")
is_musa_available = _make_device_probe("is_musa_available", "musa")
is_neuron_available = _make_device_probe("is_neuron_available", "neuron")
is_sdaa_available = _make_device_probe("is_sdaa_available", "sdaa")


def is_hpu_available(init_hccl: bool = False) -> bool:
    """Return True if there is a Gaudi.

    Args:
        init_hccl: has no effect; its communication is loaded where a process group asks for it.
    """
    return devices.count("hpu") > 0


def is_bnb_available(min_version: str | None = None) -> bool:
    """Return True if bitsandbytes is installed.

    Args:
        min_version: its oldest version that counts.
    """
    return probes.is_available("bitsandbytes") and probes.at_least("bitsandbytes", min_version or "0")


def is_4bit_bnb_available() -> bool:
    """Return True if bitsandbytes is installed, with layers of 4 bits."""
    return is_bnb_available("0.39.0")


def is_8bit_bnb_available() -> bool:
    """Return True if bitsandbytes is installed, with layers of 8 bits."""
    return is_bnb_available("0.37.2")


def is_bitsandbytes_multi_backend_available() -> bool:
    """Return True if bitsandbytes is installed and runs on devices other than CUDA's too."""
    return is_bnb_available("0.46")


def is_torchao_available() -> bool:
    """Return True if torchao is installed, with float8 training."""
    return probes.at_least("torchao", "0.6.1")


def is_fp8_available() -> bool:
    """Return True if a library that computes in float8 is installed: torchao."""
    return is_torchao_available()


def is_msamp_available() -> bool:
    """Return False: MS-AMP is not supported."""
    return False


def is_transformer_engine_available() -> bool:
    """Return False: float8 by Transformer Engine is not supported."""
    return False


def is_transformer_engine_mxfp8_available() -> bool:
    """Return False: float8 by Transformer Engine is not supported."""
    return False


def is_megatron_lm_available() -> bool:
    """Return False: Megatron-LM is not supported."""
    return False


def is_habana_gaudi1() -> bool:
    """Return False: this generation of Gaudi is not supported."""
    return False


def is_rocm_available() -> bool:
    """Return True if there is a GPU of AMD."""
    return torch.version.hip is not None and devices.count("cuda") > 0


def is_xccl_available() -> bool:
    """Return True if this torch has collectives for Intel GPUs."""
    return torch.distributed.is_available() and torch.distributed.is_xccl_available()


def is_torch_distributed_available() -> bool:
    """Return True if this torch has process groups."""
    return torch.distributed.is_available()


def is_torchdata_stateful_dataloader_available() -> bool:
    """Return True if torchdata is installed, with loaders that have a state."""
    return probes.at_least("torchdata", "0.8.0")


def is_pippy_available() -> bool:
    """Return True: every torch that is supported has pipelines."""
    return True


def is_weights_only_available() -> bool:
    """Return True: `weights_only` of every torch that is supported takes a list of safe globals."""
    return True


def is_numpy_available(min_version: str = "1.25.0") -> bool:
    """Return True if numpy is installed.

    Args:
        min_version: its oldest version that counts.
    """
    return probes.at_least("numpy", min_version)


def torchao_required(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function to raise ImportError without torchao.

    Args:
        func: the function.
    """

    @functools.wraps(func)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not is_torchao_available():
            raise ImportError(f"{func.__name__} needs torchao: pip install torchao")
        return func(*args, **kwargs)

    return call


def deepspeed_required(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function to raise ValueError where there is an accelerator and DeepSpeed does not train.

    Args:
        func: the function.
    """

    @functools.wraps(func)
    def call(*args: Any, **kwargs: Any) -> Any:
        state = AcceleratorState(_from_accelerator=True)
        if state.initialized and state.distributed_type != DistributedType.DEEPSPEED:
            raise ValueError(f"{func.__name__} needs DeepSpeed: give Accelerator a deepspeed_plugin")
        return func(*args, **kwargs)

    return call
