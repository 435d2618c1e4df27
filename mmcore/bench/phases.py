"""Registering and releasing a buffer, phase by phase: by the engine's generations, and by the running kernel through
io_uring.

    fault-in    every page is touched for the first time
    pin         pages are found and pinned
    sg          they are put into a table
    account     checks and accounting: what is left of the whole call
    map, unmap  the device's part
    unpin       pins are dropped, and the table is freed
    free        the memory is unmapped, and given back

The kernel pins, makes its table and accounts in one system call: "pin" is all three. It maps nothing: io_uring has no
device.
"""

import time
from dataclasses import dataclass

import mmcore as mmc
from mmcore.live.buffer import buffer
from mmcore.live.iouring import kernel_register

from .measure import median_mad
from .mr import GENERATIONS, generation_name

PHASES = ("fault_in", "pin", "sg", "account", "map", "unmap", "unpin", "free")


@dataclass
class KernelRun:
    """One buffer's life in the real kernel, in ns of the caller's processor time: what others ran meanwhile is not in
    it."""

    backing: str
    nbytes: int
    fault_in: int
    register: int
    unregister: int
    free: int

    def as_dict(self):
        """Return plain data."""
        return dict(vars(self))


def kernel_run(nbytes, backing, clock=time.thread_time_ns):
    """Make, register, unregister and free a real buffer; returns KernelRun. Raises NotPossible as buffer() and
    kernel_register()."""
    made = buffer(nbytes, backing, populate=False)
    try:
        length = made.length
        fault_in = made.populate(clock)
        measured = kernel_register(made, 1, clock=clock)
        start = clock()
        made.close()
        free = clock() - start
    finally:
        made.close()
    return KernelRun(backing, length, fault_in, int(measured.register_ns[0]), int(measured.unregister_ns[0]), free)


def engine_phases(mm, addr, nbytes, *, fault_in=None, free=None, rounds=5, clock=time.thread_time_ns):
    """Register a buffer of an address space by each generation; returns one dict a generation, ns a page, medians.

    fault_in, free: ns that its first touch and its end took, or took in a buffer like it; the same for all. Raises
    MMError where the buffer cannot be registered.
    """
    device = mmc.IBDevice(mm.mem)
    npages = -(-nbytes // mm.mem.page_size)
    samples = {generation: [] for generation in GENERATIONS}
    for turn in range(rounds + 1):  # the first one warms up
        for k in range(len(GENERATIONS)):
            generation = GENERATIONS[(turn + k) % len(GENERATIONS)]
            sample = _one(device, mm, addr, nbytes, npages, generation, clock)
            if turn:
                samples[generation].append(sample)
    rows = []
    for (acquire, release, lists), taken in samples.items():
        name = generation_name(acquire, release, lists)
        row = {"generation": name, "fault_in": fault_in, "free": free}
        row |= {phase: median_mad([sample[phase] for sample in taken])[0] for phase in taken[0]}
        rows.append(
            {"generation": name} | {phase: None if row.get(phase) is None else row[phase] / npages for phase in PHASES}
        )
    return rows


def _one(device, mm, addr, nbytes, npages, generation, clock):
    """One round of one generation: {phase: ns}. The parts are run alone first, and then the whole, of which they are a
    part."""
    acquire, release, lists = generation
    flags = mmc.FOLL_WRITE | mmc.FOLL_LONGTERM
    start = clock()
    if acquire == "sink":
        # Leaves go straight into the table: there is no part that only pins.
        pages = mmc.pin_user_pages_fast(
            mm, addr, npages, flags, output=mmc.SGAppendTable(mm.mem, max_segment=device.max_seg_size)
        )
        pin, sg = clock() - start, None
        mmc.sg_free_append_table(_unpinned(pages))
    else:
        pages = mmc.pin_user_pages_fast(mm, addr, npages, flags)
        between = clock()
        table = mmc.SGAppendTable(mm.mem, max_segment=device.max_seg_size)
        mmc.sg_alloc_append_table_from_pages(table, pages, 0, npages * mm.mem.page_size, device.max_seg_size, 0)
        pin, sg = between - start, clock() - between
        mmc.sg_free_append_table(table)
        mmc.unpin_user_pages(pages)
    start = clock()
    umem = mmc.ib_umem_get(device, mm, addr, nbytes, mmc.IB_ACCESS.LOCAL_WRITE, acquire=acquire)
    whole = clock() - start
    start = clock()
    mmc.dma_unmap_sgtable(device, umem.sgt)
    between = clock()
    mmc.dma_map_sgtable(device, umem.sgt)
    mapped, unmapped = clock() - between, between - start
    start = clock()
    mmc.ib_umem_release(umem, release=release, lists=lists)
    released = clock() - start
    return {
        "pin": pin,
        "sg": sg or 0,
        "account": max(0, whole - pin - (sg or 0) - mapped),
        "map": mapped,
        "unmap": unmapped,
        "unpin": max(0, released - unmapped),
    }


def _unpinned(table):
    """Drop the pins that a table's pages hold; returns the table."""
    pages = mmc.PageList(table.mem, mmc.sg_page_pfns(table))
    mmc.unpin_user_pages(pages)
    return table
