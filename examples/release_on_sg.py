"""The release loop of an RDMA umem, written in Python on for_each_sg: patch 4 of the series of 2021.

Before it, each page of each scatterlist entry was released on its own. The patch passes an entry, which is a range of
contiguous pages, to unpin_user_page_range_dirty_lock(), and that makes one update a folio.

    python examples/release_on_sg.py
"""
import time

import mmcore as mmc


def release_page_by_page(table, make_dirty):
    """Before: a page at a time."""
    for page in mmc.for_each_sg_page(table):
        mmc.unpin_user_pages_dirty_lock([page], 1, make_dirty)


def release_by_entry(table, make_dirty):
    """After: an entry at a time."""
    page_size = table.mem.page_size
    for sg in mmc.for_each_sg(table):
        mmc.unpin_user_page_range_dirty_lock(mmc.sg_page(sg), -(-sg.length // page_size), make_dirty)


def release(loop, size=16 << 20):
    """Pin a buffer of THPs into a scatterlist and release it: (state after, updates, folio locks, milliseconds)."""
    with mmc.Memory(4 * size, thp="always") as mem:
        mm = mmc.MM(mem)
        addr = mm.mmap(size)
        table = mmc.pin_user_pages(mm, addr, size // mem.page_size, mmc.FOLL_WRITE, output=mmc.SGAppendTable)
        mem.reset_opstats()
        start = time.perf_counter()
        loop(table, True)
        took = (time.perf_counter() - start) * 1e3
        cost = mem.opstats()
        state = mem.pages.tobytes()
        mmc.sg_free_append_table(table)
        mm.exit()
        mem.check()
        return state, cost["ref_atomics"] + cost["pincount_atomics"], cost["folio_locks"], took


def main():
    before, after = release(release_page_by_page), release(release_by_entry)
    assert before[0] == after[0], "the two loops must leave the same mem_map"
    for name, (_, updates, locks, took) in (("page by page", before), ("by entry", after)):
        print(f"{name:13} {updates:6} counter updates {locks:4} folio locks {took:9.3f} ms")
    print("mem_map is the same after both")


if __name__ == "__main__":
    main()
