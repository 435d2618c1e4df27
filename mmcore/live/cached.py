"""The pages of a file that are in the page cache, with their frames: found by mapping it, without reading it in."""

import ctypes
import errno
import mmap
import os

import numpy as np

from mmcore.core.errors import MMError

from .errors import NotPossible
from .limits import require_proc
from .pagemap import KPageFile, pfns_of, read_pagemap
from .types import Pages, process_words

WINDOW = 1 << 30               # bytes mapped at a time
MADV_POPULATE_READ = 22        # Linux 5.14
MADV_RANDOM = 1


def cached(path):
    """Return the Pages of a file that are in the page cache; `.where` is the page of the file.

    Raises OSError where it cannot be opened, NotPossible without the right to see frames or on a kernel before 5.14.
    """
    require_proc()
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        size, found = os.fstat(descriptor).st_size, []
        if not os.path.isfile(path):
            raise MMError(errno.EINVAL, f"{path} is no regular file")
        for offset in range(0, size, WINDOW):
            found.append(_window(descriptor, offset, min(WINDOW, size - offset)))
    finally:
        os.close(descriptor)
    if not found:
        found = [(np.zeros(0, np.uint64),) * 4]
    where, pfns, words, mapcounts = (np.concatenate(column) for column in zip(*found))
    return Pages(where, pfns, words, mapcounts, True)


def _window(descriptor, offset, length):
    page_size = mmap.PAGESIZE
    npages = -(-length // page_size)
    # Writable and private, so that its address can be had; nothing is written.
    with mmap.mmap(descriptor, length, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE,
                   offset=offset) as area:
        byte = ctypes.c_char.from_buffer(area)
        addr = ctypes.addressof(byte)
        del byte
        area.madvise(MADV_RANDOM)         # no reading ahead
        resident = _resident(addr, npages)
        edges = np.flatnonzero(np.diff(np.concatenate(([0], resident, [0])).astype(np.int8))).reshape(-1, 2)
        for first, last in edges.tolist():
            try:
                area.madvise(MADV_POPULATE_READ, first * page_size, (last - first) * page_size)
            except OSError as error:
                if error.errno == errno.EINVAL:
                    raise NotPossible("madvise(MADV_POPULATE_READ) is missing", "it needs Linux 5.14") from None
                # EFAULT: the file was cut meanwhile; what is not there is not listed.
        pagemap = read_pagemap("self", addr, npages, page_size)
        pagemap[~resident] = 0            # mapped around a fault, or read in meanwhile
        pfns = pfns_of(pagemap)
        here = pfns != 0
        with KPageFile("kpageflags") as flags, KPageFile("kpagecount") as counts:
            words, mapcounts = flags.gather(pfns[here]), counts.gather(pfns[here])
    where = np.flatnonzero(here).astype(np.uint64) + np.uint64(offset // page_size)
    return where, pfns[here], process_words(words, pagemap[here]), mapcounts


def _resident(addr, npages):
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    told = np.zeros(npages, np.uint8)
    if libc.mincore(addr, npages * mmap.PAGESIZE, told.ctypes.data):
        number = ctypes.get_errno()
        raise MMError(number, f"mincore failed: {os.strerror(number)}")
    return told & 1 != 0
