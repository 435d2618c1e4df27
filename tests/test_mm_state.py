"""Address spaces against the plain ones, by random histories; content, mappings, counters and errno after every step."""
import errno
import os
import random
import re
import struct
from dataclasses import dataclass

import pytest
from hypothesis import currently_in_test_context, note, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

import mmcore as mmc
from reference import Refused
from reference.spaces import READ, WRITE, Share, Space
from mmcore import MM, MMError, Memory
from timeline import Timeline

PAGE = 4096
PMD = 512
ARENA = 0x7F00_0000_0000 // PAGE
PAGES = 3 * PMD
PRESENT, SWAP = 1 << 63, 1 << 62
PFN = (1 << 55) - 1
PRIVATE = mmc.MAP_PRIVATE | mmc.MAP_ANONYMOUS | mmc.MAP_FIXED
SHARED = mmc.MAP_SHARED | mmc.MAP_ANONYMOUS | mmc.MAP_FIXED
MOST_MMS = 5

# Mostly short ranges around the edges of leaves; now and then whole leaves.
starts = st.one_of(st.integers(0, 40), st.integers(PMD - 8, PMD + 8), st.integers(0, PAGES - 1), st.sampled_from([0, PMD, 2 * PMD]))
lengths = st.one_of(st.integers(1, 12), st.sampled_from([PMD, PMD + 3, 2 * PMD]))
prots = st.sampled_from([0, READ, READ | WRITE, READ | WRITE, READ | WRITE])


def window(start, length):
    return range(ARENA + start, ARENA + min(start + length, PAGES))


def say(row):
    """Hypothesis shows the rows of a failure after it was shrunk, pytest those of a long history."""
    if currently_in_test_context():
        note(row)
    else:
        print(row)


@dataclass(eq=False)
class Hold:
    """A pinned page: where it is mapped (page None: no longer), its frame, and what a device reads there."""
    mm: MM
    page: int
    pfn: int
    token: object           # a number; (Share, index) for what is shared
    writable: bool = True

    def content(self):
        return self.token[0].get(self.token[1], 0) if isinstance(self.token, tuple) else self.token


class Machine(RuleBasedStateMachine):
    """Several processes in one arena, each with its plain twin."""

    thp = "never"
    mthp = ()

    @initialize()
    def begin(self):
        self.mem = Memory("128M", thp=self.thp, mthp=self.mthp)
        self.free = None
        self.spaces = []
        self.pins = []
        self.token = 0
        self.shares = 0
        first = MM(self.mem)
        self.free = self.mem.vmstat()["nr_free_pages"] + first.nr_tables
        self.spaces.append((first, Space()))

    def __init__(self):
        super().__init__()
        self.names, self.timeline = {}, Timeline(say)

    def tell(self, which, text, ends=False):
        """A row of the timeline: mm0, mm1, ... in the order in which they were made."""
        mm = self.spaces[which % len(self.spaces)][0]
        self.timeline.event(self.names.setdefault(id(mm), f"mm{len(self.names)}"), text, ends)

    def pick(self, which, text=None):
        if text is not None:
            self.tell(which, text)
        return self.spaces[which % len(self.spaces)]

    def both(self, call, twin):
        """Do it on both sides; the same errno, or none."""
        wanted = got = None
        try:
            twin()
        except Refused as refusal:
            wanted = refusal.errno
        try:
            call()
        except MMError as refusal:
            got = refusal.errno
        assert got == wanted, (errno.errorcode.get(got), errno.errorcode.get(wanted))
        return got

    def holds(self):
        return self.pins

    def at(self, mm, pages):
        """What is pinned and mapped there."""
        return [hold for hold in self.holds() if hold.mm is mm and hold.page is not None and hold.page in pages]

    def detach(self, mm, pages):
        """What is pinned there is not mapped any more: it keeps what it had."""
        for hold in self.at(mm, pages):
            hold.page = None

    def written(self, mm, space, page):
        """Devices see the same."""
        if space.area[page].share is None:
            for hold in self.at(mm, (page,)):
                hold.token = self.token

    @rule(which=st.integers(0, 9), start=starts, length=lengths, prot=prots, shared=st.booleans())
    def mmap(self, which, start, length, prot, shared):
        mm, space = self.pick(which, f"mmap {start}+{length} prot {prot}{' shared' if shared else ''}")
        pages = window(start, length)
        self.detach(mm, pages)
        mm.mmap(len(pages) * PAGE, prot, SHARED if shared else PRIVATE, addr=pages.start * PAGE)
        if shared:
            self.shares += 1
        space.mmap(pages, prot, Share(len(pages)) if shared else None, self.shares if shared else 0)

    @rule(which=st.integers(0, 9), start=starts, length=lengths)
    def munmap(self, which, start, length):
        mm, space = self.pick(which, f"munmap {start}+{length}")
        pages = window(start, length)
        self.detach(mm, pages)
        self.both(lambda: mm.munmap(pages.start * PAGE, len(pages) * PAGE), lambda: space.munmap(pages))

    @rule(which=st.integers(0, 9), start=starts, length=lengths, write=st.booleans())
    def touch(self, which, start, length, write):
        mm, space = self.pick(which, f"{'write' if write else 'read'} faults {start}+{length}")
        pages = window(start, length)
        self.both(lambda: mm.touch(pages.start * PAGE, len(pages) * PAGE, write), lambda: space.touch(pages, write))

    @rule(which=st.integers(0, 9), start=starts)
    def write(self, which, start):
        mm, space = self.pick(which, f"write {start}")
        page = ARENA + start
        self.token += 1
        if self.both(lambda: mm.write(page * PAGE, struct.pack("<Q", self.token)), lambda: space.write(page, self.token)) is None:
            self.written(mm, space, page)

    @rule(which=st.integers(0, 9), start=starts)
    def read(self, which, start):
        mm, space = self.pick(which, f"read {start}")
        page = ARENA + start
        if self.both(lambda: mm.read(page * PAGE, 8), lambda: space.touch(range(page, page + 1), False)) is None:
            assert struct.unpack("<Q", mm.read(page * PAGE, 8))[0] == space.read(page)

    @rule(which=st.integers(0, 9), start=starts, length=lengths, prot=prots)
    def mprotect(self, which, start, length, prot):
        mm, space = self.pick(which, f"mprotect {start}+{length} {prot}")
        pages = window(start, length)
        self.both(lambda: mm.mprotect(pages.start * PAGE, len(pages) * PAGE, prot), lambda: space.mprotect(pages, prot))

    @rule(which=st.integers(0, 9), start=starts, length=lengths,
          advice=st.sampled_from(["DONTNEED", "PAGEOUT", "HUGEPAGE", "NOHUGEPAGE", "DONTFORK", "DOFORK", "COLD"]))
    def madvise(self, which, start, length, advice):
        mm, space = self.pick(which, f"{advice} {start}+{length}")
        pages = window(start, length)
        twin = {"DONTNEED": lambda: space.dontneed(pages), "PAGEOUT": lambda: space.whole(pages),
                "COLD": lambda: space.whole(pages),
                "HUGEPAGE": lambda: space.advise(pages, huge="yes"), "NOHUGEPAGE": lambda: space.advise(pages, huge="no"),
                "DONTFORK": lambda: space.advise(pages, dontfork=True),
                "DOFORK": lambda: space.advise(pages, dontfork=False)}[advice]
        if advice == "DONTNEED":
            self.detach(mm, pages)
        self.both(lambda: mm.madvise(pages.start * PAGE, len(pages) * PAGE, getattr(mmc, "MADV_" + advice)), twin)

    @rule(which=st.integers(0, 9), start=starts, length=lengths, to=starts, new_length=lengths)
    def mremap(self, which, start, length, to, new_length):
        mm, space = self.pick(which, f"mremap {start}+{length} -> {to}+{new_length}")
        old, new = window(start, length), window(to, new_length)
        refused = self.both(lambda: mm.mremap(old.start * PAGE, len(old) * PAGE, len(new) * PAGE, new.start * PAGE),
                            lambda: space.mremap(old, new))
        if refused is None:
            moved = self.at(mm, old)
            self.detach(mm, new)
            for hold in moved:
                hold.page = new.start + hold.page - old.start if hold.page - old.start < len(new) else None

    @rule(which=st.integers(0, 9))
    @precondition(lambda self: len(self.spaces) < MOST_MMS)
    def fork(self, which):
        mm, space = self.pick(which, "fork")
        self.spaces.append((mm.fork(), space.fork()))

    @rule(which=st.integers(0, 9))
    @precondition(lambda self: len(self.spaces) > 1)
    def exit(self, which):
        self.tell(which, "exit", ends=True)
        mm, space = self.spaces.pop(which % len(self.spaces))
        del self.names[id(mm)]
        self.names[object()] = "gone"       # its number is not given again
        self.detach(mm, window(0, PAGES))
        mm.exit()

    @rule(which=st.integers(0, 9), leaf=st.integers(0, 2))
    def collapse(self, which, leaf):
        mm, space = self.pick(which, f"collapse {leaf * PMD}+{PMD}")
        pages = window(leaf * PMD, PMD)
        before = set(space.populated), set(space.touched)
        number = None
        try:
            space.collapse(pages)
        except Refused as refusal:
            number = refusal.errno
        try:
            mm.madvise(pages.start * PAGE, PMD * PAGE, mmc.MADV_COLLAPSE)
        except MMError as refusal:
            if refusal.errno == errno.EAGAIN:
                # Somebody holds a page of the range. In a large folio it may be another page of it.
                assert self.holds() and number is None
            elif number is None:
                # Tables of pages that were only read may be gone.
                assert refusal.errno == errno.EINVAL and not before[0].intersection(pages)
            else:
                # A mapping before the hole may refuse first.
                assert refusal.errno in (number, errno.EINVAL)
            space.populated, space.touched = before
        else:
            # A table may be left of what was dropped.
            assert number in (None, errno.EINVAL) and space.one_run(pages)
            space.populated.update(pages)
            space.touched.update(pages)

    @rule(which=st.integers(0, 9), start=starts, order=st.integers(0, 3))
    def split(self, which, start, order):
        mm, space = self.pick(which, f"folio_split {start} to order {order}")
        page = mm.page_at((ARENA + start) * PAGE)
        if page is None or page == self.mem.zero_page or mmc.is_huge_zero_page(page) or page.folio.order <= order:
            return
        folio = page.folio
        mmc.folio_get(folio)
        pinned = mmc.folio_maybe_dma_pinned(folio)
        try:
            pieces = mmc.folio_split(folio, order)
        except MMError as refusal:
            assert refusal.errno == errno.EAGAIN and pinned
            mmc.folio_put(folio)
        else:
            assert not pinned and all(piece.order == order for piece in pieces)
            for piece in pieces:
                mmc.folio_put(piece)

    @rule(which=st.integers(0, 9), start=starts)
    @precondition(lambda self: len(self.pins) < 8)
    def pin(self, which, start):
        mm, space = self.pick(which, f"pin {start}")
        page = ARENA + start
        if page not in space.area or space.area[page].prot != READ | WRITE or space.area[page].share is not None:
            return
        mm.has_pinned = True
        self.token += 1
        mm.write(page * PAGE, struct.pack("<Q", self.token))
        space.write(page, self.token)
        at = mm.page_at(page * PAGE)
        mmc.grab_pages(mmc.PageList(self.mem, [at.pfn]))
        self.written(mm, space, page)
        self.pins.append(Hold(mm, page, at.pfn, self.token))

    @rule(which=st.integers(0, 7))
    @precondition(lambda self: self.pins)
    def unpin(self, which):
        hold = self.pins.pop(which % len(self.pins))
        self.timeline.event("device", f"unpin PFN {hold.pfn:#x}")
        mmc.unpin_user_pages(mmc.PageList(self.mem, [hold.pfn]))

    @rule(which=st.integers(0, 9))
    def clear_refs(self, which):
        self.pick(which, "clear_refs")[0].clear_refs(4)

    # -- after every step ----------------------------------------------------------------------------------------------------
    def content(self, pfn):
        return struct.unpack("<Q", mmc.page_address(self.mem.page(pfn))[:8])[0]

    @invariant()
    def equal(self):
        if not hasattr(self, "spaces"):
            return
        for mm, space in self.spaces:
            runs = [(v.start // PAGE, v.end // PAGE) for v in mm.vmas]
            assert runs == [run[:2] for run in space.runs()]
            words = mm.pagemap(ARENA * PAGE, PAGES)
            for page, area in space.area.items():
                word = int(words[page - ARENA])
                if word & PRESENT:
                    pfn = word & PFN
                    if area.share is None and (pfn == self.mem.zero_page.pfn or mmc.is_huge_zero_page(self.mem.page(pfn))):
                        assert space.read(page) == 0
                    elif area.share is None or space.read(page):
                        assert self.content(pfn) == space.read(page), \
                            (hex(page), hex(word), self.content(pfn), mm, self.mem.page(pfn).folio, area)
                elif not word & SWAP and area.share is None:
                    assert space.read(page) == 0 and (page not in space.populated), hex(page)
            if self.thp == "never" and not self.mthp:
                stat = mm.rss_stat
                assert stat["anon"] + stat["swap"] == len(space.populated)
        for hold in self.holds():
            assert self.content(hold.pfn) == hold.content()
            if hold.page is not None:
                at = hold.mm.page_at(hold.page * PAGE)
                assert at is not None and at.pfn == hold.pfn, "a pinned page stays where it is mapped"
        self.mem.check()

    def over(self):
        """Give back what has nothing to do with address spaces."""

    def teardown(self):
        if not hasattr(self, "spaces"):
            return
        for mm, space in self.spaces:
            for page in list(space.area)[:64]:
                area = space.area[page]
                if area.prot and (area.share is None or area.offset < area.share.size):
                    word = int(mm.pagemap(page * PAGE, 1)[0])
                    assert struct.unpack("<Q", mm.read(page * PAGE, 8))[0] == space.read(page), \
                        (hex(page), hex(word), area, space.read(page), page in space.populated, self.thp, self.mthp)
        mmc.unpin_user_pages(mmc.PageList(self.mem, [hold.pfn for hold in self.pins]))
        for mm, space in self.spaces:
            mm.exit()
        self.over()
        self.mem.check()
        stat = self.mem.vmstat()
        assert stat["nr_foll_pin_acquired"] == stat["nr_foll_pin_released"]
        # The huge zero folio stays once it was made.
        heads = self.mem.pages[::512]
        kept = 512 if any(heads["flags"] >> 6 & 1 & (heads["_refcount"] != 0)) else 0
        assert stat["nr_free_pages"] + kept == self.free, "frames leaked"


class ThpMachine(Machine):
    thp = "always"


class MthpMachine(Machine):
    mthp = (2, 4)


# Hypothesis draws short histories and shrinks what fails. Long ones reach states that those do not: swapped pages of four
# generations, leaves split and collapsed and pinned. The same seed draws the same history.
WEIGHTS = {"mmap": 3, "munmap": 1, "touch": 6, "write": 6, "read": 3, "mprotect": 2, "madvise": 5, "mremap": 2, "fork": 2,
           "exit": 1, "collapse": 2, "split": 2, "pin": 2, "unpin": 1, "clear_refs": 1}


def history(machine, seed, steps):
    draw = random.Random(seed)

    def start():
        return draw.choice([draw.randrange(40), PMD - 8 + draw.randrange(16), draw.randrange(PAGES), draw.choice([0, PMD, 2 * PMD])])

    def length():
        return draw.choice([draw.randrange(1, 13)] * 3 + [PMD, PMD + 3, 2 * PMD])

    def prot():
        return draw.choice([0, READ] + [READ | WRITE] * 4)

    advice = ["DONTNEED", "PAGEOUT", "PAGEOUT", "HUGEPAGE", "NOHUGEPAGE", "DONTFORK", "DOFORK", "COLD"]
    extra = {"mmap": lambda: dict(start=start(), length=length(), prot=prot(), shared=draw.random() < .3),
             "munmap": lambda: dict(start=start(), length=length()),
             "touch": lambda: dict(start=start(), length=length(), write=draw.random() < .6),
             "write": lambda: dict(start=start()), "read": lambda: dict(start=start()), "pin": lambda: dict(start=start()),
             "mprotect": lambda: dict(start=start(), length=length(), prot=prot()),
             "madvise": lambda: dict(start=start(), length=length(), advice=draw.choice(advice)),
             "mremap": lambda: dict(start=start(), length=length(), to=start(), new_length=length()),
             "collapse": lambda: dict(leaf=draw.randrange(3)),
             "split": lambda: dict(start=start(), order=draw.randrange(4))}
    possible = {"fork": lambda: len(machine.spaces) < MOST_MMS, "exit": lambda: len(machine.spaces) > 1,
                "pin": lambda: len(machine.pins) < 8, "unpin": lambda: machine.pins}
    machine.begin()
    machine.mmap(which=0, start=0, length=PAGES, prot=READ | WRITE, shared=False)
    for _ in range(steps):
        step = draw.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        if possible.get(step, lambda: True)():
            getattr(machine, step)(which=draw.randrange(10), **extra.get(step, dict)())
            machine.equal()
    machine.teardown()


LONG = os.environ.get("MMCORE_TEST_PROFILE") == "long"


@pytest.mark.parametrize("machine", [Machine, ThpMachine, MthpMachine])
@pytest.mark.parametrize("seed", range(40 if LONG else 4))
def test_long_histories(machine, seed):
    history(machine(), seed, 250)


def test_a_failure_prints_its_timeline(capsys):
    """A machine that is wrong about one thing: the shrunk history is a few rows."""
    class Wrong(Machine):
        @invariant()
        def nobody_forks_what_was_written(self):
            assert not (len(getattr(self, "spaces", ())) > 1 and self.token)

    Wrong.TestCase.settings = settings(max_examples=200, stateful_step_count=20, deadline=None, database=None)
    with pytest.raises(BaseException) as caught:
        run_state_machine_as_test(Wrong, settings=Wrong.TestCase.settings)
    text = capsys.readouterr().out + "\n".join(getattr(caught.value, "__notes__", ()))
    rows = [line for line in text.splitlines() if re.match(r" +[0-9]+  (\||mm)", line)]
    assert any("mm0: fork" in row for row in rows) and any("mm0: " in row and ("write" in row or "pin" in row) for row in rows)
    assert len(rows) <= 12, "shrunk"


def test_timeline():
    rows = []
    timeline = Timeline(rows.append, width=16)
    for event in (("mm0", "fork"), ("mm1", "write 3"), ("mm0", "exit", True), ("mm2", "read 5"), ("mm1", "exit", True)):
        timeline.event(*event)
    assert rows == ["   1  mm0: fork", "   2  |               mm1: write 3", "   3  mm0: exit       |", "   4  mm2: read 5     |",
                    "   5  |               mm1: exit"]


for machine in (Machine, ThpMachine, MthpMachine):
    machine.TestCase.settings = settings(max_examples=400 if LONG else 25, stateful_step_count=60 if LONG else 30, deadline=None)

TestBase = Machine.TestCase
TestThp = ThpMachine.TestCase
TestMthp = MthpMachine.TestCase
