"""The names that users import from `accelerate.utils.dataclasses`; they are defined in other modules."""

from ..choices import Choice as BaseEnum
from ..choices import ChoiceMeta as EnumWithContains
from ..choices import ComputeEnvironment, SageMakerDistributedType
from ..compilation import DynamoBackend, TorchDynamoPlugin
from ..deepspeed.plugin import DeepSpeedPlugin
from ..fp8 import AORecipeKwargs, FP8BackendType
from ..fsdp import FullyShardedDataParallelPlugin
from ..handlers import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    ProfileKwargs,
    ProjectConfiguration,
)
from ..parallelism import TorchContextParallelConfig, TorchTensorParallelConfig, TorchTensorParallelPlugin
from ..precision import PrecisionType
from ..quantization import BnbQuantizationConfig
from ..seeding import RNGType
from ..state import DistributedType
from ..takeover.names import complete_names
from ..tracking import LoggerType
from .other import CustomDtype, get_module_class_from_name
from .structure import TensorInformation
from .vendor import (
    DeepSpeedSequenceParallelConfig,
    FP8RecipeKwargs,
    MegatronLMPlugin,
    MSAMPRecipeKwargs,
    TERecipeKwargs,
)

__all__ = [
    "AORecipeKwargs",
    "AutocastKwargs",
    "BaseEnum",
    "BnbQuantizationConfig",
    "ComputeEnvironment",
    "CustomDtype",
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "DeepSpeedPlugin",
    "DeepSpeedSequenceParallelConfig",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "DynamoBackend",
    "EnumWithContains",
    "FP8BackendType",
    "FP8RecipeKwargs",
    "FullyShardedDataParallelPlugin",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "InitProcessGroupKwargs",
    "KwargsHandler",
    "LoggerType",
    "MSAMPRecipeKwargs",
    "MegatronLMPlugin",
    "PrecisionType",
    "ProfileKwargs",
    "ProjectConfiguration",
    "RNGType",
    "SageMakerDistributedType",
    "TERecipeKwargs",
    "TensorInformation",
    "TorchContextParallelConfig",
    "TorchDynamoPlugin",
    "TorchTensorParallelConfig",
    "TorchTensorParallelPlugin",
    "get_module_class_from_name",
]

complete_names(__name__)
