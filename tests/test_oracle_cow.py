"""The kernel as oracle, on copy-on-write: one scenario, run by real processes (real fork, real writes, real pins of
io_uring) and by address spaces of the engine. After each step every page of every process is the same in both: present
or not, its first byte, the exclusive bit, the file bit, the order of its folio, and who shares it with whom.
"""

import pytest
from live_support import linux, or_skip
from oracle_support import THP, need_hugetlb, need_switch
from oracle_worlds import ORDER, PAGES, Processes, Spaces, canonical, words_of

from mmcore import live
from mmcore.live.iouring import _Ring

pytestmark = linux
ADVICE = {"DONTNEED": 4, "DONTFORK": 10, "POPULATE_READ": 22, "POPULATE_WRITE": 23}
ALL = tuple(PAGES)
PRIVATE = tuple(name for name in PAGES if name != "shmem")
SMALL = ("4k", "private file", "mthp 64k", "thp")       # what can be cut page by page
CUT = ("4k", "private file", "mthp 64k")
UNTOUCHED = ("4k", "private file")                      # what a read maps without making a page

# Name, backings, steps: a word, a process, and what the word takes: a page and a byte, or a page and how many. "fill"
# writes every page.
SCENARIOS = (
    ("parent writes after fork", ALL, "fill a A, fork a b, write a 0 B, read b 0, write a 1 C"),
    ("child writes after fork", ALL, "fill a A, fork a b, write b 0 B, read a 0, write b 3 D"),
    ("both write the same page", PRIVATE, "fill a A, fork a b, write a 2 B, write b 2 C"),
    ("child ends, then the parent writes", PRIVATE, "fill a A, fork a b, exit b, write a 0 B"),
    ("child writes and ends, then the parent writes", PRIVATE,
     "fill a A, fork a b, write b 0 B, exit b, write a 0 C, write a 5 D"),
    ("parent ends, then the child writes", PRIVATE, "fill a A, fork a b, fork b c, exit b, write c 0 B, write a 1 C"),
    ("three generations", PRIVATE,
     "fill a A, fork a b, fork b c, write b 0 B, write c 0 C, write a 0 D, exit c, write b 1 E"),
    ("zero pages", UNTOUCHED, "read a 0, read a 1, fork a b, write b 0 B, read a 0, write a 1 C"),
    ("the huge zero page", ("thp",), "read a 0, fork a b, write b 3 B, write a 600 C"),
    ("nothing touched before fork", PRIVATE, "fork a b, write a 0 B, write b 0 C"),
    ("read, then written, of a child", UNTOUCHED, "fork a b, read b 0, write b 0 B, read a 0"),
    ("read-only for a while", PRIVATE,
     "fill a A, fork a b, mprotect a 0 all r, read a 0, mprotect a 0 all rw, write a 0 B"),
    ("read-only pages that were alone", PRIVATE, "fill a A, mprotect a 0 all r, mprotect a 0 all rw, write a 0 B"),
    ("part read-only, then fork", SMALL,
     "fill a A, mprotect a 2 3 r, fork a b, mprotect b 2 3 rw, write b 2 B, write a 0 C"),
    ("part unmapped by the child", SMALL, "fill a A, fork a b, munmap b 0 3, write a 0 B, write a 4 C"),
    ("part unmapped by the parent", SMALL, "fill a A, fork a b, munmap a 1 2, write b 1 B, write b 0 C"),
    ("part unmapped, no fork", SMALL, "fill a A, munmap a 1 2, write a 0 B, write a 3 C"),
    ("dropped and touched again", SMALL, "fill a A, madvise a 1 1 DONTNEED, read a 1, write a 1 B"),
    ("dropped after fork", SMALL, "fill a A, fork a b, madvise a 0 4 DONTNEED, write b 0 B, read a 0"),
    ("all dropped", ALL, "fill a A, madvise a 0 all DONTNEED, read a 0, write a 1 B"),
    ("populated for writing after fork", PRIVATE, "fill a A, fork a b, madvise a 0 all POPULATE_WRITE, write b 0 B"),
    ("populated for reading", UNTOUCHED, "madvise a 0 all POPULATE_READ, fork a b, write a 0 B"),
    ("moved", CUT, "fill a A, mremap a 0 all 515, write a 515 B, fork a b, write b 516 C"),
    ("moved after fork", CUT, "fill a A, fork a b, mremap a 0 all 512, write a 512 B, write b 0 C"),
    ("moved in line", ("thp",), "fill a A, mremap a 0 512 1024, write a 1024 B, fork a b, write b 1030 C"),
    ("moved out of line", ("thp",), "fill a A, mremap a 0 512 1029, write a 1029 B, fork a b, write b 1030 C"),
    ("kept from the child", PRIVATE, "fill a A, madvise a 0 all DONTFORK, fork a b, write a 0 B"),
    ("pinned, then fork", PRIVATE,
     "fill a A, pin a 0 4, fork a b, write a 0 B, write b 1 C, write a 5 D, unpin a, write a 1 E"),
    ("pinned whole, then fork", PRIVATE,
     "fill a A, pin a 0 all, fork a b, write b 0 B, unpin a, fork a c, write a 0 C"),
    ("fork, then pinned", PRIVATE, "fill a A, fork a b, pin a 0 4, write b 0 B, write a 0 C, unpin a, write a 1 D"),
    ("fork, pinned by the child", PRIVATE, "fill a A, fork a b, pin b 1 3, write a 1 B, exit_pinned b, write a 2 C"),
    ("zero pages pinned", UNTOUCHED, "read a 0, pin a 0 2, fork a b, write a 0 B, unpin a"),
    ("pinned once, forked after", PRIVATE, "fill a A, pin a 0 4, unpin a, fork a b, write a 0 B, write b 0 C"),
    ("pinned and dropped", SMALL, "fill a A, pin a 0 4, madvise a 0 2 DONTNEED, write a 0 B, unpin a, write a 2 C"),
    ("shared memory is not copied", ("shmem",),
     "fill a A, fork a b, read b 0, pin a 0 4, fork a c, write c 0 B, read b 0, unpin a"),
)
CASES = [(name, backing) for name, backings, _ in SCENARIOS for backing in backings]


def steps_of(name):
    """Return [(word, process, ...)] of a scenario."""
    text, = (steps for known, _, steps in SCENARIOS if known == name)
    return [tuple(_argument(word) for word in step.split()) for step in text.split(", ")]


def _argument(word):
    if word in ADVICE:
        return ADVICE[word]
    if word in ("r", "rw"):
        return words_of(word)
    return -1 if word == "all" else int(word) if word.isdigit() else word


def step(world, backing, word, who, *args):
    """Do one step; returns what it gave."""
    pages = PAGES[backing]
    args = tuple(pages if arg == -1 else arg for arg in args)
    if word == "fill":
        unit = 1 if backing != "hugetlb" else 512
        for page in range(0, pages, unit):
            world.write(who, page, args[0])
        return None
    if word == "exit_pinned":
        world.unpin(who)
        return world.exit(who)
    got = getattr(world, word)(who, *args)
    if word == "read" and backing in ("shmem", "private file"):
        # Around a read fault the kernel maps up to 64 KiB of what is in the page cache (fault_around_bytes), and the
        # engine the one page: reading all pages brings both to the same place.
        for page in range(pages):
            world.read(who, page)
    return got if word == "read" else None


@pytest.mark.parametrize("name, backing", CASES)
def test_the_same_after_every_step(name, backing, request):
    def change(path, value):
        request.getfixturevalue("change_system")(path, value)

    steps = steps_of(name)
    if backing == "hugetlb":
        need_hugetlb(change, 8)
    elif backing == "mthp 64k":
        need_switch(change, f"{THP}/hugepages-64kB/enabled", "madvise")
    if any("pin" in word for word, *_ in steps):
        or_skip(_Ring).__exit__()
    with live.buffer(4096) as buf:
        or_skip(live.capture, buf)
    kernel = Processes(backing)
    engine = Spaces(backing)
    try:
        for number, (word, who, *args) in enumerate(steps):
            gave = step(kernel, backing, word, who, *args)
            assert step(engine, backing, word, who, *args) == gave
            theirs, ours = canonical(kernel.state()), canonical(engine.state())
            if number == 0 and word == "fill" and ORDER[backing] != max(row[2] for row in theirs["a"] if row):
                pytest.skip(f"this machine gave no folios of order {ORDER[backing]}")
            where = f"after step {number}, {word} {who} {args}"
            for process in theirs:
                wrong = [(i, f"kernel {row}", f"engine {mine}")
                         for i, (row, mine) in enumerate(zip(theirs[process], ours[process])) if row != mine]
                assert not wrong, f"{where}: {len(wrong)} pages of {process} differ, {wrong[:4]}"
        engine.mem.check()
    finally:
        kernel.close()
        engine.close()
