"""Hypothesis profiles: `default`, repeatable `ci` (chosen by CI=true), `long` to explore."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]

settings.register_profile("default", deadline=None, suppress_health_check=SLOW)
settings.register_profile(
    "ci", deadline=None, derandomize=True, database=None, suppress_health_check=SLOW
)
settings.register_profile(
    "long", deadline=None, max_examples=5000, suppress_health_check=SLOW, print_blob=True
)
os.environ.setdefault("KVSPEC_SECRET", "the secret of all tests")
settings.load_profile(
    os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") == "true" else "default")
)
