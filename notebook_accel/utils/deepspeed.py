"""Names that users import from `accelerate.utils.deepspeed`."""

from ..deepspeed.config import HfDeepSpeedConfig
from ..deepspeed.dummies import DummyOptim, DummyScheduler
from ..deepspeed.resolve import get_active_deepspeed_plugin
from ..deepspeed.wrappers import DeepSpeedEngineWrapper, DeepSpeedOptimizerWrapper, DeepSpeedSchedulerWrapper
from ..takeover.names import complete_names

__all__ = [
    "DeepSpeedEngineWrapper",
    "DeepSpeedOptimizerWrapper",
    "DeepSpeedSchedulerWrapper",
    "DummyOptim",
    "DummyScheduler",
    "HfDeepSpeedConfig",
    "get_active_deepspeed_plugin",
]


complete_names(__name__)
