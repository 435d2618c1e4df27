"""100,000 random calls, mostly wrong: no crash, no undocumented exception, no broken law."""
import os

import pytest

from calls import CALLS
from fuzz import SHAPES, UNBALANCED, Fuzz
from mmcore import BadPage, InvalidArgument, MMError

SEEDS = range(3)
STEPS = int(os.environ.get("MMCORE_FUZZ_STEPS", 100_000)) // (len(SHAPES) * len(SEEDS)) + 1


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", SEEDS)
def test_random_calls(shape, seed):
    fuzz = Fuzz(shape, seed)
    for i in range(STEPS):
        fuzz.step()
        if i % 250 == 0:
            fuzz.mem.check()
            fuzz.other.check()
    fuzz.mem.check()
    fuzz.other.check()
    # The mix is what it claims to be: everything is called, most calls are refused, and many go through.
    assert {name for name in CALLS if name not in UNBALANCED and not fuzz.calls.get(name)} == set()
    refused = sum(fuzz.refusals.values())
    assert STEPS // 4 < refused < sum(fuzz.calls.values()) * 0.85
    assert {MMError, InvalidArgument, BadPage, TypeError} <= fuzz.refusals.keys()
    assert fuzz.compared > STEPS // 100
    # No call, however it ended, still counts as running or keeps a view.
    fuzz.mem.close()
    fuzz.other.close()
