"""The state machine of address spaces, with pins and references by every call, flag and generation; it ends with none."""
import errno
import os
import random

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import initialize, rule

import mmcore as mmc
from reference.spaces import READ, WRITE, Space
from mmcore import MM, MMError
from test_mm_state import MOST_MMS, PAGE, PAGES, PMD, Hold, Machine, lengths, starts, window

GETS = (mmc.get_user_pages, mmc.get_user_pages_remote, mmc.get_user_pages_unlocked, mmc.get_user_pages_fast)
PINS = (mmc.pin_user_pages, mmc.pin_user_pages_remote, mmc.pin_user_pages_unlocked, mmc.pin_user_pages_fast)
FLAGS = (0, mmc.FOLL_WRITE, mmc.FOLL_WRITE | mmc.FOLL_LONGTERM, mmc.FOLL_LONGTERM, mmc.FOLL_NOFAULT, mmc.FOLL_NOFAULT | mmc.FOLL_WRITE)
SLOW_FLAGS = (mmc.FOLL_SPLIT_PMD, mmc.FOLL_ANON, mmc.FOLL_NOWAIT | mmc.FOLL_WRITE, mmc.FOLL_HWPOISON | mmc.FOLL_WRITE,
              mmc.FOLL_DUMP, mmc.FOLL_INTERRUPTIBLE | mmc.FOLL_HONOR_NUMA_FAULT)
MOST_PINS = 40


class PinMachine(Machine):
    """As its base, in a machine whose user memory is Movable: longterm pins move it."""

    @initialize()
    def begin(self):
        self.mem = mmc.Memory("128M", thp=self.thp, mthp=self.mthp, movable="32M", cma="16M")
        self.spaces, self.pins = [], []
        self.token = self.shares = 0
        first = MM(self.mem)
        self.free = self.mem.vmstat()["nr_free_pages"] + first.nr_tables
        self.spaces.append((first, Space()))

    @rule(which=st.integers(0, 9), leaf=st.integers(0, 2))
    def collapse(self, which, leaf):
        mm, space = self.pick(which)
        populated = set(space.populated)
        Machine.collapse(self, which=which, leaf=leaf)
        first = mm.page_at(window(leaf * PMD, 1).start * PAGE)
        if first is not None and mmc.is_huge_zero_page(first):
            space.populated = populated     # a leaf already, and nothing of its own behind it

    def allowed(self, space, page, write):
        area = space.area.get(page)
        return area is not None and area.prot & (WRITE if write else READ) and (
            area.share is None or area.offset < area.share.size)

    def acquire(self, which, start, length, call, flags, generation):
        """Call it, and tell the twin what it brought about. (mm, first page, the list)"""
        mm, space = self.pick(which, f"{call.__name__} {start}+{length}")
        pages = window(start, length)
        write = bool(flags & mmc.FOLL_WRITE)
        wanted = 0
        while wanted < len(pages) and self.allowed(space, pages[wanted], write):
            wanted += 1
        try:
            got = call(mm, pages.start * PAGE, len(pages), int(flags), acquire=generation)
        except MMError as refusal:
            # What is allowed is had, unless it was not to be faulted in, or a hole of a dump, or is not anonymous.
            limited = flags & (mmc.FOLL_NOFAULT | mmc.FOLL_DUMP | mmc.FOLL_ANON)
            assert refusal.errno == errno.EFAULT and (wanted == 0 or limited) or (
                # somebody else's pin keeps a page from moving
                refusal.errno == errno.ENOMEM and flags & mmc.FOLL_LONGTERM and self.holds()), (refusal, wanted)
            if refusal.errno == errno.ENOMEM:
                self.faulted(space, pages[:wanted], write, flags)       # all were brought in before one could not move
            return mm, pages.start, None
        assert len(got) <= wanted
        # The fast walk's pages stay when what follows cannot be moved for somebody else's pin.
        short = flags & mmc.FOLL_LONGTERM and call is mmc.pin_user_pages_fast and self.holds()
        if not short and not flags & (mmc.FOLL_NOFAULT | mmc.FOLL_DUMP | mmc.FOLL_ANON | mmc.FOLL_NOWAIT):
            assert len(got) == wanted, (len(got), wanted)
        if short and len(got) < wanted:
            self.faulted(space, pages[:wanted], write, flags)           # brought in, and then refused
        self.faulted(space, pages[:len(got)], write, flags)
        return mm, pages.start, got

    def faulted(self, space, pages, write, flags):
        for page in pages:
            area = space.area[page]
            if not flags & mmc.FOLL_NOFAULT:
                space.touch(range(page, page + 1), write)
                if flags & mmc.FOLL_LONGTERM and area.share is None:
                    space.populated.add(page)           # a longterm pin to read gets a page of its own

    calls = st.sampled_from(PINS + GETS)

    @rule(which=st.integers(0, 9), start=starts, length=lengths, call=calls, flags=st.sampled_from(FLAGS),
          generation=st.sampled_from(("leaf", "page")), keep=st.booleans())
    def gup(self, which, start, length, call, flags, generation, keep):
        if call in GETS:
            flags &= ~mmc.FOLL_LONGTERM
        mm, first, got = self.acquire(which, start, length, call, flags, generation)
        self.settle(mm, first, got, call, keep)

    @rule(which=st.integers(0, 9), start=starts, length=lengths, call=st.sampled_from(PINS[:3] + GETS[:3]),
          flags=st.sampled_from(SLOW_FLAGS), generation=st.sampled_from(("leaf", "page")))
    def gup_slow(self, which, start, length, call, flags, generation):
        mm, first, got = self.acquire(which, start, length, call, flags, generation)
        self.settle(mm, first, got, call, False)

    def settle(self, mm, first, got, call, keep):
        """Release, or keep some as pins whose pages must stay what they are."""
        if got is None or not len(got):
            return
        space = next(space for other, space in self.spaces if other is mm)
        for i, page in enumerate(got):
            if not (mmc.is_zero_page(page) or mmc.is_huge_zero_page(page)):
                assert self.content(page.pfn) == space.read(first + i)
        if call in GETS:
            mmc.release_pages(got)
            return
        kept = []
        for i, page in enumerate(got):
            area = space.area[first + i]
            if keep and len(self.pins) < MOST_PINS and area.share is None and len(kept) < 4 \
                    and not (mmc.is_zero_page(page) or mmc.is_huge_zero_page(page)) \
                    and mmc.PageFlags.anon_exclusive in (page.flags | page.folio.flags):
                kept.append(i)
                self.pins.append(Hold(mm, first + i, page.pfn, space.read(first + i), area.prot & WRITE))
        mmc.unpin_user_pages(mmc.PageList(self.mem, [pfn for i, pfn in enumerate(got.pfns.tolist()) if i not in kept]))


class PinThpMachine(PinMachine):
    thp = "always"


class PinMthpMachine(PinMachine):
    mthp = (2, 4)


LONG = os.environ.get("MMCORE_TEST_PROFILE") == "long"
STEPS = {"gup": 12, "gup_slow": 6, "touch": 4, "write": 5, "read": 2, "madvise": 5, "fork": 3, "exit": 2, "munmap": 1, "mmap": 2,
         "mprotect": 2, "collapse": 2, "split": 2, "unpin": 6, "pin": 1}


@pytest.mark.parametrize("kind", (PinMachine, PinThpMachine, PinMthpMachine))
@pytest.mark.parametrize("seed", range(40 if LONG else 4))
def test_long_histories_with_pins(kind, seed):
    draw, machine = random.Random(seed), kind()

    def place():
        return dict(start=draw.choice((draw.randrange(40), PMD - 8 + draw.randrange(16), draw.randrange(PAGES))))

    def stretch():
        return place() | dict(length=draw.choice((draw.randrange(1, 13), draw.randrange(1, 13), PMD, 2 * PMD)))

    extra = {"gup": lambda: stretch() | dict(call=draw.choice(PINS + PINS + GETS), flags=draw.choice(FLAGS),
                                             generation=draw.choice(("leaf", "page")), keep=draw.random() < .5),
             "gup_slow": lambda: stretch() | dict(call=draw.choice(PINS[:3] + GETS[:3]), flags=draw.choice(SLOW_FLAGS),
                                                  generation=draw.choice(("leaf", "page"))),
             "touch": lambda: stretch() | dict(write=draw.random() < .6), "write": place, "read": place, "pin": place,
             "madvise": lambda: stretch() | dict(advice=draw.choice(("DONTNEED", "PAGEOUT", "HUGEPAGE", "NOHUGEPAGE"))),
             "munmap": stretch, "mprotect": lambda: stretch() | dict(prot=draw.choice((0, READ, READ | WRITE, READ | WRITE))),
             "mmap": lambda: stretch() | dict(prot=READ | WRITE, shared=draw.random() < .3),
             "collapse": lambda: dict(leaf=draw.randrange(3)), "split": lambda: place() | dict(order=draw.randrange(4))}
    possible = {"fork": lambda: len(machine.spaces) < MOST_MMS, "exit": lambda: len(machine.spaces) > 1,
                "pin": lambda: len(machine.pins) < MOST_PINS, "unpin": lambda: machine.pins}
    machine.begin()
    machine.mmap(which=0, start=0, length=PAGES, prot=READ | WRITE, shared=False)
    for _ in range(200):
        step = draw.choices(list(STEPS), list(STEPS.values()))[0]
        if possible.get(step, lambda: True)():
            getattr(machine, step)(which=draw.randrange(10), **extra.get(step, dict)())
            machine.equal()
    machine.teardown()


for machine in (PinMachine, PinThpMachine, PinMthpMachine):
    machine.TestCase.settings = settings(max_examples=200 if LONG else 12, stateful_step_count=30, deadline=None)

TestPins = PinMachine.TestCase
TestPinsThp = PinThpMachine.TestCase
TestPinsMthp = PinMthpMachine.TestCase
