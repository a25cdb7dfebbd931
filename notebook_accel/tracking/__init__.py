"""Experiment trackers: one contract, a thin adapter for each library, a table of them, the choice by `log_with`."""

from ..takeover.names import complete_names
from .aim import AimTracker
from .base import GeneralTracker, on_main_process
from .choose import choose_trackers, register_tracker_class
from .choose import choose_trackers as filter_trackers
from .clearml import ClearMLTracker
from .comet import CometMLTracker
from .dvclive import DVCLiveTracker
from .mlflow import MLflowTracker
from .runs import SwanLabTracker, TrackioTracker, WandBTracker
from .table import LoggerType, tracker_class
from .tensorboard import TensorBoardTracker

__all__ = [
    "AimTracker",
    "ClearMLTracker",
    "CometMLTracker",
    "DVCLiveTracker",
    "GeneralTracker",
    "LoggerType",
    "MLflowTracker",
    "SwanLabTracker",
    "TensorBoardTracker",
    "TrackioTracker",
    "WandBTracker",
    "choose_trackers",
    "filter_trackers",
    "on_main_process",
    "register_tracker_class",
    "tracker_class",
]


complete_names(__name__)
