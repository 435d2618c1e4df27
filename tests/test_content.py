"""Views of the bytes of pages, and what becomes of their frames."""
import errno
import gc
import threading

import pytest

import mmcore as mmc
from mm_support import PAGE
from mmcore import MM, BadPage, Memory, MMError

TABLE = 0xf2        # PGTY_table


@pytest.fixture
def mem():
    with Memory("16M") as mem:
        yield mem
        gc.collect()
        mem.check()


def table_frames(mem):
    pages = mem.pages
    tables = set((pages["page_type"] >> 24 == TABLE).nonzero()[0].tolist())
    del pages
    return tables


@pytest.mark.parametrize("order", [0, 3])
def test_a_frame_that_can_be_written_becomes_no_page_table(mem, order):
    """A view that is kept when its page is freed shows the frame's next life; nonsense in a table would lead walks astray."""
    folio = mmc.folio_alloc(mem, order)
    frames, view = set(range(folio.pfn, folio.pfn + (1 << order))), mmc.folio_address(folio)
    mmc.folio_put(folio)
    with MM(mem) as mm:
        for i in range(6):      # a table for each, lowest frames first
            mm.touch(mm.mmap(2 << 20, addr=(i + 1) << 30), PAGE)
            view[:] = b"\xff" * len(view)
        tables = table_frames(mem)
        assert len(tables) >= 13 and not tables & frames
        assert mm.read(1 << 30, PAGE) in (bytes(PAGE), b"\xff" * PAGE)
        mem.check()
    view.release()
    with MM(mem) as mm:
        for i in range(6):
            mm.touch(mm.mmap(2 << 20, addr=(i + 1) << 30), PAGE)
        assert table_frames(mem) & frames, "from the moment that nobody can write them they can be tables"


def test_no_frame_for_a_table_that_nobody_can_write(mem):
    pages, views = [], []
    while True:
        try:
            pages.append(mmc.alloc_page(mem))
        except MMError:
            break
        views.append(mmc.page_address(pages[-1]))
    for page in pages:
        mmc.put_page(page)
    free = mem.vmstat()["nr_free_pages"]
    with pytest.raises(MMError) as error:
        MM(mem)
    assert error.value.errno == errno.ENOMEM and mem.vmstat()["nr_free_pages"] == free == len(pages)
    mem.check()
    del views
    with MM(mem) as mm:
        mm.touch(mm.mmap(4 * PAGE), 4 * PAGE)


def test_what_is_read_only_stays_so(mem):
    """The object behind a view gives no better one."""
    with MM(mem) as mm:
        mm.touch(mm.mmap(PAGE), PAGE)
        for pfn in (min(table_frames(mem)), mem.zero_page.pfn):
            view = mmc.page_address(mem.page(pfn))
            assert view.readonly and memoryview(view.obj).readonly
            with pytest.raises(TypeError):
                view[0] = 1


def test_each_view_is_listed_until_it_goes(mem):
    """Views of one page through one object, released in any order."""
    page = mmc.alloc_page(mem)
    first = mmc.page_address(page)
    second, third = memoryview(first.obj), first[16:]
    mmc.put_page(page)
    for view in (first, second, third):
        with MM(mem) as mm:
            mm.touch(mm.mmap(PAGE), PAGE)
            assert page.pfn not in table_frames(mem)
        view.release()
    with MM(mem) as mm:
        mm.touch(mm.mmap(PAGE), PAGE)
        assert page.pfn in table_frames(mem)
    with pytest.raises(BadPage):
        mmc.page_address(page)


def test_views_against_tables(mem):
    """One thread takes a page, views it, frees it, and writes on; another makes and drops tables on the same frames."""
    stop, failed = threading.Event(), []

    def scribble():
        try:
            for _ in range(3000):
                page = mmc.alloc_page(mem)
                view = mmc.page_address(page)
                mmc.put_page(page)
                view[:8] = b"\xff" * 8
                view[PAGE - 8:] = b"\xff" * 8
        except Exception as error:
            failed.append(error)
        finally:
            stop.set()

    thread = threading.Thread(target=scribble)
    thread.start()
    while not stop.is_set():
        with MM(mem) as mm:
            for i in range(3):
                mm.touch(mm.mmap(PAGE, addr=(i + 1) << 30), PAGE)
    thread.join()
    assert not failed


@pytest.mark.parametrize("order", [0, 3])
def test_no_new_view_from_behind_one_when_a_frame_became_a_table(mem, order):
    """What a memoryview stands on can be viewed again when that one is gone; by then somebody else may have the frames."""
    folio = mmc.folio_alloc(mem, order)
    below = mmc.alloc_pages_bulk(mem, folio.pfn - 2)        # tables take the lowest frames
    view = mmc.folio_address(folio)
    behind = view.obj
    view[:4] = b"mine"
    view.release()
    with memoryview(behind) as again:
        assert again[:4] == b"mine"
    mmc.folio_put(folio)
    with MM(mem) as mm:
        mm.touch(mm.mmap(PAGE), PAGE)
        assert table_frames(mem) & set(range(folio.pfn, folio.pfn + (1 << order)))
        for _ in range(3):
            with pytest.raises(BufferError, match="page table"):
                memoryview(behind)
        mem.check()
    memoryview(behind).release()
    mmc.release_pages(below)
