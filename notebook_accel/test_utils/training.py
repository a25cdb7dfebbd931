"""The names that users import from `accelerate.test_utils.training`; they are defined in other modules."""

from ..takeover.names import complete_names
from ..utils.testing_models import RegressionDataset, RegressionModel

__all__ = ["RegressionDataset", "RegressionModel"]

complete_names(__name__)
