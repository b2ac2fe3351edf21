"""Hypothesis profiles: `default`, repeatable `ci` (CI=true), its short `mutants`, `long`."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, Phase, settings

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]

settings.register_profile("default", deadline=None, suppress_health_check=SLOW)
settings.register_profile(
    "ci", deadline=None, derandomize=True, database=None, suppress_health_check=SLOW
)
settings.register_profile(
    "long", deadline=None, max_examples=5000, suppress_health_check=SLOW, print_blob=True
)
settings.register_profile(
    "mutants",
    settings.get_profile("ci"),
    max_examples=20,
    phases=[Phase.explicit, Phase.generate],
)
os.environ.setdefault("KVSPEC_SECRET", "the secret of all tests")
os.environ["KVSPEC_CALIBRATION"] = "/nonexistent"  # the costs are the stated ones
settings.load_profile(
    os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") == "true" else "default")
)
