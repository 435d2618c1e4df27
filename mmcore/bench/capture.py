"""What a capture costs against the raw reads it cannot do without."""

import mmap
import os

import numpy as np

from mmcore.live.buffer import buffer
from mmcore.live.capture import capture
from mmcore.live.errors import NotPossible
from mmcore.live.pagemap import NEAR, near_runs

from .measure import Bar, Variant, interleave, rows_of

CHUNK = 8 << 20             # bytes a raw read()
MOST = 1.15                 # of the raw reads, for all of memory


def raw_read(path):
    """read() a file of /proc to its end into one buffer; return the bytes read."""
    area, total = bytearray(CHUNK), 0
    with open(path, "rb", buffering=0) as file:
        while got := file.readinto(area):
            total += got
    return total


def raw_frames():
    """read() the words of every frame; return how many frames there are."""
    return min(raw_read("/proc/kpageflags"), raw_read("/proc/kpagecount")) // 8


def memory_rows(rounds):
    """Capture all of memory, against read() of the same two files."""
    try:
        frames = raw_frames()
        missing = "" if frames else "frames are hidden here"
    except OSError as error:
        frames, missing = 1, f"{error.filename}: {error.strerror}: run as root"
    variants = [Variant("raw read()", raw_frames, missing=missing),
                Variant("capture", lambda: capture("memory"), missing=missing)]
    return rows_of("all of memory", variants, frames, interleave(variants, rounds),
                   [Bar("capture", "raw read()", at_most=MOST)])


def buffer_rows(size, backing, rounds):
    """Capture a buffer, against read() of the words of its pages, once each, by runs of frames known before."""
    case = f"buffer {size >> 20} MiB {backing}"
    try:
        with buffer(size, backing) as buf:
            taken = capture(buf)
            npages = len(taken.pfns)
            spans = near(np.sort(taken.pfns))
            variants = [Variant("raw read()", lambda: raw_buffer(buf.addr, npages, spans)),
                        Variant("capture", lambda: capture(buf))]
            return rows_of(case, variants, npages, interleave(variants, rounds), [Bar("capture", "raw read()")])
    except (NotPossible, OSError) as error:
        return rows_of(case, [Variant("capture", None, missing=str(error))], 1, {}, [])


def near(pfns):
    """Return (first, pages) of the spans that cover sorted PFNs, small gaps read along."""
    return [(int(pfns[first]), int(pfns[last] - pfns[first]) + 1) for first, last in near_runs(pfns, NEAR)]


def raw_buffer(addr, npages, spans):
    """read() pagemap, kpageflags and kpagecount of a buffer."""
    area = bytearray(8 * max(npages, max(count for _, count in spans)))
    wanted = (("/proc/self/pagemap", [(addr // mmap.PAGESIZE, npages)]), ("/proc/kpageflags", spans),
              ("/proc/kpagecount", spans))
    for path, parts in wanted:
        with open(path, "rb", buffering=0) as file:
            for first, count in parts:
                os.preadv(file.fileno(), [memoryview(area)[:8 * count]], 8 * first)


def measure(rounds, size):
    """Return the rows of every case."""
    return [*memory_rows(rounds), *buffer_rows(size, "4k", rounds), *buffer_rows(size, "thp", rounds)]
