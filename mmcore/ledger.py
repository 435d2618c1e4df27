"""Who holds which pins.

Units: counts: pins of base pages.
Raises: TypeError, BadPage.
Threads: any number at once; tags are a thread's own, a lock a ledger.
Kernel: none: the kernel does not know who holds a pin.
"""
import contextlib
import os
import sys
import threading
from collections import Counter, namedtuple

from .core.errors import BadPage
from .core.hook import unwatch_pins, watch_pins
from .core.memory import Memory

__all__ = ["PinLedger", "Pin"]

_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_NOBODY = "untagged"

Pin = namedtuple("Pin", "holder folio count site")
Pin.__doc__ = """Pins that are still held: the tag they were taken under, the Folio, how many, "file:line" of the call."""


_drivers = threading.local()


@contextlib.contextmanager
def holding(holder):
    """Book what this thread pins inside on a driver's object, by its name, whatever tags ledgers have. For drivers."""
    before, _drivers.holder = getattr(_drivers, "holder", None), holder
    try:
        yield
    finally:
        _drivers.holder = before


class PinLedger:
    """Record who takes and who drops pins on a Memory: `with PinLedger(mem) as ledger: ...`.

    Pins taken inside `with ledger.tag("name"):` belong to that holder, by thread; memory regions and io_uring buffers hold
    theirs under their own names. A release is booked on the holder whose
    tag is active, when it has pins of the folio, else on whoever took its latest ones; pins that were taken before the
    ledger began are not its business. While no ledger is active, acquiring and releasing calls pay one look at an integer.
    """

    def __init__(self, mem):
        if not isinstance(mem, Memory):
            raise TypeError(f"a Memory is wanted, not {mem!r}")
        self.mem = mem
        self._lock = threading.Lock()
        self._tags = threading.local()
        self._held = {}         # PFN of the head: list of [holder, site, count], oldest first
        self._unknown = Counter()       # drops of pins that were taken before, by PFN
        self._active = False

    def __enter__(self):
        if self._active:
            raise BadPage("one ledger at a time", "this PinLedger is active already")
        watch_pins(self._changed)
        self._active = True
        return self

    def __exit__(self, *_):
        if self._active:
            unwatch_pins(self._changed)
            self._active = False

    @contextlib.contextmanager
    def tag(self, holder):
        """Book what this thread pins inside under a holder's name; the innermost tag counts."""
        stack = self._tags.__dict__.setdefault("stack", [])
        stack.append(str(holder))
        try:
            yield self
        finally:
            stack.pop()

    def _holder(self):
        driver = getattr(_drivers, "holder", None)
        if driver is not None:
            return driver
        stack = getattr(self._tags, "stack", None)
        return stack[-1] if stack else _NOBODY

    def _changed(self, mem, heads, counts, sign):
        if mem is not self.mem:
            return
        holder = self._holder()
        with self._lock:
            if sign > 0:
                site = _call_site()
                for head, count in zip(heads, counts):
                    self._take(int(head), int(count), holder, site)
            else:
                for head, count in zip(heads, counts):
                    self._drop(int(head), int(count), holder)

    def _take(self, head, count, holder, site):
        entries = self._held.setdefault(head, [])
        for entry in entries:
            if entry[0] == holder and entry[1] == site:
                entry[2] += count
                return
        entries.append([holder, site, count])

    def _drop(self, head, count, holder):
        entries = self._held.get(head, [])
        # The holder's own first, then the latest of the others.
        for entry in sorted(reversed(entries), key=lambda entry: entry[0] != holder):
            gone = min(count, entry[2])
            entry[2] -= gone
            count -= gone
            if not count:
                break
        entries[:] = [entry for entry in entries if entry[2]]
        if not entries:
            self._held.pop(head, None)
        if count:
            self._unknown[head] += count

    def outstanding(self):
        """List the pins that are still held: Pin(holder, folio, count, site), by holder and PFN."""
        with self._lock:
            rows = [(holder, head, count, site) for head, entries in self._held.items() for holder, site, count in entries]
        return [Pin(holder, self.mem.folio(head), count, site) for holder, head, count, site in sorted(rows)]

    def by_holder(self):
        """Return {holder: pins still held}."""
        totals = Counter()
        for pin in self.outstanding():
            totals[pin.holder] += pin.count
        return dict(totals)

    @property
    def released_before(self):
        """Pins that were dropped here and taken before the ledger began."""
        with self._lock:
            return sum(self._unknown.values())

    def assert_balanced(self):
        """Raise BadPage when a pin that was taken under this ledger is still held; it names holders, folios and call sites."""
        held = self.outstanding()
        if not held:
            return
        lines = [f"  {pin.holder}: {pin.count} on PFN {pin.folio.pfn:#x} (order {pin.folio.order}), taken at {pin.site}"
                 for pin in held[:20]]
        if len(held) > 20:
            lines.append(f"  and {len(held) - 20} more")
        raise BadPage("every pin is released", f"{sum(pin.count for pin in held)} pins on {len({pin.folio for pin in held})} "
                      "folios are still held:\n" + "\n".join(lines), pfn=held[0].folio.pfn)


def _call_site():
    """The nearest caller outside of this package."""
    frame = sys._getframe(1)
    while frame is not None and os.path.abspath(frame.f_code.co_filename).startswith(_HERE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else "?"
