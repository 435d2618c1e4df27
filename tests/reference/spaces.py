"""Plain address spaces to hold the real ones against: a dictionary of pages, one page at a time, nothing clever.

A page of a Space is named by its number (address / page size). What is known of it:

    vma         protection, what it shares (None: private memory), its number when it was mapped (page offset), advice
    content     a token for private pages; shared pages have theirs in a dictionary that all who map it have
    populated   private pages that were written: they have a page of their own, in memory or in swap

Neighbours with equal vma and consecutive page offsets are one mapping. A call that the kernel refuses raises Refused with
its errno, and changes nothing unless it says so.
"""
import errno
from dataclasses import dataclass, replace

from . import Refused

READ, WRITE = 1, 2


class Share(dict):
    """Content of shared memory by index, for as many pages as it was made for: an access beyond ends in SIGBUS."""

    def __init__(self, size):
        super().__init__()
        self.size = size

    def truncate(self, size):
        self.size = size
        for index in [index for index in self if index >= size]:
            del self[index]


@dataclass(frozen=True)
class Area:
    """What the mapping of a page is like."""
    prot: int
    share: object           # None, or the Share that everyone who maps it has
    share_id: int
    offset: int
    huge: str = ""
    dontfork: bool = False

    def like(self, other):
        return (self.prot, self.share_id, self.huge, self.dontfork) == (other.prot, other.share_id, other.huge, other.dontfork)


class Space:
    """One address space."""

    def __init__(self):
        self.area = {}
        self.content = {}
        self.populated = set()
        self.touched = set()        # pages of which something is mapped: written, or read when there was nothing

    def runs(self):
        """The mappings as (first page, one past the last, Area of the first)."""
        found = []
        for page in sorted(self.area):
            area = self.area[page]
            if found and found[-1][1] == page and found[-1][2].like(area) \
                    and found[-1][2].offset + page - found[-1][0] == area.offset:
                found[-1][1] = page + 1
            else:
                found.append([page, page + 1, area])
        return [tuple(run) for run in found]

    def one_run(self, pages):
        return any(first <= pages.start and pages.stop <= last for first, last, _ in self.runs())

    def read(self, page):
        area = self.area[page]
        return area.share.get(area.offset, 0) if area.share is not None else self.content.get(page, 0)

    # -- calls -----------------------------------------------------------------------------------------------------------
    def drop(self, pages):
        for page in pages:
            self.area.pop(page, None)
            self.forget(page)

    def forget(self, page):
        self.content.pop(page, None)
        self.populated.discard(page)
        self.touched.discard(page)

    def mmap(self, pages, prot, share=None, share_id=0, first=0):
        """first: the index in what is shared of the first page."""
        self.drop(pages)
        for page in pages:
            self.area[page] = Area(prot, share, share_id, page if share is None else first + page - pages.start)

    def munmap(self, pages):
        self.drop(pages)

    def allowed(self, pages, need):
        for page in pages:
            if page not in self.area or not self.area[page].prot & (need if need == WRITE else READ | WRITE):
                raise Refused(errno.EFAULT)

    def touch(self, pages, write):
        self.allowed(pages, WRITE if write else READ)
        for page in pages:
            if self.area[page].share is not None and self.area[page].offset >= self.area[page].share.size:
                raise Refused(errno.EFAULT)     # what came before stays touched
            self.touched.add(page)
            if write and self.area[page].share is None:
                self.populated.add(page)

    def write(self, page, token):
        self.touch(range(page, page + 1), True)
        area = self.area[page]
        if area.share is not None:
            area.share[area.offset] = token
        else:
            self.content[page] = token

    def mprotect(self, pages, prot):
        if any(page not in self.area for page in pages):
            raise Refused(errno.ENOMEM)
        for page in pages:
            self.area[page] = replace(self.area[page], prot=prot)

    def dontneed(self, pages):
        for page in pages:
            if page in self.area:
                self.forget(page)
        self.whole(pages)

    def advise(self, pages, **what):
        for page in pages:
            if page in self.area:
                self.area[page] = replace(self.area[page], **what)
        self.whole(pages)

    def whole(self, pages):
        if any(page not in self.area for page in pages):
            raise Refused(errno.ENOMEM)

    def mremap(self, old, new):
        stays = old[:len(new)]
        if set(old) & set(new):
            raise Refused(errno.EINVAL)
        if not self.one_run(stays):
            raise Refused(errno.EFAULT)
        moved = [(self.area[page], self.content.get(page), page in self.populated, page in self.touched) for page in stays]
        self.drop(new)
        self.drop(old)
        last = moved[-1][0] if len(moved) < len(new) else None
        for i, page in enumerate(new):
            if i < len(moved):
                area, content, populated, touched = moved[i]
            else:
                area, content, populated, touched = replace(last, offset=last.offset + i - len(moved) + 1), None, False, False
            self.area[page] = area
            if content is not None:
                self.content[page] = content
            if populated:
                self.populated.add(page)
            if touched:
                self.touched.add(page)

    def fork(self):
        child = Space()
        child.area = {page: area for page, area in self.area.items() if not area.dontfork}
        child.content = {page: token for page, token in self.content.items() if page in child.area}
        child.populated = self.populated & child.area.keys()
        child.touched = set(child.populated)
        return child

    def collapse(self, pages):
        """One aligned range. EINVAL when nothing of it was ever there is not decided here: tables may be left over."""
        self.whole(pages)
        if not self.one_run(pages) or self.area[pages.start].share is not None or self.area[pages.start].huge == "no":
            raise Refused(errno.EINVAL)
        if not self.touched.intersection(pages):
            raise Refused(errno.EINVAL)
        self.populated.update(pages)
        self.touched.update(pages)
