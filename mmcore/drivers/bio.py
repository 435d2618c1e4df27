"""Block I/O on user pages: vectors of pieces, merged where they touch, and what their completion gives back.

Units: offsets, lengths: bytes, unsigned int.
Raises: TypeError, InvalidArgument, BadPage when pins are missing.
Threads: one at a time a bio.
Kernel: struct bio, struct bio_vec, bio_release_pages().
"""
from ..core.errors import InvalidArgument
from ..core.folio import get_page, put_page, try_grab_folio
from ..core.look import page_folio
from ..core.memory import Memory, Page
from ..core.pagelist import PageRanges
from ..core.sgalloc import sg_alloc_table
from ..core.sgiter import sg_set_page
from ..core.unpin import release_pages, unpin_user_page, unpin_user_pages_dirty_lock
from .iov import _number

__all__ = ["Bio", "bio_release_pages"]

BVEC_MOST = 0xffffffff


class Bio:
    """Hold pieces of pages, and one pin (or reference, with pins=False) for each page of each piece. Kernel: struct bio.

    .bvecs lists [first PFN, offset, length].
    """

    def __init__(self, mem, *, pins=True):
        if not isinstance(mem, Memory):
            raise TypeError(f"a Memory is wanted, not {mem!r}")
        mem.page(1)             # raises when it is closed
        self.mem, self.pins, self.bvecs = mem, bool(pins), []

    def _piece(self, page, length, offset, pages):
        if not isinstance(page, Page):
            raise TypeError(f"a Page is wanted, not {page!r}")
        if page.mem is not self.mem:
            raise InvalidArgument("the page belongs to another Memory than the bio", pfn=page.pfn)
        length, offset = _number(length, "length"), _number(offset, "offset")
        size = self.mem.page_size
        if not length or offset >= size or offset + length > pages * size or length > BVEC_MOST:
            raise InvalidArgument(f"{length} bytes at offset {offset} are no piece of {'a page' if pages == 1 else 'pages'} of {size}",
                                  pfn=page.pfn)
        if not self.mem.pfn_valid(page.pfn + (offset + length - 1) // size):
            raise InvalidArgument(f"{length} bytes at offset {offset} of PFN {page.pfn:#x} leave the Memory", pfn=page.pfn)
        return length, offset

    def map_page(self, page, length, offset):
        """Take a pin or reference on one page and add a piece of it (bio_map_user_iov, a page at a time)."""
        length, offset = self._piece(page, length, offset, 1)
        if self.pins:
            try_grab_folio(page_folio(page), 1)
        else:
            get_page(page)
        self.add_page(page, length, offset)

    def add_page(self, page, length, offset):
        """Add a piece that starts in a page, and may go on into the next ones. Kernel: bio_add_page().

        The caller took a pin or reference on each page, and the bio gives them back.

        It joins the piece before when it starts where that ends. Within one page the second pin is then dropped at
        once: a piece has one for each page it touches, and release counts pages.
        """
        length, offset = self._piece(page, length, offset, 1 << 32)
        shift = self.mem.page_size.bit_length() - 1
        start = (page.pfn << shift) + offset
        if self.bvecs:
            last = self.bvecs[-1]
            end = (last[0] << shift) + last[1] + last[2]
            if end == start and last[2] + length <= BVEC_MOST and self._one_map(last[0], page.pfn):
                # The page of the last byte, not of the piece's first page: a piece may span a folio.
                if (end - 1) >> shift == page.pfn:
                    (unpin_user_page if self.pins else put_page)(page)
                last[2] += length
                return
        self.bvecs.append([page.pfn, offset, length])

    def _one_map(self, pfn, other):
        def device(pfn):
            return next((d for d in self.mem.devices if d.start_pfn <= pfn < d.start_pfn + d.nr_pages), None)
        return not self.mem.devices or device(pfn) is device(other)

    def to_sg(self):
        """Return a scatterlist with an entry a piece."""
        sgt = sg_alloc_table(self.mem, len(self.bvecs))
        for i, (pfn, offset, length) in enumerate(self.bvecs):
            sg_set_page(sgt[i], self.mem.page(pfn), length, offset)
        return sgt


def bio_release_pages(bio, mark_dirty=False):
    """Give back what the bio holds: for each piece a pin a page that it touches; dirty first if asked, pinned pages only.

    All or nothing: raises BadPage when pins are missing, and the bio keeps its pieces.
    """
    if not isinstance(bio, Bio):
        raise TypeError(f"a Bio is wanted, not {bio!r}")
    page_size = bio.mem.page_size
    # By the bytes touched: a length of one page that starts within a page touches two.
    pages = PageRanges(bio.mem, [pfn for pfn, _, _ in bio.bvecs],
                       [(offset + length - 1) // page_size + 1 for _, offset, length in bio.bvecs])
    if bio.pins:
        unpin_user_pages_dirty_lock(pages, None, mark_dirty)
    else:
        release_pages(pages)
    bio.bvecs = []
