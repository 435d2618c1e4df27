"""All frames of the machine: /proc/kpageflags and /proc/kpagecount from PFN 0 to the end of memory."""

import mmap
import os
from dataclasses import dataclass

import numpy as np

from .errors import NotPossible
from .machine import zones
from .pagemap import KPageFile

CHUNK = 1 << 23             # bytes a read
SECTION = 1 << 15           # frames: the files end at a boundary like this one, past the last zone


@dataclass(frozen=True)
class Frames:
    """The words of every frame, index = PFN: `.flags` (kpageflags) and `.mapcounts` (kpagecount), uint64, read-only."""

    flags: np.ndarray
    mapcounts: np.ndarray

    def __len__(self) -> int:
        return len(self.flags)


def read_frames(progress=None):
    """Read every frame's words: Frames, 16 bytes a frame.

    progress(done, total, what) is called after each 8 MiB. Raises NotPossible without the right to.
    """
    expected = max((zone.end_pfn for zone in zones()), default=0)
    expected = -(-expected // SECTION) * SECTION
    columns = []
    for turn, name in enumerate(("kpageflags", "kpagecount")):
        with KPageFile(name) as file:
            columns.append(_read_all(file.file, expected, progress and (
                lambda done, name=name, turn=turn: progress(turn * expected + done, 2 * expected, f"/proc/{name}"))))
    shortest = min(map(len, columns))
    if not shortest or not columns[0].any():
        raise NotPossible("/proc/kpageflags shows nothing: frames are hidden here",
                          "run as root in the initial user namespace (CAP_SYS_ADMIN)")
    for column in columns:
        column.flags.writeable = False
    return Frames(columns[0][:shortest], columns[1][:shortest])


def _read_all(file, expected, progress):
    """Read words to the end of the file, into one array where memory ends with the last zone."""
    parts, done = [_words(max(expected, SECTION))], 0
    view = memoryview(parts[0]).cast("B")
    while True:
        if not view:
            parts.append(_words(SECTION))
            view = memoryview(parts[-1]).cast("B")
        got = os.preadv(file.fileno(), [view[:CHUNK]], done)
        if got <= 0:
            break
        view, done = view[got:], done + got
        if progress:
            progress(done // 8)
    if done > parts[0].nbytes:
        return np.concatenate(parts)[:done // 8]
    return parts[0][:done // 8]


def _words(count):
    """Return a uint64 array for words that are written once.

    NumPy asks for huge pages for arrays of this size; where memory is fragmented the kernel compacts it for them, which
    takes up to a quarter of the time that the reading takes.
    """
    return np.frombuffer(mmap.mmap(-1, 8 * count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint64)
