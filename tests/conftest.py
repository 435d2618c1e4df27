"""Settings of the whole suite: examples are drawn from fixed seeds, and no test looks at a clock."""
import os

import pytest
from hypothesis import HealthCheck, settings

COMMON = dict(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
settings.register_profile("default", max_examples=100, **COMMON)
settings.register_profile("long", max_examples=2000, **COMMON)
settings.load_profile(os.environ.get("MMCORE_TEST_PROFILE", "default"))


def pytest_addoption(parser):
    parser.addoption("--change-system", action="store_true",
                     help="let tests change huge page settings and pools, as root; they put back what they found")


@pytest.fixture
def change_system(request):
    """A function (path, value) that writes a setting of the system, which is put back after the test."""
    if not request.config.getoption("--change-system"):
        pytest.skip("it changes a setting of the system: run pytest --change-system as root")
    found = []

    def change(path, value):
        with open(path) as file:
            text = file.read()
        # A switch shows all words, and the chosen one in brackets.
        before = text[text.find("[") + 1:text.find("]")] if "[" in text else text.strip()
        try:
            with open(path, "w") as file:
                file.write(str(value))
        except PermissionError:
            pytest.skip(f"{path} may not be written: run as root")
        found.append((path, before))

    yield change
    for path, before in reversed(found):
        with open(path, "w") as file:
            file.write(before)
