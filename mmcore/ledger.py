"""Who holds which pins.

Units: counts: pins of base pages.
Raises: TypeError, BadPage.
Threads: any number at once; tags are a thread's own, a lock a ledger.
Kernel: none: the kernel does not know who holds a pin.
"""
import contextlib
import threading
from collections import Counter, namedtuple

from .core.errors import BadPage
from .core.hook import PinBook, set_tag
from .core.memory import Memory

__all__ = ["PinLedger", "Pin"]

_NOBODY = "untagged"
_DRIVER = 2 ** 64 - 1           # the tag of no book: the name is in _drivers.holder

Pin = namedtuple("Pin", "holder folio count site")
Pin.__doc__ = """Pins that are still held: the tag they were taken under, the Folio, how many, "file:line" of the call."""


_drivers = threading.local()


@contextlib.contextmanager
def holding(holder):
    """Book what this thread pins inside on a driver's object, by its name, whatever tags ledgers have. For drivers."""
    before, _drivers.holder = getattr(_drivers, "holder", None), holder
    tag = set_tag(_DRIVER, 0)
    try:
        yield
    finally:
        _drivers.holder = before
        set_tag(*tag)


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
        self._tags = threading.local()
        self._book = PinBook(mem, self._holder)
        self._book.holder(_NOBODY)
        self._active = False

    def __enter__(self):
        if self._active:
            raise BadPage("one ledger at a time", "this PinLedger is active already")
        self._book.open()
        self._active = True
        return self

    def __exit__(self, *_):
        if self._active:
            self._book.close()
            self._active = False

    @contextlib.contextmanager
    def tag(self, holder):
        """Book what this thread pins inside under a holder's name; the innermost tag counts."""
        holder = str(holder)
        stack = self._tags.__dict__.setdefault("stack", [])
        stack.append(holder)
        before = None
        if getattr(_drivers, "holder", None) is None:
            before = set_tag(self._book.tag, self._book.holder(holder))
        try:
            yield self
        finally:
            stack.pop()
            if before is not None:
                set_tag(*before)

    def _holder(self):
        driver = getattr(_drivers, "holder", None)
        if driver is not None:
            return driver
        stack = getattr(self._tags, "stack", None)
        return stack[-1] if stack else _NOBODY

    def outstanding(self):
        """List the pins that are still held: Pin(holder, folio, count, site), by holder and PFN."""
        return [Pin(holder, self.mem.folio(head), count, site) for holder, head, count, site in sorted(self._book.rows())]

    def by_holder(self):
        """Return {holder: pins still held}."""
        totals = Counter()
        for pin in self.outstanding():
            totals[pin.holder] += pin.count
        return dict(totals)

    @property
    def released_before(self):
        """Pins that were dropped here and taken before the ledger began."""
        return self._book.unknown

    def assert_balanced(self):
        """Raise BadPage when a pin that was taken under this ledger is still held; it names holders, folios and call sites."""
        held = self.outstanding()
        if self._book.lost:
            raise MemoryError(f"{self._book.lost} pins could not be booked for want of memory: the ledger cannot tell")
        if not held:
            return
        lines = [f"  {pin.holder}: {pin.count} on PFN {pin.folio.pfn:#x} (order {pin.folio.order}), taken at {pin.site}"
                 for pin in held[:20]]
        if len(held) > 20:
            lines.append(f"  and {len(held) - 20} more")
        raise BadPage("every pin is released", f"{sum(pin.count for pin in held)} pins on {len({pin.folio for pin in held})} "
                      "folios are still held:\n" + "\n".join(lines), pfn=held[0].folio.pfn)

