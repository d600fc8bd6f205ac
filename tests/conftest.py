"""What all tests share: how hard Hypothesis looks."""

import os

from hypothesis import HealthCheck, settings

# No deadline anywhere: on a shared machine a slow example is not a wrong one.
_slow_is_fine = [HealthCheck.too_slow]
settings.register_profile(
    "dev", max_examples=50, deadline=None, suppress_health_check=_slow_is_fine
)
settings.register_profile(
    "ci",
    max_examples=150,
    deadline=None,
    derandomize=True,
    print_blob=True,
    suppress_health_check=_slow_is_fine,
)
settings.register_profile(
    "nightly", max_examples=5000, deadline=None, suppress_health_check=_slow_is_fine
)
settings.load_profile(
    os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "dev")
)
