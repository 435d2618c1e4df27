"""Acquiring pages: a leaf at a time against a page at a time, against C, and against the running kernel.

Every case builds its machine, measures its variants interleaved, and takes it down. Times are per base page.
"""
import ctypes
from dataclasses import dataclass
from functools import partial

import numpy as np

import mmcore as mmc

from .measure import Bar, Row, Sweeper, Variant, interleave, median_mad, rows_of
from .peers import NoPeers, build
from .report import progress

PAGE, HUGE = 4096, 2 << 20
WRITE, LONGTERM = int(mmc.FOLL_WRITE), int(mmc.FOLL_WRITE | mmc.FOLL_LONGTERM)
PER_CALL = 512                  # pages a call, as drivers ask for them: one page of pointers
ENTRY_BITS = 0x7                # present, writable, user
SEED = 20201208

PUBLISHED = {"get": (150, 8.9), "pin": (192, 9.0), "longterm pin": (200, 19.0)}
PUBLISHED_WHY = """\
The published figures are gup_test's of December 2020, 16 GiB of device-dax in 2 MiB pages, 512 pages a call: a device map
of base pages, a page at a time, against compound pages, a leaf at a time: get 150 -> 8.9 ms, pin 192 -> 9.0 ms, longterm pin
200 -> 19 ms. `page` here does what that code did for each base page (descend from the top, look up the device, take the
table's lock, update the page's counters and the statistics); `leaf` does it once for 512. What both have on top is this
engine's call from Python, a list made for each call, once in 512 pages."""


@dataclass
class Limit(Bar):
    """Demand a time: ns a page, or a leaf of `pages` base pages. `ratio` is that time."""

    entries: int = 0
    pages: int = 1
    most: float = 0

    def judge(self, samples):
        """Compare the median of the variant's own times."""
        times = [sample * self.pages / self.entries for sample in samples.get(self.variant, [])]
        value, spread = median_mad(times)
        return {"against": self.against, "ratio": value, "spread": spread, "bar": self.text(),
                "met": None if value is None else value <= self.most, "note": self.note}

    def text(self):
        """Return the bar as words."""
        return f"<= {self.most:g} ns" + ("/leaf" if self.pages > 1 else "/page")


def ns(variant, most, entries, pages=1, note=""):
    """Demand ns a page, or a leaf."""
    return Limit(variant, "time", entries=entries, pages=pages, most=most, note=note)


class Machine:
    """A Memory and an address space with one populated buffer."""

    def __init__(self, size, backing, shuffled=False):
        spare = 256 << 20
        self.size, self.nr = size, size // PAGE
        self.file = None
        if backing.startswith("device"):
            device = mmc.DevicePages(size, "generic", align="2M", compound=backing == "device")
            self.mem = mmc.Memory(spare, devices=(device,))
            self.mm = mmc.MM(self.mem)
            self.file = mmc.File(self.mem, size, "devdax", device=0)
            self.addr = self.mm.mmap(size, flags=mmc.MAP_SHARED, file=self.file)
        elif backing == "hugetlb":
            self.mem = mmc.Memory(size + spare, hugetlb={HUGE: size // HUGE})
            self.mm = mmc.MM(self.mem)
            self.addr = self.mm.mmap(size, flags=mmc.MAP_PRIVATE | mmc.MAP_ANONYMOUS | mmc.MAP_HUGETLB)
        else:
            # Base pages need one table a 512; and what is spare lets THPs lie aligned.
            self.mem = mmc.Memory((size + size // 256 + spare + HUGE - 1) // HUGE * HUGE, thp="always" if backing == "thp" else "never")
            self.mm = mmc.MM(self.mem)
            self.addr = self.mm.mmap(size)
        if shuffled:
            for i in np.random.default_rng(SEED).permutation(self.nr).tolist():
                self.mm.touch(self.addr + i * PAGE, PAGE)
        else:
            self.mm.touch(self.addr, size)

    def leaves(self):
        """The entries of the buffer's PMDs, as C peers read them."""
        pfns = np.array([self.mm.page_at(at).pfn for at in range(self.addr, self.addr + self.size, HUGE)], np.uint64)
        return (pfns << np.uint64(12)) | np.uint64(ENTRY_BITS)

    def close(self):
        """Give everything back."""
        self.mm.exit()
        self.mm = self.file = None
        self.mem.close()


class Calls:
    """A buffer acquired PER_CALL pages a call; each list is dropped, as gup_test writes over its one array."""

    def __init__(self, machine, call, flags, **options):
        self.machine, self.call, self.flags, self.options = machine, call, flags, options
        pins = call.__name__.startswith("pin")
        self.release = mmc.unpin_user_pages if pins else mmc.release_pages
        acquire = mmc.pin_user_pages_fast if pins else mmc.get_user_pages_fast
        # All pages in one list: what a round took is released by it.
        self.all_pages = acquire(machine.mm, machine.addr, machine.nr, WRITE)
        self.held = True

    def before(self):
        """Release what the last round took."""
        if self.held:
            self.release(self.all_pages)
        self.held = False

    def run(self):
        """Take all of it."""
        call, mm, addr, flags, options = self.call, self.machine.mm, self.machine.addr, self.flags, self.options
        self.held = True
        for at in range(addr, addr + self.machine.size, PER_CALL * PAGE):
            call(mm, at, PER_CALL, flags, **options)

    def variant(self, name):
        """Return it as a Variant."""
        return Variant(name, self.run, self.before)


class Whole:
    """A buffer acquired in one call, into one output."""

    def __init__(self, machine, flags=WRITE, call=mmc.pin_user_pages_fast, output=mmc.PageList, drain=False):
        self.machine, self.flags, self.call, self.output, self.drain = machine, flags, call, output, drain
        self.held, self.taken = None, []

    def before(self):
        """Release. The pool of buffers has the list's then, and the one that the release noted freed folios in, which it
        hardly touched: both are written here. With drain, all that the pool has is taken out."""
        self.taken = []
        if self.held is not None:
            mmc.unpin_user_pages(self.held)
        self.held = None
        if self.output is mmc.PageList:
            empty = mmc.PageList(self.machine.mem)
            like = mmc.PageList(self.machine.mem, np.full(self.machine.nr, 2, np.uint64))
            self.taken = [like] + [like + empty for _ in range(4)]
            if not self.drain:
                del like
                self.taken = []

    def run(self):
        """Take all of it."""
        machine = self.machine
        self.held = self.call(machine.mm, machine.addr, machine.nr, self.flags, output=self.output)

    def both(self):
        """Take and release."""
        machine = self.machine
        pages = self.call(machine.mm, machine.addr, machine.nr, self.flags, output=self.output)
        mmc.unpin_user_pages(pages)

    def variant(self, name):
        """Return it as a Variant."""
        return Variant(name, self.run, self.before)


class Peers:
    """The functions of gup.c on one machine's leaves. Raises NoPeers."""

    def __init__(self, source, machine):
        self.lib = ctypes.CDLL(str(build(source)))
        self.lib.gup_fresh.restype = ctypes.c_void_p
        self.lib.gup_ranges.restype = self.lib.gup_list.restype = ctypes.c_int64
        self.leaf, self.nr, self.pages = machine.leaves(), machine.size // HUGE, HUGE // PAGE
        self.map = machine.mem.pages
        self.buffer = np.ones(machine.nr, np.uint64)
        self.runs = np.ones((2, self.nr), np.uint64)
        self.fresh, self.pinned, self.listed = None, False, None

    def at(self, array):
        """Address of an array, for ctypes."""
        return ctypes.c_void_p(array.ctypes.data)

    def args(self):
        """What every function takes."""
        return self.at(self.leaf), ctypes.c_uint64(self.nr), ctypes.c_uint64(self.pages)

    def fill(self):
        """Fill a buffer that is warm."""
        self.lib.gup_fill(self.at(self.buffer), *self.args())

    def drop(self):
        """Give the fresh buffer back."""
        if self.fresh is not None:
            self.lib.gup_drop(ctypes.c_void_p(self.fresh), *self.args()[1:])
        self.fresh = None

    def fill_fresh(self):
        """Fill a buffer that is new."""
        self.fresh = self.lib.gup_fresh(*self.args())

    def unpin(self):
        """Drop what pin() took."""
        if self.pinned:
            self.lib.gup_release(self.at(self.map), *self.args())
        self.pinned = False

    def pin(self):
        """Pin all leaves, into runs."""
        got = self.lib.gup_ranges(self.at(self.map), *self.args(), self.at(self.runs[0]), self.at(self.runs[1]))
        if got < 0:
            raise RuntimeError(f"entry {-1 - got} could not be pinned")
        self.pinned = True

    def drop_list(self):
        """Drop what take_list() took."""
        if self.listed is not None:
            self.lib.gup_unlist(self.at(self.map), *self.args(), ctypes.c_uint64(self.listed))
        self.listed = None

    def take_list(self, pin):
        """Take a pin, or a reference, of all pages, into a buffer that is warm."""
        got = self.lib.gup_list(self.at(self.map), *self.args(), self.at(self.buffer), ctypes.c_uint64(pin))
        if got < 0:
            raise RuntimeError(f"entry {-1 - got} could not be taken")
        self.listed = pin

    def pin_and_drop(self):
        """Pin all leaves into runs, and drop the pins."""
        self.pin()
        self.unpin()

    def close(self):
        """Forget the machine."""
        self.drop()
        self.drop_list()
        self.unpin()
        self.map = None


def peers_of(source, machine):
    """Return Peers, or the text that says why there are none."""
    try:
        return Peers(source, machine)
    except NoPeers as reason:
        return str(reason)


def peer(peers, name, run, before=None):
    """A Variant of a peer's method; missing where there are no peers."""
    if isinstance(peers, str):
        return Variant(name, None, missing=peers)
    return Variant(name, getattr(peers, run), before and getattr(peers, before))


# ---- the cases ------------------------------------------------------------------------------------------------------------
def leaf_against_page(setup, backing):
    """get, pin and longterm pin, PER_CALL pages a call: a leaf an update against a page an update."""
    least = {"get": 17, "pin": 21, "longterm pin": 10}
    calls = {"get": (mmc.get_user_pages_fast, WRITE), "pin": (mmc.pin_user_pages_fast, WRITE),
             "longterm pin": (mmc.pin_user_pages, LONGTERM)}
    # A device of base pages behind the same leaves is what the old code had; THPs are the same for both.
    leaf = Machine(setup.size, backing)
    page = Machine(setup.size, "device, base pages") if backing == "device" else leaf
    rows = []
    try:
        for name, (call, flags) in calls.items():
            variants = [Calls(leaf, call, flags, acquire="leaf").variant("leaf"),
                        Calls(page, call, flags, acquire="page").variant("page")]
            samples = interleave(variants, setup.rounds, setup.sweep)
            for variant in variants:
                variant.before()
            before, after = PUBLISHED[name]
            note = f"published: {before} -> {after} ms, {before / after:.0f}x" if backing == "device" else ""
            rows += rows_of(f"{backing}, {name}, {PER_CALL} a call", variants, leaf.nr, samples,
                            [Bar("leaf", "page", at_least=least[name], note=note)])
        return rows
    finally:
        leaf.close()
        if page is not leaf:
            page.close()


def into_lists(setup):
    """PMD leaves into a PageList and into PageRanges, against C that does only that."""
    machine = Machine(setup.size, "thp")
    peers = peers_of(setup.source, machine)
    leaves = HUGE // PAGE
    try:
        warm, fresh = Whole(machine), Whole(machine, drain=True)
        ranges = Whole(machine, output=mmc.PageRanges)
        variants = [warm.variant("PageList, warm"), peer(peers, "C fill, warm", "fill"),
                    fresh.variant("PageList, fresh"), peer(peers, "C fill, fresh", "fill_fresh", "drop"),
                    ranges.variant("PageRanges"), peer(peers, "C ranges", "pin", "unpin")]
        samples = interleave(variants, setup.rounds, setup.sweep)
        for variant in variants:
            if variant.before is not None and not variant.missing:
                variant.before()
        bars = [ns("PageList, warm", 0.5, machine.nr), Bar("PageList, warm", "C fill, warm", at_most=1.3),
                ns("PageList, fresh", 1.2, machine.nr), Bar("PageList, fresh", "C fill, fresh", at_most=1.3),
                ns("PageRanges", 30, machine.nr, leaves), Bar("PageRanges", "C ranges", at_most=1.2),
                Bar("PageRanges", "PageList, warm", at_least=6)]
        return rows_of("PMD leaves, one call", variants, machine.nr, samples, bars)
    finally:
        if not isinstance(peers, str):
            peers.close()
        machine.close()


def base_pages(setup):
    """Base pages under PTEs, populated; in PFN order and not; and what the running kernel takes for a real buffer."""
    rows = []
    for case, shuffled, most in (("base pages, in order", False, 8), ("base pages, shuffled", True, 18)):
        machine = Machine(setup.base_size, "base", shuffled)
        try:
            whole = Whole(machine)
            variants = [whole.variant("pin_user_pages_fast"),
                        Whole(machine, call=mmc.pin_user_pages).variant("pin_user_pages")]
            samples = interleave(variants, setup.rounds, setup.sweep)
            for variant in variants:
                variant.before()
            rows += rows_of(case, variants, machine.nr, samples, [ns("pin_user_pages_fast", most, machine.nr)])
        finally:
            machine.close()
    return rows + [kernel_row(setup)]


def kernel_row(setup):
    """io_uring's registration of a real buffer of base pages, where it is possible."""
    from mmcore.live import NotPossible, buffer, kernel_register
    case, name, size = "base pages, a real buffer", "kernel, io_uring register", min(setup.base_size, 1 << 30)
    try:
        with buffer(size, backing="4k") as real:
            times = kernel_register(real, setup.rounds).register_ns
        return Row(case, name, size // PAGE, [int(time) for time in times])
    except (NotPossible, MemoryError, OSError) as reason:
        return Row(case, name, size // PAGE, [], missing=str(reason))


def longterm_check(setup):
    """The check of a longterm pin by itself; and what it adds to a pin of hugetlb memory."""
    machine = Machine(setup.size, "thp")
    rows = []
    try:
        for kind, output, least in (("runs", mmc.PageRanges, 20), ("list", mmc.PageList, None)):
            pages = mmc.pin_user_pages_fast(machine.mm, machine.addr, machine.nr, WRITE, output=output)
            variants = [Variant(f"per {name}", partial(mmc.longterm_unpinnable, pages, acquire=acquire))
                        for name, acquire in (("folio", "leaf"), ("page", "page"))]
            samples = interleave(variants, setup.rounds, setup.sweep)
            rows += rows_of(f"longterm check, 2 MiB folios, {kind}", variants, machine.nr, samples,
                            [Bar("per folio", "per page", at_least=least)])
            mmc.unpin_user_pages(pages)
            del pages, variants
    finally:
        machine.close()
    machine = Machine(setup.size // 4, "hugetlb")
    try:
        for name, call in (("fast", mmc.pin_user_pages_fast), ("slow", mmc.pin_user_pages)):
            variants = [Whole(machine, LONGTERM, call).variant("with the check"), Whole(machine, WRITE, call).variant("without")]
            samples = interleave(variants, setup.rounds * 2, setup.sweep)
            for variant in variants:
                variant.before()
            rows += rows_of(f"hugetlb, {name} walk", variants, machine.nr, samples,
                            [Bar("with the check", "without", at_most=1.05)])
        return rows
    finally:
        machine.close()


@dataclass
class Flat(Bar):
    """Demand that a page costs about the same as in another variant, which has another number of them."""

    own: int = 1
    other: int = 1

    def ratios(self, samples):
        """Time a page over time a page, each round."""
        return [ratio * self.other / self.own for ratio in super().ratios(samples)]


def flat(setup, backing):
    """Pin and release buffers of growing size: a page costs what it costs."""
    sizes = [setup.size >> 4, setup.size >> 2, setup.size, setup.size << 2]     # 1, 4, 16, 64 GiB
    machines = {}
    try:
        variants = []
        for size in sizes:
            name = f"{size >> 30} GiB" if size >> 30 else f"{size >> 20} MiB"
            machines[name] = Machine(size, backing)
            variants.append(Variant(name, Whole(machines[name]).both))
        samples = interleave(variants, setup.rounds, setup.sweep)
        first, rows = variants[0].name, []
        for variant in variants:
            bars = [] if variant.name == first else [
                Flat(variant.name, first, at_most=1.2, own=machines[variant.name].nr, other=machines[first].nr).judge(samples)]
            rows.append(Row(f"pin and unpin, {'2 MiB leaves' if backing == 'thp' else 'base pages'}", variant.name,
                            machines[variant.name].nr, samples[variant.name], bars))
        return rows
    finally:
        variants = None
        for machine in machines.values():
            machine.close()


CASES = {
    "device leaves, 512 a call": partial(leaf_against_page, backing="device"),
    "THP leaves, 512 a call": partial(leaf_against_page, backing="thp"),
    "PMD leaves into lists and ranges": into_lists,
    "base pages": base_pages,
    "longterm check": longterm_check,
    "flat, 2 MiB leaves": partial(flat, backing="thp"),
    "flat, base pages": partial(flat, backing="base"),
}


@dataclass
class Setup:
    """How large and how often."""

    size: int                   # of the buffers in leaves
    base_size: int              # of the buffers in base pages
    rounds: int
    source: object              # gup.c
    sweep: object = None


def measure(names, size, base_size, rounds, source):
    """Measure cases by name; returns their rows."""
    setup = Setup(size, base_size, rounds, source, Sweeper())
    rows = []
    for name in names:
        progress(name)
        rows += CASES[name](setup)
    return rows
