"""gup_test's scenarios on the engine: one buffer, acquired some pages a call and released at once, each of them timed.

`mmcore gup-test` runs one; its --compare and `mmcore bench` run the generations of acquiring and releasing interleaved.
"""
import threading
import time
from dataclasses import dataclass, field

import numpy as np

import mmcore as mmc

from .measure import ratio_of

PAGE, MIB = 4096, 1 << 20
HUGE, GIB = 2 << 20, 1 << 30
HUGE_SIZES = {"2M": HUGE, "1G": GIB}
MAX_PAGES_TO_DUMP = 8           # MAX_PAGES_TO_DUMP of the kernel's test
CALLS_KEPT = 1 << 14            # lists kept while the clock runs; they are put together while it stands still

#: (name the kernel's test prints, acquiring call, pins)
COMMANDS = {
    "a": ("PIN_FAST_BENCHMARK", mmc.pin_user_pages_fast, True),
    "b": ("PIN_BASIC_TEST", mmc.pin_user_pages, True),
    "L": ("PIN_LONGTERM_BENCHMARK", mmc.pin_user_pages, True),
    "c": ("DUMP_USER_PAGES_TEST", mmc.get_user_pages, False),
    "U": ("GUP_BASIC_TEST", mmc.get_user_pages, False),
    "u": ("GUP_FAST_BENCHMARK", mmc.get_user_pages_fast, False),
}
TIMED = ("a", "L", "u")         # these print times and repeat

#: ms for 16 GiB, 512 pages a call: {(backing, phase): (before, after, which change)}
PUBLISHED = {
    ("thp", "put"): (87.6, 23.2, "release by neighbouring heads, 2021"),
    ("hugetlb 1G", "put"): (87.6, 27.5, "release by neighbouring heads, 2021"),
    ("devdax 2M", "get u"): (150.0, 8.9, "compound device pages, RFC of 2020"),
    ("devdax 2M", "get a"): (192.0, 9.0, "compound device pages, RFC of 2020"),
    ("devdax 2M", "get L"): (200.0, 19.0, "compound device pages, RFC of 2020"),
}


@dataclass
class Options:
    """gup_test's options, with its defaults."""

    command: str = "u"
    size: int = 128 * MIB
    per_call: int = 1               # pages a call; below 0: all
    repeats: int = 1
    threads: int = 1
    raw_flags: int = 0              # -F
    write: bool = True
    pin_dump: bool = False          # -p
    advice: str = ""                # "t": MADV_HUGEPAGE, "T": MADV_NOHUGEPAGE
    shared: bool = False
    hugetlb: bool = False           # -H
    file: str = ""                  # tmpfs, ext4, hugetlbfs[:SIZE], devdax[:SIZE]; "": anonymous memory
    shmem_thp: str = ""             # "": madvise with -t, else never
    dump: list = field(default_factory=list)    # zero-based page numbers
    acquire: str = "leaf"
    release: str = "run"

    @property
    def flags(self):
        """gup_flags of a call."""
        flags = self.raw_flags | (int(mmc.FOLL_WRITE) if self.write else 0)
        return flags | (int(mmc.FOLL_LONGTERM) if self.command == "L" else 0)

    @property
    def pins(self):
        """Whether pages are pinned, and not only referenced."""
        return self.pin_dump if self.command == "c" else COMMANDS[self.command][2]

    @property
    def call(self):
        """The acquiring function."""
        return mmc.pin_user_pages if self.command == "c" and self.pin_dump else COMMANDS[self.command][1]


class Buffer:
    """A Memory and a process with one buffer, mapped as the options say and written on every page."""

    def __init__(self, options, compound=True):
        kind, _, leaf = options.file.partition(":")
        leaf = HUGE_SIZES[leaf or "2M"]
        if options.hugetlb:
            kind = kind or "hugetlb"
        size = options.size
        if kind in ("hugetlb", "hugetlbfs", "devdax"):
            size = -(-size // leaf) * leaf
        self.size, self.nr = size, size // PAGE
        self.backing = self._backing(options, kind, "1G" if leaf == GIB else "2M")
        private_file = kind in ("tmpfs", "ext4") and not options.shared
        # Twice for a private file: its pages, and the copies of what is written. 1 in 256: page tables.
        room = size * (2 if private_file else 1) + size // 128 + 256 * MIB
        config = {"thp": "madvise", "shmem_thp": options.shmem_thp or ("madvise" if options.advice == "t" else "never")}
        if kind in ("hugetlb", "hugetlbfs"):
            # A private file's pages are copied as well.
            pages = size // leaf * (2 if kind == "hugetlbfs" and not options.shared else 1)
            room = (pages + 1) * leaf + 256 * MIB
            config["hugetlb"] = {leaf: pages}
        elif kind == "devdax":
            room = 256 * MIB + size // 128
            config["devices"] = (mmc.DevicePages(size, "generic", align=leaf, compound=compound),)
        self.mem = mmc.Memory(-(-room // HUGE) * HUGE, **config)
        self.mm = mmc.MM(self.mem)
        self.file = None
        flags = mmc.MAP_SHARED if options.shared else mmc.MAP_PRIVATE
        if kind in ("tmpfs", "ext4"):
            self.file = mmc.File(self.mem, size, kind)
        elif kind == "hugetlbfs":
            self.file = mmc.File(self.mem, size, kind, page_size=leaf)
        elif kind == "devdax":
            self.file = mmc.File(self.mem, size, kind, device=0)
        else:
            flags |= mmc.MAP_ANONYMOUS | (mmc.MAP_HUGETLB if kind == "hugetlb" else 0)
        try:
            self.addr = self.mm.mmap(size, flags=flags, file=self.file)
            if options.advice:
                self.mm.madvise(self.addr, size, mmc.MADV_HUGEPAGE if options.advice == "t" else mmc.MADV_NOHUGEPAGE)
            self.mm.touch(self.addr, size)
        except BaseException:
            self.close()
            raise

    @staticmethod
    def _backing(options, kind, leaf):
        if kind in ("hugetlb", "hugetlbfs", "devdax"):
            return f"{'hugetlb' if kind == 'hugetlbfs' else kind} {leaf}"
        huge = options.advice == "t" and kind in ("", "tmpfs") and (options.shmem_thp != "never" or not options.shared)
        if huge and (kind == "" or options.shared):
            return "thp"
        return kind or ("shmem" if options.shared else "anon")

    def close(self):
        """Give everything back."""
        self.mm.exit()
        self.file = None
        self.mem.close()


@dataclass
class Result:
    """What one ioctl of the kernel's test returns."""

    get_usec: int
    put_usec: int
    size: int                       # bytes acquired
    asked: int
    why: str = ""                   # it is short, or a page is not pinned as it should be
    lines: list = field(default_factory=list)   # what the kernel would have written to its log

    @property
    def short(self):
        """Whether fewer pages came than were asked for."""
        return self.size < self.asked


class Acquired:
    """The pages of one pass over a buffer: what the kernel's test has in its array."""

    def __init__(self, buffer, options, clock=time.perf_counter_ns):
        self.buffer, self.options, self.clock = buffer, options, clock
        self.ns, self.why, self.pages = 0, "", None

    def get(self):
        """Acquire all pages, some a call, until one call is short; returns the ns of the calls."""
        buffer, options, clock = self.buffer, self.options, self.clock
        per_call = buffer.nr if options.per_call < 0 else options.per_call
        call, mm, flags, acquire = options.call, buffer.mm, options.flags, options.acquire
        at, end, parts, full = buffer.addr, buffer.addr + buffer.size, [], per_call > 0
        if not full:
            self.why = "0 pages a call"
        while full and at < end:
            lists, stop = [], min(end, at + CALLS_KEPT * per_call * PAGE)
            keep = lists.append
            start = clock()
            while at < stop:
                nr = min(per_call, (end - at) // PAGE)
                try:
                    got = call(mm, at, nr, flags, acquire=acquire)
                except mmc.MMError as error:
                    self.why, full = str(error), False
                    break
                keep(got)
                at += nr * PAGE
                if len(got) < nr:
                    self.why, full = f"a call for {nr} pages got {len(got)}", False
                    break
            self.ns += clock() - start
            if len(parts) == 0 and len(lists) == 1:
                parts = lists
            elif lists:
                parts.append(mmc.PageList(buffer.mem, np.concatenate([part.pfns for part in lists])))
        if len(parts) == 1:
            self.pages = parts[0]
        else:
            self.pages = mmc.PageList(buffer.mem, np.concatenate([part.pfns for part in parts]) if parts else ())
        return self.ns

    def put(self):
        """Release all pages in one call, or one by one where the kernel's test calls put_page(); returns ns."""
        start = self.clock()
        if self.options.pins:
            mmc.unpin_user_pages(self.pages, release=self.options.release)
        else:
            mmc.release_pages(self.pages, release=self.options.release)
        return self.clock() - start

    def verify(self):
        """Look at each page as the kernel's test does; returns the lines of its warning, none when all is well."""
        mem, pages = self.buffer.mem, self.pages
        heads = np.unique(mmc.folio_runs(pages)[0])
        for head in heads.tolist():
            if not mmc.folio_maybe_dma_pinned(mem.folio(head)):
                return self._warning(head, "NOT dma-pinned")
        if self.options.command == "L":
            bad = mmc.longterm_unpinnable(pages)
            if len(bad):
                return self._warning(bad[0].folio.pfn, "NOT pinnable but pinned")
        return []

    def _warning(self, head, what):
        mem = self.buffer.mem
        index = next(i for i, pfn in enumerate(self.pages.pfns.tolist()) if mem.folio(pfn).pfn == head)
        page = self.pages[index]
        return [f"pages[{index}] is {what}", *mmc.dump_page(page, "gup_test failure").splitlines()]

    def dump(self):
        """Return what DUMP_USER_PAGES_TEST writes to the kernel's log about the pages asked for."""
        lines = []
        for index in self.options.dump or [0]:
            if index >= len(self.pages):
                lines.append(f"ZEROING due to out of range: page #{index} of {len(self.pages)}")
                continue
            lines.append(f"---- page #{index}, starting from user virt addr: {self.buffer.addr:#x}")
            lines += mmc.dump_page(self.pages[index], "gup_test: dump_pages() test").splitlines()
        return lines


def ioctl(buffer, options):
    """Do what one ioctl of the kernel's test does; returns a Result. Only acquiring and releasing are timed."""
    taken = Acquired(buffer, options)
    get_ns = taken.get()
    lines = taken.verify() if options.pins and options.command != "c" else []
    why = taken.why or (lines[0] if lines else "")
    if options.command == "c":
        lines = taken.dump()
    put_ns = taken.put()
    return Result(get_ns // 1000, put_ns // 1000, len(taken.pages) * PAGE, buffer.size, why, lines)


def run(options, tell):
    """Run the whole test; calls tell(thread, Result) after each ioctl, never two at once; returns the buffer's bytes.

    Every law of the engine is checked at the end, and that nothing stays pinned.
    """
    buffer = Buffer(options)
    lock, failed = threading.Lock(), []

    def work(thread):
        try:
            for _ in range(options.repeats if options.command in TIMED else 1):
                result = ioctl(buffer, options)
                with lock:
                    tell(thread, result)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(options.threads)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failed:
            raise failed[0]
        buffer.mem.check()
        return buffer.size
    finally:
        buffer.close()


# ---- generations -----------------------------------------------------------------------------------------------------
def generations(options):
    """Return [(name, acquire, release)], the oldest first: which pairs are measured."""
    if options.pins:
        return [("page", "page", "page"), ("head", "leaf", "head"), ("run", "leaf", "run")]
    return [("page", "page", "page"), ("run", "leaf", "run")]


def compare(options, rounds, sweep=None, clock=time.thread_time_ns):
    """Time the generations of one scenario, interleaved; returns plain data.

    Device-dax has a device of base pages for its oldest generation, which is what that code had. {"rows": [{"phase",
    "before", "after", "before_ms", "after_ms", "ratio", "low", "high", "verdict", "published"}]}; times are medians,
    processor time of the thread.
    """
    from dataclasses import replace

    buffer = Buffer(options)
    old = buffer
    gens = generations(options)
    samples = {(phase, name): [] for phase in ("get", "put") for name, _, _ in gens}
    try:
        if options.file.startswith("devdax"):
            old = Buffer(options, compound=False)
        for turn in range(rounds):
            for k in range(len(gens)):
                name, acquire, release = gens[(turn + k) % len(gens)]
                taken = Acquired(old if name == "page" else buffer, replace(options, acquire=acquire, release=release),
                                 clock)
                if sweep is not None:
                    sweep()
                samples["get", name].append(taken.get())
                if taken.why:
                    taken.put()
                    raise RuntimeError(f"short: {taken.why}")
                if sweep is not None:
                    sweep()
                samples["put", name].append(taken.put())
                taken = None
        buffer.mem.check()
        return {"backing": buffer.backing, "size": buffer.size, "per_call": options.per_call, "rounds": rounds,
                "command": COMMANDS[options.command][0],
                "rows": _pairs(options, buffer.backing, samples, gens)}
    finally:
        buffer.close()
        if old is not buffer:
            old.close()


def _pairs(options, backing, samples, gens):
    steps = [("get", "page", gens[-1][0])] + [("put", "page", name) for name, _, _ in gens[1:]]
    rows = []
    for phase, before, after in steps:
        published = None
        if phase == "get":
            published = PUBLISHED.get((backing, f"get {options.command}"))
        elif after == "head":       # what the kernel's change was; run is not the kernel's
            published = PUBLISHED.get((backing, "put"))
        name = {"get": "leaf"}.get(phase, after)
        rows.append({"phase": phase, "before": before, "after": name,
                     **ratio_of(samples[phase, before], samples[phase, after]),
                     "samples": {"before": samples[phase, before], "after": samples[phase, after]},
                     "published": published and {"before_ms": published[0], "after_ms": published[1],
                                                 "ratio": published[0] / published[1], "what": published[2]}})
    return rows
