"""Settings of the whole suite: examples are drawn from fixed seeds, and no test looks at a clock."""
import os

from hypothesis import HealthCheck, settings

COMMON = dict(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
settings.register_profile("default", max_examples=100, **COMMON)
settings.register_profile("long", max_examples=2000, **COMMON)
settings.load_profile(os.environ.get("MMCORE_TEST_PROFILE", "default"))
