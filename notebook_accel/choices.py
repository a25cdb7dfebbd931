"""Choice: a base for enumerations whose members are strings."""

from __future__ import annotations

from enum import Enum, EnumMeta
from typing import Any


class ChoiceMeta(EnumMeta):
    """Metaclass of `Choice`: `in` takes values too."""

    def __contains__(cls, value: object) -> bool:
        try:
            cls(value)
        except ValueError:
            return False
        return True


class Choice(str, Enum, metaclass=ChoiceMeta):
    """Base of enumerations such as `PrecisionType`; `"bf16" in PrecisionType` works."""

    def __str__(self) -> str:
        return str(self.value)

    @classmethod
    def list(cls) -> list[Any]:
        """Return the legal values in the order of definition."""
        return [member.value for member in cls]


class CustomDtype(Enum):
    """Number formats that torch does not have, for the sizes of models."""

    FP8 = "fp8"
    INT4 = "int4"
    INT2 = "int2"


class ComputeEnvironment(Choice):
    """Where a run takes place."""

    LOCAL_MACHINE = "LOCAL_MACHINE"
    AMAZON_SAGEMAKER = "AMAZON_SAGEMAKER"


class SageMakerDistributedType(Choice):
    """How a run on Amazon SageMaker is distributed."""

    NO = "NO"
    DATA_PARALLEL = "DATA_PARALLEL"
    MODEL_PARALLEL = "MODEL_PARALLEL"


class DistributedType(Choice):
    """How the processes of a run work together."""

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    MULTI_NPU = "MULTI_NPU"
    MULTI_MLU = "MULTI_MLU"
    MULTI_SDAA = "MULTI_SDAA"
    MULTI_MUSA = "MULTI_MUSA"
    MULTI_XPU = "MULTI_XPU"
    MULTI_HPU = "MULTI_HPU"
    MULTI_NEURON = "MULTI_NEURON"
    DEEPSPEED = "DEEPSPEED"
    FSDP = "FSDP"
    XLA = "XLA"
    MEGATRON_LM = "MEGATRON_LM"

    def __str__(self) -> str:
        """Return the name with that of the class, by which libraries tell it; `value` is the word alone."""
        return f"{type(self).__name__}.{self.name}"
