"""Hypothesis profiles: `default`, repeatable `ci` (CI=true), shorter ones, and `long`."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, Phase, settings

# Cases are whole pairs of engines, which take long to draw on a busy machine.
SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]

settings.register_profile("default", deadline=None, suppress_health_check=SLOW)
settings.register_profile(
    "ci", deadline=None, derandomize=True, database=None, suppress_health_check=SLOW
)
# `.ci/run` draws the same cases each time, so more of them find little. The nightly run draws
# others, and 20 cases found nineteen of twenty mutants.
settings.register_profile("checks", settings.get_profile("ci"), max_examples=10)
settings.register_profile(
    "long", deadline=None, max_examples=5000, suppress_health_check=SLOW, print_blob=True
)
settings.register_profile(
    "mutants",
    settings.get_profile("ci"),
    # A mutant runs all judges of its package, so each law must be short. Shrinking is left out,
    # because only the fact of a failure counts.
    max_examples=20,
    phases=[Phase.explicit, Phase.generate],
)
# Coverage doubles the time of each law. Eight cases of each law still reach every branch that the
# other tests leave.
settings.register_profile("covered", settings.get_profile("mutants"), max_examples=8)
# Ranks refuse to connect without a secret. Processes that tests start inherit this one.
os.environ.setdefault("KVSPEC_SECRET", "the secret of all tests")
settings.load_profile(
    os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") == "true" else "default")
)
