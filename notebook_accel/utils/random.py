"""The names that users import from `accelerate.utils.random`; they are defined in other modules."""

from ..seeding import set_seed, synchronize_rng_state, synchronize_rng_states
from ..takeover.names import complete_names

__all__ = ["set_seed", "synchronize_rng_state", "synchronize_rng_states"]

complete_names(__name__)
