"""How Hypothesis works in the tests of this folder."""

from __future__ import annotations

from hypothesis import Phase, settings

# without the phase that explains: of an example with a hundred options it takes minutes
settings.register_profile(
    "short", phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink), print_blob=True
)
settings.load_profile("short")
