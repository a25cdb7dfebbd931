"""Names that users import from `accelerate.utils.deepspeed`."""

from ..strategies.deepspeed_parts import (
    DeepSpeedEngineWrapper,
    DeepSpeedOptimizerWrapper,
    DeepSpeedSchedulerWrapper,
)
from ..zero.chosen import get_active_deepspeed_plugin
from ..zero.config import HfDeepSpeedConfig
from ..zero.dummies import DummyOptim, DummyScheduler

__all__ = [
    "DeepSpeedEngineWrapper",
    "DeepSpeedOptimizerWrapper",
    "DeepSpeedSchedulerWrapper",
    "DummyOptim",
    "DummyScheduler",
    "HfDeepSpeedConfig",
    "get_active_deepspeed_plugin",
]
