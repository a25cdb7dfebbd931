"""Whether the tests of combinations try all cells of their tables: MATRIX=all in the environment."""

from __future__ import annotations

import os
from typing import Final

TRIES_ALL: Final = os.environ.get("MATRIX") == "all"
SECONDS: Final = 3600 if TRIES_ALL else 240
"""For the ranks of such a test."""
