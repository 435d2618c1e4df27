"""Iterators over buffers, and their extraction into scatterlists and page lists. Kernel: struct iov_iter.

An IovIter stands for bytes that are somewhere: user addresses, kernel addresses, pieces of pages, folios. Extraction names
the pages behind them and moves the iterator on. Only user pages are pinned, by the caller's `pin`; whoever extracts from
the others holds what they live in.

The kernel's address of a byte is its physical address here: the linear map, without the constant.

Units: addresses, lengths: bytes; direction: ITER_DEST or ITER_SOURCE.
Raises: TypeError, InvalidArgument, MMError(EFAULT, EIO); iterator and table are as they were.
Threads: one at a time an iterator.
Kernel: struct iov_iter, and the functions of these names.
"""
from bisect import bisect_right

from ..core.errors import InvalidArgument, MMError
from ..core.folio import FOLL
from ..core.memory import Folio, Memory, Page
from ..core.pagelist import PageList
from ..core.scatterlist import SGAppendTable, SGTable
from ..core.sgiter import sg_set_folio, sg_set_page
from ..core.unpin import unpin_user_pages

import errno

__all__ = ["ITER_DEST", "ITER_SOURCE", "IovIter", "MAX_RW_COUNT", "iov_iter_bvec", "iov_iter_discard", "iov_iter_folioq",
           "iov_iter_init", "iov_iter_kvec", "iov_iter_ubuf", "extract_iter_to_sg", "iov_iter_extract_bvecs", "iov_iter_extract_pages",
           "iov_iter_extract_will_pin"]

ITER_DEST, ITER_SOURCE = 0, 1       # what the buffer is for the data: a device writes to a destination
MAX_RW_COUNT = 0x7FFFF000


def _number(value, what):
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{what} is an int, not {value!r}")
    value = value.__index__()
    if value < 0:
        raise InvalidArgument(f"{what} {value} is negative")
    return value


class IovIter:
    """Hold a position in a list of segments. Made by iov_iter_ubuf() and its kin.

    .kind is "user", "kvec", "bvec", "folioq" or "discard"; .count the bytes that are left; .direction ITER_DEST or
    ITER_SOURCE. advance(n) and revert(n) move it.
    """

    def __init__(self, kind, direction, segments, lengths, *, skip=0, count=None):
        if direction not in (ITER_DEST, ITER_SOURCE):
            raise InvalidArgument(f"direction {direction!r} is neither ITER_DEST nor ITER_SOURCE")
        self.kind, self.direction, self.segments = kind, direction, list(segments)
        # starts[i]: bytes before segment i
        self.starts, total = [], 0
        for length in lengths:
            self.starts.append(total)
            total += length
        self.total = total
        self.position = skip
        self.end = total if count is None else skip + count
        if self.position > total or self.end > total:
            raise InvalidArgument(f"{self.end - skip} bytes from {skip} on are more than the {total} of the segments")

    @property
    def count(self):
        """Bytes that are left."""
        return self.end - self.position

    def advance(self, n):
        """Pass over n bytes. Raises InvalidArgument beyond the end."""
        n = _number(n, "n")
        if n > self.count:
            raise InvalidArgument(f"advance by {n} of {self.count} bytes")
        self.position += n

    def revert(self, n):
        """Go back by n bytes. Raises InvalidArgument before the start."""
        n = _number(n, "n")
        if n > self.position:
            raise InvalidArgument(f"revert by {n} of {self.position} bytes")
        self.position -= n

    def segment(self):
        """Return (segment, bytes of it that are passed, bytes of it that are left); empty segments are passed over.

        Raises InvalidArgument when there are no segments at all.
        """
        if not self.segments:
            raise InvalidArgument("an iterator of no segments is in none of them")
        # The last segment that starts here: those before it that start here too are empty.
        i = bisect_right(self.starts, self.position) - 1
        end = self.starts[i + 1] if i + 1 < len(self.starts) else self.total
        passed = self.position - self.starts[i]
        return self.segments[i], passed, min(end, self.end) - self.position

    def __repr__(self):
        return f"<IovIter {self.kind}, {self.count} bytes left of {len(self.segments)} segments>"


def _of(value, kind, what):
    if not isinstance(value, kind):
        raise TypeError(f"{what} is wanted, not {value!r}")
    return value


def _tuples(segments, names):
    """Yield each segment as a tuple of as many parts as names."""
    for segment in segments:
        try:
            parts = tuple(segment)
        except TypeError:
            parts = ()
        if len(parts) != len(names):
            raise TypeError(f"a segment is ({', '.join(names)}), not {segment!r}")
        yield parts


def _one_memory(parts):
    """Refuse pages, or folios, of several Memories: extraction names them by PFN."""
    for part in parts:
        if part.mem is not parts[0].mem:
            raise InvalidArgument("the segments belong to two Memories", pfn=part.pfn)


def _pairs(segments, what):
    segments = [(_number(at, f"{what} address"), _number(length, f"{what} length"))
                for at, length in _tuples(segments, ("address", "length"))]
    for at, length in segments:
        if at + length > 1 << 64:
            raise InvalidArgument(f"{length} bytes at {at:#x} leave the address space", addr=at)
    return segments


def iov_iter_ubuf(direction, addr, count):
    """Return an iterator over one user buffer."""
    segments = _pairs([(addr, count)], "user")
    return IovIter("user", direction, segments, [segments[0][1]])


def iov_iter_init(direction, iovec):
    """Return an iterator over user buffers: (address, length) pairs, struct iovec."""
    segments = _pairs(iovec, "user")
    return IovIter("user", direction, segments, [length for _, length in segments])


def iov_iter_kvec(direction, mem, kvec):
    """Return an iterator over kernel buffers: (physical address, length) pairs of a Memory, struct kvec."""
    _of(mem, Memory, "a Memory")
    segments = _pairs(kvec, "kernel")
    for at, length in segments:
        if length and (not mem.pfn_valid(at // mem.page_size) or not mem.pfn_valid((at + length - 1) // mem.page_size)):
            raise InvalidArgument(f"{length} bytes at physical address {at:#x} leave the Memory", addr=at)
    it = IovIter("kvec", direction, segments, [length for _, length in segments])
    it.mem = mem
    return it


def iov_iter_bvec(direction, bvecs):
    """Return an iterator over pieces of pages: (page, offset, length) each, struct bio_vec; a piece may span pages."""
    segments = [(_of(page, Page, "a Page"), _number(offset, "offset"), _number(length, "length"))
                for page, offset, length in _tuples(bvecs, ("page", "offset", "length"))]
    _one_memory([page for page, _, _ in segments])
    for page, offset, length in segments:
        if length and not page.mem.pfn_valid(page.pfn + (offset + length - 1) // page.mem.page_size):
            raise InvalidArgument(f"{length} bytes at offset {offset} of PFN {page.pfn:#x} leave the Memory", pfn=page.pfn)
    return IovIter("bvec", direction, segments, [length for _, _, length in segments])


def iov_iter_folioq(direction, folios, first_offset, count):
    """Return an iterator over whole folios, from first_offset in the first of them on (a folio queue, a page cache)."""
    folios = [_of(folio, Folio, "a Folio") for folio in folios]
    _one_memory(folios)
    return IovIter("folioq", direction, folios, [folio.nr_pages * folio.mem.page_size for folio in folios],
                   skip=_number(first_offset, "first_offset"), count=_number(count, "count"))


def iov_iter_discard(direction, count):
    """Return an iterator over bytes that nobody wants."""
    return IovIter("discard", direction, [None], [_number(count, "count")])


def iov_iter_extract_will_pin(it):
    """Tell whether extraction pins pages, which the caller then unpins: user buffers only."""
    return _of(it, IovIter, "an IovIter").kind == "user"


# ---- user pages -----------------------------------------------------------------------------------------------------
def _pin_segment(it, mem, maxsize, maxpages, pin):
    """Pin pages of the current user segment: (bytes, PageList, in-page offset of the first). Moves nothing."""
    if pin is None:
        raise InvalidArgument("user buffers need pin=: a function (addr, nr_pages, gup_flags) that returns a PageList of "
                              "pinned pages")
    page_size = mem.page_size
    (addr, _), passed, left = it.segment()
    addr += passed
    offset = addr % page_size
    nr = min(-(-(offset + min(left, maxsize)) // page_size), maxpages)
    pages = _of(pin(addr - offset, nr, FOLL.WRITE if it.direction == ITER_DEST else FOLL(0)), PageList, "a PageList from pin()")
    if len(pages) > nr or pages.mem is not mem:
        unpin_user_pages(pages)
        raise InvalidArgument(f"pin() returned {len(pages)} pages of {pages.mem!r}, and was asked for {nr} of {mem!r}: they are unpinned")
    return min(left, maxsize, len(pages) * page_size - offset) if len(pages) else 0, pages, offset


# ---- into a scatterlist -----------------------------------------------------------------------------------------------
def extract_iter_to_sg(it, maxsize, sgt, sg_max, *, pin=None):
    """Add up to maxsize bytes of an iterator to a table, in up to sg_max entries from sgt.nents on; returns the bytes.

    The table is made with room, by sg_init_table() or sg_alloc_table(), and sgt.nents set to what it holds. nents grows,
    orig_nents stays and no end is marked, as in the kernel. User buffers: `pin` is called with (page-aligned address,
    pages, FOLL_WRITE or 0) and each page is an entry; when it fails, this call's pages are unpinned and table and
    iterator are as they were. kvec: an entry a page. bvec: an entry each. Folios: an entry each.

    Raises MMError(EIO) for an iterator without bytes, InvalidArgument when sg_max exceeds the table's room or tables are chained
    to it, MMError(EBUSY) while it is mapped for DMA.
    """
    _of(it, IovIter, "an IovIter")
    _of(sgt, SGTable, "an SGTable")
    maxsize, sg_max = min(_number(maxsize, "maxsize"), it.count), _number(sg_max, "sg_max")
    if it.kind == "discard":
        raise MMError(errno.EIO, "nothing can be extracted from a discarding iterator")
    if isinstance(sgt, SGAppendTable):
        raise InvalidArgument("an append table grows by pages: extract into a table of sg_init_table()")
    if maxsize == 0 or sg_max == 0:
        return 0
    room = sgt.capacity - sgt.nents
    if sg_max > room:
        raise InvalidArgument(f"sg_max {sg_max} is more than the {room} entries that the table has left")
    start, nents, done, pinned = it.position, sgt.nents, 0, []
    sgt.nents = nents               # refused here, before anything is pinned, where it cannot grow
    try:
        while maxsize > done and sg_max > sgt.nents - nents:
            n = _STEP[it.kind](it, maxsize - done, sgt, sg_max - (sgt.nents - nents), pin, pinned)
            if n == 0:
                break
            it.advance(n)
            done += n
    except BaseException:
        it.position = start
        try:
            for pages in pinned:
                unpin_user_pages(pages)
        finally:
            sgt.nents = nents
        raise
    return done


def _user_to_sg(it, maxsize, sgt, sg_max, pin, pinned):
    page_size = sgt.mem.page_size
    n, pages, offset = _pin_segment(it, sgt.mem, maxsize, sg_max, pin)
    if not len(pages):
        return 0
    pinned.append(pages)
    left = n
    for page in pages:
        take = min(left, page_size - offset)
        sg_set_page(sgt[sgt.nents], page, take, offset)
        sgt.nents += 1
        left -= take
        offset = 0
    return n


def _kvec_to_sg(it, maxsize, sgt, sg_max, pin, pinned):
    (at, _), passed, left = it.segment()
    at += passed
    offset = at % sgt.mem.page_size
    # To the end of the page, not of the segment.
    take = min(left, maxsize, sgt.mem.page_size - offset)
    sg_set_page(sgt[sgt.nents], it.mem.page(at // sgt.mem.page_size), take, offset)
    sgt.nents += 1
    return take


def _bvec_to_sg(it, maxsize, sgt, sg_max, pin, pinned):
    (page, offset, _), passed, left = it.segment()
    take = min(left, maxsize)
    offset += passed
    page = sgt.mem.page(page.pfn + offset // sgt.mem.page_size) if page.mem is sgt.mem else page
    sg_set_page(sgt[sgt.nents], page, take, offset % sgt.mem.page_size)
    sgt.nents += 1
    return take


def _folioq_to_sg(it, maxsize, sgt, sg_max, pin, pinned):
    folio, passed, left = it.segment()
    take = min(left, maxsize)
    sg_set_folio(sgt[sgt.nents], folio, take, passed)
    sgt.nents += 1
    return take


_STEP = {"user": _user_to_sg, "kvec": _kvec_to_sg, "bvec": _bvec_to_sg, "folioq": _folioq_to_sg}


# ---- into a list of pages -----------------------------------------------------------------------------------------------
def iov_iter_extract_pages(it, maxsize, maxpages, *, mem=None, pin=None):
    """Name the pages behind the next bytes: (bytes, PageList, offset in the first page). Moves the iterator on.

    User buffers: one segment, pinned by `pin`. Others: as long as pieces join at page boundaries; no references are
    taken. Empty segments are passed over. mem is needed for user buffers. Raises MMError(EFAULT) for a discarding one.
    """
    _of(it, IovIter, "an IovIter")
    if mem is not None:
        _of(mem, Memory, "a Memory")
    maxsize, maxpages = min(_number(maxsize, "maxsize"), it.count, MAX_RW_COUNT), _number(maxpages, "maxpages")
    if it.kind == "discard":
        raise MMError(errno.EFAULT, "a discarding iterator has no pages")
    if maxsize == 0 or maxpages == 0:
        return 0, PageList(mem if mem is not None else _mem_of(it)), 0
    if it.kind == "user":
        if mem is None:
            raise InvalidArgument("user buffers need mem=: whose pages they are")
        start = it.position
        n, pages, offset = _pin_segment(it, mem, maxsize, maxpages, pin)
        it.position = start + n         # whatever `pin` did to it
        return n, pages, offset
    mem = _mem_of(it)
    page_size = mem.page_size
    pfns, done, offset0 = [], 0, None
    while done < maxsize and len(pfns) < maxpages:
        segment, passed, left = it.segment()
        at = _address(it.kind, segment, page_size) + passed
        offset = at % page_size
        if offset0 is None:
            offset0 = offset
        elif offset or (offset0 + done) % page_size:
            break                   # a hole: the pages would not be one stretch
        take = min(left, maxsize - done, (maxpages - len(pfns)) * page_size - offset)
        pfns += range(at // page_size, (at + take - 1) // page_size + 1)
        done += take
        it.advance(take)
    return done, PageList(mem, pfns), offset0


def iov_iter_extract_bvecs(it, max_size, max_vecs, *, mem=None, pin=None, mem_align_mask=0):
    """Name the pages behind the next bytes as pieces of folios: (bytes, [(Page, offset, length), ...]). Moves the iterator on.

    A piece goes on while the next page is of the same folio and the next one in memory: a page in the middle of a large
    folio may have been copied, and a neighbour may be of another folio. Pieces stop where the device map changes; pages from
    there on are unpinned, and the iterator stays before them. Raises InvalidArgument where address or length does not fit
    mem_align_mask; MMError(EFAULT) for no bytes, and for a discarding iterator. Kernel: the function of 7.0.
    """
    _of(it, IovIter, "an IovIter")
    max_size, max_vecs, mem_align_mask = (_number(max_size, "max_size"), _number(max_vecs, "max_vecs"),
                                          _number(mem_align_mask, "mem_align_mask"))
    if not it.count or not max_size or not max_vecs:
        raise MMError(errno.EFAULT, "no bytes to extract, or no room for pieces")
    if mem_align_mask and it.kind != "discard":
        segment, passed, left = it.segment()
        base = segment[0] if it.kind in ("user", "kvec") else segment[1] if it.kind == "bvec" else 0
        if (base + passed | min(left, max_size)) & mem_align_mask:
            raise InvalidArgument(f"{min(left, max_size)} bytes at {base + passed:#x} do not fit the alignment {mem_align_mask + 1}")
    size, pages, offset = iov_iter_extract_pages(it, max_size, max_vecs, mem=mem, pin=pin)
    if not size:
        raise MMError(errno.EFAULT, "no page could be extracted")
    bvecs, left, i, device = [], size, 0, None
    while left:
        page, owner = pages[i], _device(pages[i])
        if bvecs and owner != device:
            break
        folio = page.folio
        run = 1
        while i + run < len(pages) and pages[i + run].pfn == page.pfn + run < folio.pfn + folio.nr_pages:
            run += 1
        take = min(left, run * page.mem.page_size - offset)
        bvecs.append((page, offset, take))
        device, offset, left, i = owner, 0, left - take, i + run
    if left:
        if iov_iter_extract_will_pin(it):
            unpin_user_pages(pages[i:])
        it.revert(left)
    return size - left, bvecs


def _device(page):
    """Which device's memory a page is; None: RAM."""
    for number, device in enumerate(page.mem.devices):
        if device.start_pfn <= page.pfn < device.start_pfn + device.nr_pages:
            return number
    return None


def _mem_of(it):
    if it.kind == "kvec":
        return it.mem
    if it.kind == "bvec" and it.segments:
        return it.segments[0][0].mem
    if it.kind == "folioq" and it.segments:
        return it.segments[0].mem
    raise InvalidArgument("the iterator names no Memory: pass mem=")


def _address(kind, segment, page_size):
    """Return the physical address of a segment's first byte."""
    if kind == "kvec":
        return segment[0]
    if kind == "bvec":
        return segment[0].pfn * page_size + segment[1]
    return segment.pfn * page_size
