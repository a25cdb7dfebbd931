"""Names of `accelerate.utils` for libraries that are not supported; using one raises NotImplementedError."""

from __future__ import annotations

from typing import Any, Final, NoReturn

_MEGATRON: Final = (
    "training with Megatron-LM is not supported; several GPUs train with the Accelerator's data parallelism"
)
_TRANSFORMER_ENGINE: Final = (
    "fp8 with Transformer Engine is not supported; torchao's is (pip install torchao): "
    "Accelerator(mixed_precision='fp8')"
)
_SEQUENCES: Final = (
    "DeepSpeed's sequence parallel (Ulysses, ALST) is not supported: leave sp_size out. On GPUs "
    "ParallelismConfig(cp_size=...) with FSDP splits sequences"
)
_RECIPES: Final = "this recipe for fp8 is not supported; torchao's is (pip install torchao): AORecipeKwargs"


class _Refused(type):
    """Metaclass: a class with a `reason` cannot be instantiated or subclassed."""

    reason: str

    def __new__(mcs, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> _Refused:
        for base in bases:
            if isinstance(base, _Refused):
                raise NotImplementedError(f"{base.__name__}: {base.reason}")
        return super().__new__(mcs, name, bases, namespace)

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"{cls.__name__}: {cls.reason}")


def _make_refusing_class(name: str, reason: str) -> Any:
    namespace = {
        "reason": reason,
        "__module__": __name__,
        "__doc__": f"Raises NotImplementedError: {reason}.",
    }
    return _Refused(name, (), namespace)


def _make_refusing_function(name: str, reason: str) -> Any:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"{name}: {reason}")

    refuse.__name__ = refuse.__qualname__ = name
    refuse.__doc__ = f"Raise NotImplementedError: {reason}."
    return refuse


MegatronLMPlugin: Any = _make_refusing_class("MegatronLMPlugin", _MEGATRON)
MegatronLMDummyDataLoader: Any = _make_refusing_class("MegatronLMDummyDataLoader", _MEGATRON)
MegatronLMDummyScheduler: Any = _make_refusing_class("MegatronLMDummyScheduler", _MEGATRON)
AbstractTrainStep: Any = _make_refusing_class("AbstractTrainStep", _MEGATRON)
BertTrainStep: Any = _make_refusing_class("BertTrainStep", _MEGATRON)
GPTTrainStep: Any = _make_refusing_class("GPTTrainStep", _MEGATRON)
T5TrainStep: Any = _make_refusing_class("T5TrainStep", _MEGATRON)
avg_losses_across_data_parallel_group: Any = _make_refusing_function(
    "avg_losses_across_data_parallel_group", _MEGATRON
)

DeepSpeedSequenceParallelConfig: Any = _make_refusing_class("DeepSpeedSequenceParallelConfig", _SEQUENCES)

FP8RecipeKwargs: Any = _make_refusing_class("FP8RecipeKwargs", _RECIPES)
MSAMPRecipeKwargs: Any = _make_refusing_class("MSAMPRecipeKwargs", _RECIPES)
TERecipeKwargs: Any = _make_refusing_class("TERecipeKwargs", _RECIPES)
convert_model: Any = _make_refusing_function("convert_model", _TRANSFORMER_ENGINE)
apply_fp8_autowrap: Any = _make_refusing_function("apply_fp8_autowrap", _TRANSFORMER_ENGINE)
contextual_fp8_autocast: Any = _make_refusing_function("contextual_fp8_autocast", _TRANSFORMER_ENGINE)


def install_xla(upgrade: bool = False) -> NoReturn:
    """Raise NotImplementedError with the command that installs torch_xla. Nothing is installed.

    Args:
        upgrade: name the newest torch too.
    """
    import torch

    release = ".".join(torch.__version__.partition("+")[0].split(".")[:2])
    wanted = "torch torch_xla[tpu]" if upgrade else f"torch_xla[tpu]~={release}.0"
    raise NotImplementedError(
        f"install_xla: packages are yours to install; `pip install {'-U ' if upgrade else ''}'{wanted}'` "
        f"has torch_xla for torch {release}, if there is one"
    )
