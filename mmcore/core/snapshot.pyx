"""Memory.save() and Memory.load(): mem_map is plain bytes, so that a file of it means the same in another process.

The file is an .npz without pickle: `meta` (JSON), the parts of mem_map that are not zero by blocks of 512 pages, the free
blocks, the bytes of pages that were written, and the hugetlb pools.
"""
cimport cython
from libc.stdint cimport int64_t, uint8_t, uint64_t
from libc.string cimport memcpy
from mmcore.core.buddy cimport forget_ready
from mmcore.core.memory cimport *
from mmcore.core.space cimport spaces_of, spaces_t

import errno as _errno
import json
import zipfile
import zlib

import numpy as np

from .boot import DevicePages
from .errors import BadPage, InvalidArgument, MMError
from .memory import VMSTAT

__all__ = ["save", "load"]

cdef enum:
    PAGES_A_BLOCK = 512
    FORMAT = 1

_ARRAYS = ("meta", "blocks", "block_numbers", "free", "written", "written_bytes", "pooled")


def _device(wanted):
    return {"size": wanted.size, "type": wanted.type, "align": wanted.align, "compound": wanted.compound}


def save(Memory mem not None, path):
    """Write a Memory to a file; no other thread may use it meanwhile."""
    cdef mem_t *m = mem.ptr()
    cdef uint64_t i, pfn, page_size = ONE << m.page_shift
    cdef int k
    cdef spaces_t *spaces = spaces_of(m)
    files = sum([spaces.file[i] != NULL for i in range(spaces.nr_files)]) if spaces != NULL else 0
    if files or (spaces != NULL and spaces.nr_mms):
        raise MMError(_errno.EBUSY, f"{spaces.nr_mms} address spaces and {files} files use this Memory, and a saved one has "
                                    "neither: exit() the MMs and drop the Files first")
    for k in range(m.nr_regions):
        # Ready blocks are a shortcut of this process: in a file, free frames read as free.
        pthread_mutex_lock(&m.region[k].lock)
        forget_ready(m, &m.region[k], m.region[k].base, m.region[k].frontier - m.region[k].base)
        pthread_mutex_unlock(&m.region[k].lock)
    pages = mem.pages
    frontier = len(pages)
    raw = pages.view(np.uint8)
    numbers = [n for n in range(-(-frontier // PAGES_A_BLOCK))
               if raw[n * PAGES_A_BLOCK * 64:(n + 1) * PAGES_A_BLOCK * 64].any()]
    blocks = np.zeros((len(numbers), PAGES_A_BLOCK * 64), dtype=np.uint8)
    for row, n in enumerate(numbers):
        part = raw[n * PAGES_A_BLOCK * 64:(n + 1) * PAGES_A_BLOCK * 64]
        blocks[row, :len(part)] = part
    written = np.flatnonzero(pages["flags"] & np.uint64(ONE << PG_mm_written)).astype(np.uint64)
    content = np.empty((len(written), page_size), dtype=np.uint8)
    for i in range(<uint64_t>len(written)):
        pfn = written[i]
        content[i] = np.frombuffer(<const uint8_t[:page_size]>(m.bytes + (pfn << m.page_shift)), dtype=np.uint8)
    config = {**mem.config, "devices": [_device(device) for device in mem.config["devices"]],
              "hugetlb": {str(size): nr for size, nr in mem.config["hugetlb"].items()}}
    meta = {"format": FORMAT, "config": config, "huge_zero_pfn": m.huge_zero_pfn,
            "stats": {name: stat_sum(m, item) for name, item in VMSTAT.items()},
            "frontiers": [m.region[k].frontier for k in range(m.nr_regions)],
            "pools": [[m.pool[k].nr, m.pool[k].nr_free] for k in range(m.nr_pools)]}
    pooled = [m.pool[k].free[i] for k in range(m.nr_pools) for i in range(m.pool[k].nr_free)]
    np.savez_compressed(path, meta=np.frombuffer(json.dumps(meta).encode(), dtype=np.uint8), blocks=blocks,
                        block_numbers=np.array(numbers, dtype=np.uint64), free=free_blocks(m), written=written,
                        written_bytes=content, pooled=np.array(pooled, dtype=np.uint64))

cdef object free_blocks(mem_t *m):
    """All free blocks as PFN | order << 56."""
    cdef int i
    cdef unsigned order
    cdef uint64_t word, bits
    found = []
    for i in range(m.nr_regions):
        for order in range(m.max_order + 1):
            if m.region[i].nr_blocks[order]:
                for word in range((m.region[i].free[order].nr_bits + 63) >> 6):
                    bits = m.region[i].free[order].level[0][word]
                    while bits:
                        found.append((m.region[i].base + (((word << 6) + <uint64_t>ctz64(bits)) << order))
                                     | (<uint64_t>order << 56))
                        bits &= bits - 1
    return np.array(found, dtype=np.uint64)


def _foreign(path, why):
    return InvalidArgument(f"{path} is no saved Memory, or is damaged: {why}")


def _read(path):
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in _ARRAYS}
        meta = json.loads(arrays["meta"].tobytes())
        if meta["format"] != FORMAT:
            raise _foreign(path, f"format {meta['format']}, this version reads {FORMAT}")
        config = dict(meta["config"])
        config["devices"] = [DevicePages(**device) for device in config["devices"]]
        config["hugetlb"] = {int(size): nr for size, nr in config["hugetlb"].items()}
        config["mthp"] = tuple(config["mthp"])
    except OSError as e:
        if isinstance(e, InvalidArgument):
            raise
        if isinstance(e, (FileNotFoundError, PermissionError, IsADirectoryError)):
            raise
        raise _foreign(path, e) from None
    except (ValueError, KeyError, TypeError, AttributeError, EOFError, NotImplementedError, zipfile.BadZipFile, zlib.error) as e:
        raise _foreign(path, f"{type(e).__name__}: {e}") from None
    return arrays, meta, config


def load(path):
    """Return the Memory that save() wrote; every law is checked before it is handed out."""
    arrays, meta, config = _read(path)
    try:
        mem = Memory(**config)
    except (ValueError, TypeError, AttributeError, OverflowError) as e:     # what save() writes makes one
        raise _foreign(path, f"{type(e).__name__}: {e}") from None
    try:
        try:
            fill(mem, arrays, meta)
            mem.check()
        except BadPage as e:
            raise _foreign(path, e) from None
        except (ValueError, KeyError, TypeError, IndexError, OverflowError, AttributeError) as e:
            raise _foreign(path, f"{type(e).__name__}: {e}") from None
    except BaseException:
        mem.close()
        raise
    return mem

@cython.boundscheck(True)
cdef object fill(Memory mem, dict arrays, dict meta):
    # Bounds are checked here, unlike elsewhere: the lists of a damaged file are as long as they are.
    cdef mem_t *m = &mem.m
    cdef const uint8_t[:, ::1] blocks, content
    cdef const uint64_t[::1] numbers, free, written, pooled
    cdef uint64_t i, at, pfn, page_size = ONE << m.page_shift, nr
    cdef unsigned order
    cdef region_t *r
    cdef int k
    blocks, numbers = arrays["blocks"], arrays["block_numbers"]
    content, written = arrays["written_bytes"], arrays["written"]
    free, pooled = arrays["free"], arrays["pooled"]
    if blocks.shape[1] != PAGES_A_BLOCK * 64 or blocks.shape[0] != numbers.shape[0] \
            or content.shape[0] != written.shape[0] or (written.shape[0] and <uint64_t>content.shape[1] != page_size):
        raise ValueError("arrays of the wrong shape")
    for i in range(<uint64_t>numbers.shape[0]):
        at = numbers[i] * PAGES_A_BLOCK
        if numbers[i] > m.nr_pages or at >= m.nr_pages:
            raise ValueError(f"pages beyond the Memory: {at:#x}")
        nr = min(<uint64_t>PAGES_A_BLOCK, m.nr_pages - at)
        memcpy(&m.map[at], &blocks[i, 0], nr * sizeof(page_t))
    for i in range(<uint64_t>written.shape[0]):
        if written[i] >= m.nr_pages:
            raise ValueError(f"bytes beyond the Memory: {written[i]:#x}")
        memcpy(m.bytes + (written[i] << m.page_shift), &content[i, 0], page_size)
    for k in range(m.nr_regions):
        r = &m.region[k]
        r.frontier = min(max(int(meta["frontiers"][k]), r.start), r.end)
        for order in range(m.max_order + 1):
            while r.nr_blocks[order]:
                bitmap_clear(&r.free[order], bitmap_first(&r.free[order]))
                r.nr_blocks[order] -= 1
        r.nr_free = 0
    for i in range(<uint64_t>free.shape[0]):
        order = <unsigned>(free[i] >> 56)
        pfn = free[i] & ((ONE << 56) - 1)
        r = region_of(m, pfn)
        if order > m.max_order or r == NULL or pfn & ((ONE << order) - 1) or pfn + (ONE << order) > r.end or pfn < r.start \
                or bitmap_test(&r.free[order], (pfn - r.base) >> order):
            raise ValueError(f"no free block can be at PFN {pfn:#x}, order {order}")
        bitmap_set(&r.free[order], (pfn - r.base) >> order)
        r.nr_blocks[order] += 1
        r.nr_free += ONE << order
    at = 0
    for k in range(m.nr_pools):
        nr_pool, nr_free = meta["pools"][k]
        if not 0 <= nr_free <= nr_pool <= m.pool[k].nr or at + <uint64_t>nr_free > <uint64_t>pooled.shape[0]:
            raise ValueError("hugetlb pools that do not add up")
        m.pool[k].nr = nr_pool
        m.pool[k].nr_free = nr_free
        for i in range(m.pool[k].nr_free):
            if pooled[at] >= m.nr_ram:
                raise ValueError(f"a pooled folio beyond the Memory: {pooled[at]:#x}")
            m.pool[k].free[i] = pooled[at]
            at += 1
    m.huge_zero_pfn = int(meta["huge_zero_pfn"])
    if m.huge_zero_pfn >= m.nr_ram:
        raise ValueError("a huge zero folio beyond the Memory")
    for name, item in VMSTAT.items():
        m.stats[0].v[<int>item] = <uint64_t><int64_t>int(meta["stats"][name])
