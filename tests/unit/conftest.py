"""How Hypothesis works in the tests of this folder."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, settings

# Without the phase that explains: of an example with a hundred options it takes minutes. Nor is anything measured: an
# example, or what makes it, may take seconds on a busy machine.
settings.register_profile(
    "short",
    phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink),
    print_blob=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("short")
