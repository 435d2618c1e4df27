"""The pytest plugin: memories that fail the test that leaks a pin in them.

Loaded by every pytest run of an environment that has mmcore: so the engine is imported by the fixtures, not here.
"""
import contextlib

import pytest

_FAILED = pytest.StashKey[bool]()

MARK = "mmcore_memory(size='256M', **arguments): the Memory that the fixtures mmcore_memory and pin_ledger give the test"


def pytest_configure(config):
    config.addinivalue_line("markers", MARK)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item, call):
    if call.when == "call" and call.excinfo is not None:
        item.stash[_FAILED] = True


@pytest.fixture
def _mmcore_watched(request):
    import mmcore

    mark = request.node.get_closest_marker("mmcore_memory")
    size, arguments = (mark.args or ("256M",), dict(mark.kwargs)) if mark else (("256M",), {})
    if "size" in arguments:
        size = (arguments.pop("size"),)
    mem = mmcore.Memory(*size, **arguments)
    ledger = mmcore.PinLedger(mem)
    with ledger:
        yield mem, ledger
    # What the test's other fixtures held is released by now. A test that failed by itself is not blamed for what its
    # unwinding left.
    failed = request.node.stash.get(_FAILED, False)
    if mem.closed:
        return
    try:
        if not failed:
            _judge(mem, ledger, request.node.nodeid)
    finally:
        with contextlib.suppress(mmcore.MMError):       # a view of it is alive: it goes with the view
            mem.close()


def _judge(mem, ledger, test):
    import mmcore

    wrong = None
    try:
        ledger.assert_balanced()
        stat = mem.vmstat()
        left = stat["nr_foll_pin_acquired"] - stat["nr_foll_pin_released"]
        if left:
            raise mmcore.BadPage("every pin is released", f"{left} pins more were taken than released, by calls that no "
                                 "ledger sees: Cython code that takes pins has to tell")
        mem.check()
    except (mmcore.BadPage, MemoryError) as error:
        wrong = error
    if wrong is not None:
        pytest.fail(f"{test} leaves its memory wrong: {wrong}", pytrace=False)


@pytest.fixture
def mmcore_memory(_mmcore_watched):
    """A Memory of 256 MiB (or as the mark mmcore_memory says) that fails the test if a pin is left, or a law broken, at its end."""
    return _mmcore_watched[0]


@pytest.fixture
def pin_ledger(_mmcore_watched):
    """The PinLedger of mmcore_memory: pin_ledger.mem is the memory, pin_ledger.tag("name") names who takes pins."""
    return _mmcore_watched[1]
