"""The colours of every picture: one table, told apart also by people who do not see red and green alike.

The hues are those of Okabe and Ito, who chose them for that; each class has a letter too, for where there is no colour.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Class:
    """What a frame is used for: its name, letter and colour."""

    name: str
    letter: str
    colour: str           # "#rrggbb"
    meaning: str


CLASSES = (
    Class("absent", " ", "#FFFFFF", "no memory here, reserved by firmware, or not looked at"),
    Class("free", ".", "#DDDDDD", "in the buddy allocator"),
    Class("kernel", "k", "#5B5B5B", "slab, page tables, everything else of the kernel"),
    Class("file", "f", "#009E73", "page cache of files"),
    Class("shmem", "s", "#CC79A7", "shared memory and tmpfs"),
    Class("anon", "a", "#56B4E9", "anonymous, base pages"),
    Class("anon large", "A", "#0072B2", "anonymous, in THP and mTHP folios"),
    Class("hugetlb", "H", "#E69F00", "hugetlb pages"),
)
MARK = "#D55E00"          # what is pointed at: the frames of the process asked for
INK = "#222222"           # text, rulers and edges
PAPER = "#FFFFFF"

ABSENT, FREE, KERNEL, FILE, SHMEM, ANON, ANON_LARGE, HUGETLB = range(len(CLASSES))
