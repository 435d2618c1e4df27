"""Cycles of objects that the collector of Python finds: what it clears first must not be what the rest stands on."""
import gc

import mmcore as mmc
from mm_support import PAGE
from mmcore import MM, File, Memory


def collected(*things):
    """Make a cycle of things that nobody else holds, and have it collected."""
    cycle = [*things]
    cycle.append(cycle)
    del cycle, things
    gc.collect()


def test_a_process_goes_before_its_files():
    """A file that went first was read after it was freed: AddressSanitizer sees that, an ordinary build may not."""
    mem = Memory("32M")
    free = mem.vmstat()["nr_free_pages"]

    def process(forks):
        mm = MM(mem)
        for kind in ("tmpfs", "ext4"):
            addr = mm.mmap(16 * PAGE, flags=mmc.MAP_SHARED, file=File(mem, 16 * PAGE, kind))
            mm.touch(addr, 16 * PAGE)
        return [mm, mm.fork()] if forks else [mm]

    for forks in (False, True):
        cycle = process(forks)
        cycle.append(cycle)
        del cycle
        gc.collect()
        mem.check()
        assert mem.vmstat()["nr_free_pages"] == free
    mem.close()


def test_a_view_of_a_page_goes_before_its_memory():
    mem = Memory("8M")
    folio = mmc.folio_alloc(mem, 0)
    for _ in range(20):
        collected(mmc.page_address(mmc.folio_page(folio, 0)))
    mmc.folio_put(folio)
    mem.close()         # refused while a view is left


def test_a_chained_table_is_free_when_the_one_before_it_is_gone():
    mem = Memory("8M")
    second = mmc.sg_alloc_table(mem, 4)

    def first():
        table = mmc.sg_alloc_table(mem, 4)
        mmc.sg_chain(table, 4, second)
        return table

    collected(first())
    mmc.sg_free_table(second)
    mem.close()
