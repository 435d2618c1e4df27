"""A driver under test, without a kernel: threads, every failure on the way, and a ledger that names who leaks pins.

    python examples/driver_test.py          # or: pytest examples/driver_test.py
"""
import threading

import mmcore as mmc


class ReceiveRing:
    """A network driver's receive ring: each posted buffer is pinned for writing, until the device has filled it."""

    def __init__(self, mm):
        self.mm, self.posted, self.lock = mm, [], threading.Lock()

    def post(self, addr, nr_pages):
        pages = mmc.pin_user_pages_fast(self.mm, addr, nr_pages, mmc.FOLL_WRITE | mmc.FOLL_LONGTERM)
        if len(pages) < nr_pages:                       # partial success is success: give back what there is
            mmc.unpin_user_pages(pages)
            raise mmc.MMError(14, f"only {len(pages)} of {nr_pages} pages at {addr:#x}", addr=addr)
        with self.lock:
            self.posted.append(pages)

    def complete(self):
        """The device filled the oldest buffer."""
        with self.lock:
            pages = self.posted.pop(0) if self.posted else None
        if pages is not None:
            mmc.unpin_user_pages_dirty_lock(pages, len(pages), True)

    def close(self):
        while self.posted:
            self.complete()


class LeakyRing(ReceiveRing):
    """The same with a bug: close() forgets the buffers that the device never filled."""

    def close(self):
        self.posted.clear()


def machine():
    mem = mmc.Memory("256M", thp="always")
    mm = mmc.MM(mem)
    return mem, mm, mm.mmap("32M")


def use(ring_type):
    """Post and complete from four threads, then close: the ledger of what is still held, and the memory."""
    mem, mm, addr = machine()
    ring = ring_type(mm)
    with mmc.PinLedger(mem) as ledger, ledger.tag(ring_type.__name__):
        def work(first):
            with ledger.tag(ring_type.__name__):
                for turn in range(20):
                    ring.post(addr + (first + turn) * 65536, 16)
                    if turn % 2:
                        ring.complete()
        threads = [threading.Thread(target=work, args=(k * 20,)) for k in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        ring.close()
    mem.check()
    return ledger, mem


def test_a_ring_gives_everything_back():
    ledger, mem = use(ReceiveRing)
    ledger.assert_balanced()
    stat = mem.vmstat()
    assert stat["nr_foll_pin_acquired"] == stat["nr_foll_pin_released"] == 4 * 20 * 16


def test_the_leak_is_named():
    ledger, _ = use(LeakyRing)
    try:
        ledger.assert_balanced()
    except mmc.BadPage as error:
        assert "LeakyRing" in str(error) and "driver_test.py" in str(error)
        return error
    raise AssertionError("the leak was not seen")


def test_every_failure_on_the_way_leaves_nothing_behind():
    failures = 0
    for site in ("frame", "table", "list"):
        for nth in range(1, 8):
            mem, mm, addr = machine()
            ring = ReceiveRing(mm)
            with mmc.PinLedger(mem) as ledger:
                with mem.inject(site, nth):
                    try:
                        ring.post(addr, 1024)
                    except mmc.MMError:
                        failures += 1
                ring.close()
            ledger.assert_balanced()
            mm.exit()
            mem.check()
    assert failures
    return failures


if __name__ == "__main__":
    test_a_ring_gives_everything_back()
    print("ReceiveRing: 1280 pins taken by 4 threads, 1280 given back")
    print(f"LeakyRing:   {test_the_leak_is_named()}")
    print(f"failures:    {test_every_failure_on_the_way_leaves_nothing_behind()} injected, nothing left behind")
