"""dump_page() and what it says about each kind of page."""
import re

import mmcore as mmc
from mmcore.core.dump import dump_around


def test_a_page_of_a_huge_folio():
    with mmc.Memory("64M", thp="always") as mem, mmc.MM(mem) as mm:
        addr = mm.mmap("2M")
        pages = mmc.pin_user_pages(mm, addr, 4, mmc.FOLL_WRITE)
        lines = mmc.dump_page(pages[3], "a test").splitlines()
        assert re.fullmatch(rf"page: refcount:5 mapcount:\d+ mapping:[0-9a-f]{{16}} index:{(addr >> 12) + 3:#x} "
                            rf"pfn:{pages[3].pfn:#x}", lines[0])
        assert lines[1].startswith("head: order:9 mapcount:1 entire_mapcount:1 ") and lines[1].endswith(" pincount:4")
        assert lines[2].startswith("anon flags: 0x") and lines[-1] == "page dumped because: a test"
        raw = b"".join(int(word, 16).to_bytes(8, "little") for line in lines if line.startswith("raw:")
                       for word in line.split()[1:])
        assert raw == mem.pages[pages[3].pfn].tobytes()
        assert sum(line.startswith("head: ") for line in lines) == 5
        mmc.unpin_user_pages(pages)
        del pages


def test_small_folios_order_1_and_what_was_never_used():
    with mmc.Memory("64M") as mem:
        page, pair = mmc.alloc_page(mem), mmc.folio_alloc(mem, 1)
        assert mmc.dump_page(page).startswith("page: refcount:1 mapcount:0") and "head:" not in mmc.dump_page(page)
        text = mmc.dump_page(mem.page(pair.pfn + 1))
        assert "head: order:1 mapcount:0 entire_mapcount:0 nr_pages_mapped:0 pincount:0" in text
        last = mem.page(mem.nr_pages - 1)
        assert mmc.dump_page(last, "why") == f"page: pfn:{last.pfn:#x} was never used\npage dumped because: why"


def test_around():
    with mmc.Memory("64M") as mem:
        folio = mmc.folio_alloc(mem, 3)
        lines = dump_around(mem, folio.pfn + 5).splitlines()
        assert lines[0] == repr(folio)
        assert [line.split()[0] for line in lines[1:]] == ["before", "head", "tail", "page", "after"]
        assert "_mapcount=-1 _refcount=1" in lines[2]
        assert "never used" in dump_around(mem, mem.nr_pages - 1) and "no struct page here" in dump_around(mem, 1 << 50)
