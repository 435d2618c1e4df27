"""Tables from tables and from nothing: sg_split, sgl_alloc, sgl_free.

Units: skip, sizes, length: bytes.
Raises: TypeError, InvalidArgument, MMError(ENOMEM), with nothing left behind.
Threads: one at a time a table.
Kernel: sg_split(), sgl_alloc(), sgl_free().
"""
from libc.errno cimport EINVAL
from libc.stdlib cimport free

from mmcore.core.buddy cimport alloc_pages
from mmcore.core.folio cimport count_arg
from mmcore.core.pagelist cimport PageList, filling, new_pagelist
from mmcore.core.scatterlist cimport *
from mmcore.core.sgiter cimport *

import errno as _errno

from .errors import InvalidArgument, MMError
from .pagelist import PageList as _PageList
from .sgalloc import sg_free_table, sg_init_table
from .unpin import release_pages

__all__ = ["sg_split", "sgl_alloc", "sgl_free"]

cdef struct cut_t:              # one output over one view: entries [first, last], cut at both ends
    sg_t *first
    uint64_t nents              # 0: nothing
    uint64_t head               # bytes to leave out of the first
    uint64_t tail               # bytes that the last has, from its own start (or head) on

cdef inline uint64_t view_length(const sg_t *sg, bint dma) noexcept nogil:
    return sg.dma_length if dma else sg.length

cdef int lay_out(sg_t *sg, uint64_t nents, uint64_t skip, const uint64_t *sizes, uint64_t n, cut_t *cuts,
                 bint dma) noexcept nogil:
    """Find the entries of each output in one view: 0, or -EINVAL when the list ends before they do.

    An entry that ends where an output starts, or one without bytes, is no part of it.
    """
    cdef uint64_t k, left, here, passed = skip
    for k in range(n):
        left = sizes[k]
        cuts[k].nents = 0
        while left:
            if sg == NULL or nents == 0:
                return -EINVAL
            here = view_length(sg, dma)
            if passed >= here:
                passed -= here
                sg = next_sg(sg)
                nents -= 1
                continue
            if cuts[k].nents == 0:
                cuts[k].first, cuts[k].head = sg, passed
            cuts[k].nents += 1
            here -= passed
            cuts[k].tail = here if here < left else left
            left -= cuts[k].tail
            if cuts[k].tail < here:
                passed += cuts[k].tail      # the next output goes on within this entry
                break
            passed = 0
            sg = next_sg(sg)
            nents -= 1
    return 0

cdef void fill_cpu(const cut_t *cut, sg_t *out, unsigned shift) noexcept nogil:
    cdef sg_t *sg = cut.first
    cdef uint64_t i, offset, length, skipped
    for i in range(cut.nents):
        if i:
            # An empty entry in the middle was passed over when the output was laid out.
            sg = next_sg(sg)
            while sg.length == 0:
                sg = next_sg(sg)
        skipped = cut.head if i == 0 else 0
        offset = sg.offset + skipped
        length = sg.length - skipped if i + 1 < cut.nents else cut.tail
        # Pages that the cut leaves out are left out: an offset stays as it was, below a page where it was.
        if skipped:
            assign_pfn(out + i, sg_pfn(sg) + (offset >> shift))
            out[i].offset = <uint32_t>(offset & ((ONE << shift) - 1))
        else:
            assign_pfn(out + i, sg_pfn(sg))
            out[i].offset = <uint32_t>offset
        out[i].length = <uint32_t>length

cdef void fill_dma(const cut_t *cut, sg_t *out) noexcept nogil:
    cdef sg_t *sg = cut.first
    cdef uint64_t i, skipped
    for i in range(cut.nents):
        if i:
            sg = next_sg(sg)
            while sg.dma_length == 0:
                sg = next_sg(sg)
        skipped = cut.head if i == 0 else 0
        out[i].dma_address = sg.dma_address + skipped
        out[i].dma_length = <uint32_t>(sg.dma_length - skipped if i + 1 < cut.nents else cut.tail)
        out[i].dma_flags = sg.dma_flags


def sg_split(sgt, skip, sizes):
    """Return a table for each of `sizes`: the bytes of the list from `skip` on, in order; the list stays as it is.

    When the list is mapped for DMA, each table has its part of the DMA view as well, and its .nents. Raises
    InvalidArgument when the list ends before the sizes do, MMError(ENOMEM); then nothing is left behind. Each table is
    freed by sg_free_table(). Kernel: sg_split(), less its faults: see docs/differences.md.
    """
    cdef SGTable table = table_arg(sgt), out
    cdef uint64_t passed = count_arg(skip, "skip", 0, ~<uint64_t>0), n, k
    cdef uint64_t *want = NULL
    cdef cut_t *cpu = NULL
    cdef cut_t *dma = NULL
    cdef bint mapped
    cdef int error
    cdef mem_t *m
    sizes = [count_arg(size, "a size", 1, ~<uint64_t>0) for size in sizes]
    n = len(sizes)
    if sum(sizes) + passed > ~<uint64_t>0:
        raise InvalidArgument("skip and sizes together are beyond 64 bits")
    outputs = []
    m = table.read()
    try:
        want = <uint64_t *>mem_malloc(m, (n + 1) * sizeof(uint64_t))
        cpu = <cut_t *>mem_malloc(m, (n + 1) * sizeof(cut_t))
        dma = <cut_t *>mem_malloc(m, (n + 1) * sizeof(cut_t))
        if want == NULL or cpu == NULL or dma == NULL:
            raise MMError(_errno.ENOMEM, f"no memory to lay out {n} outputs")
        for k in range(n):
            want[k] = sizes[k]
        mapped = table.mapping is not None
        pages_of(table)
        with nogil:
            error = lay_out(table.t.sgl, table.t.orig_nents, passed, want, n, cpu, False)
            if error == 0 and mapped:
                error = lay_out(table.t.sgl, table.t.nents, passed, want, n, dma, True)
        if error:
            raise InvalidArgument(f"the sizes ask for {sum(sizes)} bytes from {passed} on, and the list has "
                                  f"{total_length(table.t.sgl, table.t.orig_nents)}")
        for k in range(n):
            out = sg_init_table(table.mem, max(cpu[k].nents, dma[k].nents if mapped else 0))
            outputs.append(out)
            fill_cpu(&cpu[k], out.t.sgl, m.page_shift)
            out.t.nents = out.t.orig_nents = cpu[k].nents
            if mapped:
                fill_dma(&dma[k], out.t.sgl)
                out.t.nents = dma[k].nents
    finally:
        free(want)
        free(cpu)
        free(dma)
        table.read_done()
    return outputs


def sgl_alloc(Memory mem not None, length):
    """Return a table over `length` bytes of fresh pages, an entry a page; sgl_free() frees both.

    Any length: the kernel's returns NULL from 4 GiB - 4 KiB on. Raises InvalidArgument for 0, MMError(ENOMEM) with
    nothing left behind.
    """
    cdef mem_t *m = mem.ptr()
    cdef uint64_t size = count_arg(length, "length", 1, m.nr_pages << m.page_shift)
    cdef uint64_t page = ONE << m.page_shift, n = (size + page - 1) // page, i, got
    cdef SGTable table = sg_init_table(mem, n)
    cdef PageList pages = new_pagelist(mem, n)
    cdef uint64_t *pfns = filling(pages)
    cdef sg_t *sg = table.t.sgl
    cdef int r
    mem.enter()
    with nogil:
        got = 0
        for r in range(m.nr_regions):
            got += a64_load_relaxed(&m.region[r].nr_free)
        # What cannot succeed is not begun.
        if got < n or inject_fails(m, INJECT_FRAME):
            got = 0
        else:
            got = alloc_pages(m, (1 << MAX_REGIONS) - 1, pfns, n)
        if got == n:
            for i in range(n):
                assign_pfn(sg + i, pfns[i])
                sg[i].length = <uint32_t>(page if i + 1 < n else size - i * page)
    mem.leave()
    if got < n:
        if got:
            release_pages(pages[:got])
        raise MMError(_errno.ENOMEM, f"{n} pages are wanted for {size} bytes, and so many are not free")
    return table


def sgl_free(sgt):
    """Free the pages of a table that sgl_alloc() made, and the table. Raises BadPage when a page was freed already."""
    cdef SGTable table = table_arg(sgt)
    if table.t.orig_nents == 0:
        return
    if table.mapping is not None or table.nr_users:
        sg_free_table(table)            # refuses, and says why
    pfns = table.entries["pfn"]
    release_pages(_PageList(table.mem, pfns))
    sg_free_table(table)
