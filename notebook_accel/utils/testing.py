"""What tests of libraries take from Accelerate: the device of this machine, and marks of tests that need something."""

from __future__ import annotations

import functools
import importlib
import unittest
from collections.abc import Callable
from typing import Any, Final

import torch

from .. import devices, environ, probes
from ..state import PartialState
from . import availability, libraries, machine, operations
from .availability import compare_versions, is_torch_version

_EXTENDED: Final = ("mlu", "sdaa", "musa", "npu", "xpu", "hpu", "neuron")


def get_backend() -> tuple[str, int, Callable[[], int]]:
    """Return the kind of device that tests run on, how many there are, and what tells the bytes allocated there."""
    if availability.is_torch_xla_available():
        return "xla", torch.cuda.device_count(), torch.cuda.memory_allocated
    if devices.count("cuda"):
        return "cuda", torch.cuda.device_count(), torch.cuda.memory_allocated
    if devices.count("mps"):
        return "mps", 1, torch.mps.current_allocated_memory
    for kind in _EXTENDED:
        if number := devices.count(kind):
            return kind, number, getattr(torch, kind).memory_allocated
    return "cpu", 1, lambda: 0


torch_device, device_count, memory_allocated_func = get_backend()


def get_launch_command(**kwargs: Any) -> list[str]:
    """Return the words of a launch, without the script.

    Args:
        kwargs: flags and their values; True for a flag without one, None for no flag.
    """
    given = {key: value for key, value in kwargs.items() if value is not None}
    flags = [f"--{key}" if value is True else f"--{key}={value}" for key, value in given.items()]
    return ["accelerate", "launch", *flags]


def skip(test_case: Any) -> Any:
    """Mark a test that never runs."""
    return unittest.skip("it is always skipped")(test_case)


def slow(test_case: Any) -> Any:
    """Mark a test that runs only where the variable RUN_SLOW is true."""
    return unittest.skipUnless(environ.parse_bool(environ.snapshot().get("RUN_SLOW") or "0"), "it is slow")(
        test_case
    )


def run_first(test_case: Any) -> Any:
    """Mark a test that pytest-order runs before the others."""
    return (
        importlib.import_module("pytest").mark.order(1)(test_case)
        if probes.is_available("pytest")
        else test_case
    )


def are_the_same_tensors(tensor: torch.Tensor) -> bool:
    """Return True if a tensor has the same values in all processes.

    Args:
        tensor: of this process.
    """
    found = operations.gather(tensor[None].clone().to(PartialState().device))
    return all(torch.equal(one, tensor.to(one.device)) for one in found)


def require_torch_min_version(test_case: Any = None, version: str | None = None) -> Any:
    """Mark a test that needs a version of torch.

    Args:
        test_case: the test; None for a decorator.
        version: the oldest one.
    """
    if test_case is None:
        return functools.partial(require_torch_min_version, version=version)
    return unittest.skipUnless(is_torch_version(">=", str(version)), f"needs torch {version}")(test_case)


def _require(condition: Callable[[], bool], what: str) -> Callable[[Any], Any]:
    """Return a decorator of tests that are skipped without something."""

    def mark(test_case: Any) -> Any:
        return unittest.skipUnless(condition(), f"needs {what}")(test_case)

    mark.__doc__ = f"Mark a test that needs {what}."
    return mark


def _has(*kinds: str) -> Callable[[], bool]:
    return lambda: any(devices.count(kind) > 0 for kind in kinds)


def _has_gpu() -> bool:
    return devices.count("cuda") > 0 and not availability.is_torch_xla_available()


def _has_tracker() -> bool:
    known = ("wandb", "tensorboard", "trackio", "swanlab")
    return any(getattr(availability, f"is_{name}_available")() for name in known) and not (
        availability.is_comet_ml_available()
    )


require_cpu = _require(lambda: torch_device == "cpu", "a machine without an accelerator")
require_non_cpu = _require(lambda: torch_device != "cpu", "an accelerator")
require_non_xpu = _require(lambda: torch_device != "xpu", "another device than an XPU")
require_non_hpu = _require(lambda: torch_device != "hpu", "another device than an HPU")
require_cuda = _require(_has_gpu, "a CUDA GPU")
require_cuda_or_hpu = _require(lambda: _has_gpu() or devices.count("hpu") > 0, "a CUDA GPU or an HPU")
require_cuda_or_xpu = _require(lambda: _has_gpu() or devices.count("xpu") > 0, "a CUDA GPU or an XPU")
require_xpu = _require(_has("xpu"), "an XPU")
require_mlu = _require(_has("mlu"), "an MLU")
require_sdaa = _require(_has("sdaa"), "an SDAA")
require_musa = _require(_has("musa"), "a MUSA")
require_npu = _require(_has("npu"), "an NPU")
require_neuron = _require(_has("neuron"), "Neuron cores")
require_mps = _require(_has("mps"), "an Apple GPU")
require_tpu = _require(lambda: availability.is_torch_xla_available(check_is_tpu=True), "a TPU")
require_non_torch_xla = _require(lambda: not availability.is_torch_xla_available(), "no torch_xla")
require_single_device = _require(lambda: torch_device != "cpu" and device_count == 1, "one accelerator")
require_multi_device = _require(lambda: device_count > 1, "several accelerators")
require_single_gpu = _require(lambda: torch.cuda.device_count() == 1, "one CUDA GPU")
require_multi_gpu = _require(lambda: torch.cuda.device_count() > 1, "several CUDA GPUs")
require_single_xpu = _require(lambda: torch.xpu.device_count() == 1, "one XPU")
require_multi_xpu = _require(lambda: torch.xpu.device_count() > 1, "several XPUs")
require_multi_gpu_or_xpu = _require(
    lambda: devices.count("cuda") + devices.count("xpu") > 0 and device_count > 1, "several GPUs or XPUs"
)
require_fp16 = _require(availability.is_fp16_available, "float16")
require_fp8 = _require(
    lambda: (
        libraries.is_fp8_available()
        and (not torch.cuda.is_available() or machine.check_cuda_fp8_capability())
    ),
    "float8",
)
require_fsdp2 = _require(lambda: is_torch_version(">=", "2.5.0"), "torch 2.5")
require_tp = _require(
    lambda: is_torch_version(">=", "2.3.0") and compare_versions("transformers", ">=", "4.52.0"),
    "torch 2.3 and transformers 4.52",
)
require_huggingface_suite = _require(
    lambda: availability.is_transformers_available() and availability.is_datasets_available(),
    "transformers and datasets",
)
require_trackers = _require(_has_tracker, "a tracking library other than comet_ml")
require_aim = _require(availability.is_aim_available, "aim")
require_bnb = _require(libraries.is_bnb_available, "bitsandbytes")
require_clearml = _require(availability.is_clearml_available, "clearml")
require_comet_ml = _require(availability.is_comet_ml_available, "comet_ml")
require_datasets = _require(availability.is_datasets_available, "datasets")
require_deepspeed = _require(availability.is_deepspeed_available, "deepspeed")
require_dvclive = _require(availability.is_dvclive_available, "dvclive")
require_import_timer = _require(libraries.is_import_timer_available, "import_timer")
require_matplotlib = _require(libraries.is_matplotlib_available, "matplotlib")
require_mlflow = _require(availability.is_mlflow_available, "mlflow")
require_pandas = _require(availability.is_pandas_available, "pandas")
require_peft = _require(libraries.is_peft_available, "peft")
require_pippy = _require(libraries.is_pippy_available, "torch.distributed.pipelining")
require_schedulefree = _require(libraries.is_schedulefree_available, "schedulefree")
require_swanlab = _require(availability.is_swanlab_available, "swanlab")
require_tensorboard = _require(availability.is_tensorboard_available, "tensorboard")
require_timm = _require(libraries.is_timm_available, "timm")
require_torchao = _require(libraries.is_torchao_available, "torchao")
require_torchdata_stateful_dataloader = _require(
    libraries.is_torchdata_stateful_dataloader_available, "torchdata.stateful_dataloader"
)
require_torchvision = _require(libraries.is_torchvision_available, "torchvision")
require_trackio = _require(availability.is_trackio_available, "trackio")
require_transformer_engine = _require(libraries.is_transformer_engine_available, "transformer_engine")
require_transformer_engine_mxfp8 = _require(
    libraries.is_transformer_engine_mxfp8_available, "transformer_engine with MXFP8"
)
require_transformers = _require(availability.is_transformers_available, "transformers")
require_triton = _require(libraries.is_triton_available, "triton")
require_wandb = _require(availability.is_wandb_available, "wandb")
