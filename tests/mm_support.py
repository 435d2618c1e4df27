"""What the tests of address spaces share."""
import mmcore as mmc

PAGE = 4096
HUGE = 2 << 20
PRESENT, SWAP, FILE, EXCLUSIVE, SOFT = 1 << 63, 1 << 62, 1 << 61, 1 << 56, 1 << 55
ANON = mmc.MAP_PRIVATE | mmc.MAP_ANONYMOUS


def word(mm, addr):
    """The pagemap word of one page."""
    return int(mm.pagemap(addr, 1)[0])


def pin(mm, addr, nr=1):
    """Pin what is mapped now, as pin_user_pages() would where nothing is left to fault; returns the PageList."""
    mm.has_pinned = True
    pages = mmc.PageList(mm.mem, [mm.page_at(addr + i * mm.mem.page_size).pfn for i in range(nr)])
    mmc.grab_pages(pages)
    return pages


def exclusive(page):
    """The exclusive mark: the page's own."""
    return mmc.PageFlags.anon_exclusive in page.flags


def seen_by_device(pages, i=0, n=1):
    """What DMA through a pinned list reads."""
    return bytes(mmc.page_address(pages[i])[:n])


def shared(mm, file, length, **more):
    """Map a file shared; its address."""
    return mm.mmap(length, flags=mmc.MAP_SHARED, file=file, **more)


def private(mm, file, length, **more):
    """Map a file privately; its address."""
    return mm.mmap(length, flags=mmc.MAP_PRIVATE, file=file, **more)
