"""Long histories of everything at once: what test_world.py's machines do when a seed draws their steps.

Hypothesis draws short histories and shrinks what fails; the same seed draws the same long one.
"""
import errno
import random

import pytest

from test_gup_state import FLAGS, GETS, PINS, SLOW_FLAGS
from test_mm_state import MOST_MMS, PAGES, PMD
from test_world import (ACCESS, FILE, IOVAS, LONG, MOST_HOLDERS, OFFSETS, READ, WRITE, WorldMachine, WorldMthpMachine,
                        WorldThpMachine)
from vfio_support import GENERATIONS

STEPS = {"reg": 8, "dereg": 5, "rdma_read": 4, "ring": 4, "buffers_register": 8, "buffers_update": 8, "buffers_unregister": 3,
         "buffers_clone": 4, "dma_map": 8, "dma_unmap": 5, "attach": 1, "detach_domain": 1, "device_write": 6, "direct_read": 3,
         "mmap_file": 2, "file_write": 2, "file_read": 1, "truncate": 1,
         "gup": 3, "gup_slow": 2, "touch": 4, "write": 6, "read": 3, "madvise": 4, "mremap": 1, "fork": 3, "exit": 2, "munmap": 1,
         "mmap": 4, "mprotect": 2, "collapse": 1, "split": 2, "unpin": 4, "pin": 1}


def history(machine, seed, steps):
    draw = random.Random(seed)

    def start():
        return draw.choice((draw.randrange(40), PMD - 8 + draw.randrange(16), draw.randrange(PAGES), PMD * draw.randrange(3)))

    def length():
        return draw.choice((draw.randrange(1, 13), draw.randrange(1, 13), PMD, PMD + 3, 2 * PMD))

    def place():
        return dict(start=start())

    def stretch():
        return dict(start=start(), length=length())

    def specs():
        return dict(specs=[(start(), draw.choice((0, length(), length())), draw.choice(OFFSETS)) for _ in range(draw.choice((1, 1, 2, 3)))])

    extra = {
        "reg": lambda: stretch() | dict(offset=draw.choice(OFFSETS), cut=draw.choice(OFFSETS), access=draw.choice(ACCESS),
                                        acquire=draw.choice(("sink", "list"))),
        "dereg": lambda: dict(release=draw.choice(("range", "array", "page"))), "rdma_read": lambda: dict(at=draw.randrange(1 << 20)),
        "buffers_register": specs, "buffers_update": lambda: specs() | dict(at=draw.randrange(3)),
        "buffers_clone": lambda: dict(source=draw.randrange(10)),
        "dma_map": lambda: stretch() | dict(iova=draw.choice(IOVAS), prot=draw.choice((3, 3, 1))),
        "dma_unmap": lambda: dict(invalidate=draw.random() < .1), "device_write": dict,
        "gup": lambda: stretch() | dict(call=draw.choice(PINS + GETS), flags=draw.choice(FLAGS),
                                        generation=draw.choice(("leaf", "page")), keep=draw.random() < .5),
        "gup_slow": lambda: stretch() | dict(call=draw.choice(PINS[:3] + GETS[:3]), flags=draw.choice(SLOW_FLAGS),
                                             generation=draw.choice(("leaf", "page"))),
        "touch": lambda: stretch() | dict(write=draw.random() < .6), "write": place, "read": place, "pin": place,
        "madvise": lambda: stretch() | dict(advice=draw.choice(("DONTNEED", "PAGEOUT", "HUGEPAGE", "NOHUGEPAGE", "DONTFORK"))),
        "mremap": lambda: stretch() | dict(to=start(), new_length=length()),
        "munmap": stretch, "mprotect": lambda: stretch() | dict(prot=draw.choice((0, READ, READ | WRITE, READ | WRITE))),
        "mmap_file": lambda: stretch() | dict(file=draw.randrange(2), first=draw.randrange(FILE)),
        "file_write": lambda: dict(index=draw.randrange(FILE)), "file_read": lambda: dict(index=draw.randrange(FILE)),
        "truncate": lambda: dict(size=draw.choice((draw.randrange(FILE), FILE))),
        "direct_read": lambda: stretch() | dict(most=draw.choice((1, 3, 600))),
        "mmap": lambda: stretch() | dict(prot=READ | WRITE, shared=draw.random() < .3),
        "collapse": lambda: dict(leaf=draw.randrange(3)), "split": lambda: place() | dict(order=draw.randrange(4))}
    possible = {"fork": lambda: len(machine.spaces) < MOST_MMS, "exit": lambda: len(machine.spaces) > 1,
                "pin": lambda: len(machine.pins) < 40, "unpin": lambda: machine.pins,
                "reg": lambda: len(machine.regions) < MOST_HOLDERS, "dereg": lambda: machine.regions, "rdma_read": lambda: machine.regions,
                "buffers_clone": lambda: len(machine.rings) > 1,
                "dma_unmap": lambda: machine.p.maps, "detach_domain": lambda: machine.c.domains,
                "attach": lambda: len(machine.c.domains) < 2 and all(m.process.alive and m.mapped for m in machine.p.maps)
                and not machine.p.invalid,
                "device_write": lambda: any(hold.writable for hold in machine.holds())}
    machine.begin(limited=seed % 2 == 1, options=draw.choice(GENERATIONS))
    for _ in range(steps):
        step = draw.choices(list(STEPS), list(STEPS.values()))[0]
        if possible.get(step, lambda: True)():
            arguments = extra.get(step, dict)()
            if step == "device_write":
                machine.device_write(which=draw.randrange(1 << 20))
            else:
                machine.__getattribute__(step)(**({} if step == "attach" else dict(which=draw.randrange(10))), **arguments)
            machine.equal()
            machine.owned()
    machine.teardown()
    return machine.outcomes


@pytest.mark.parametrize("kind", (WorldMachine, WorldThpMachine, WorldMthpMachine))
def test_long_histories_of_everything(kind):
    outcomes = set().union(*[history(kind(), seed, 200) for seed in range(60 if LONG else 5)])
    # They reach what can happen.
    assert outcomes >= {(call, number) for call in ("reg", "register", "map_dma") for number in (0, errno.EFAULT, errno.ENOMEM)}
    assert outcomes >= {("register", errno.EBUSY), ("update", 0), ("update", errno.ENXIO), ("unregister", 0), ("unregister", errno.ENXIO),
                        ("clone", 0), ("clone", errno.EBUSY), ("map_dma", errno.EEXIST), ("update", errno.EFAULT)}
