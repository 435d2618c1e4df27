"""What a type checker must understand of the stubs: read by `mypy --strict`, never run."""
import numpy as np
from numpy.typing import NDArray
from typing_extensions import assert_type

import mmcore as mmc
from mmcore import live


class Sum(mmc.GupOutput):
    total = 0

    def gup_output_pages(self, page: mmc.Page, npages: int) -> None:
        self.total += npages


with mmc.Memory("1G", hugetlb={"2M": 4}, thp="always") as mem:
    assert_type(mem, mmc.Memory)
    assert_type(mem.page(7).folio.pincount, int)
    assert_type(mem.vmstat()["nr_foll_pin_acquired"], int)
    folio = mmc.folio_alloc(mem, 9)
    pages = mmc.PageList(mem, range(folio.pfn, folio.pfn + 8))
    assert_type(pages[1:3], mmc.PageList)
    assert_type(pages[0], mmc.Page | None)
    assert_type(mmc.folio_runs(pages), tuple[NDArray[np.uint64], NDArray[np.uint64]])
    mmc.unpin_user_pages(pages, release="head")
    mmc.unpin_user_pages(pages, release="heads")  # type: ignore[arg-type]
    mmc.folio_get(mem.page(7))  # type: ignore[arg-type]
    mmc.Memory(1.5)  # type: ignore[arg-type]

    mm = mmc.MM(mem, rlimit_memlock="64K")
    addr = mm.mmap("4M", mmc.PROT_READ | mmc.PROT_WRITE, mmc.MAP_PRIVATE | mmc.MAP_ANONYMOUS)
    flags = mmc.FOLL_WRITE | mmc.FOLL_LONGTERM
    assert_type(flags, mmc.FOLL)
    # What output= is decides what is returned.
    assert_type(mmc.pin_user_pages_fast(mm, addr, 4, flags), mmc.PageList)
    assert_type(mmc.pin_user_pages(mm, addr, 4, output=mmc.PageRanges), mmc.PageRanges)
    assert_type(mmc.get_user_pages(mm, addr, 4, output=mmc.SGAppendTable(mem)), mmc.SGAppendTable)
    assert_type(mmc.pin_user_pages(mm, addr, 4, output=Sum()), Sum)
    mmc.pin_user_pages(mm, addr, 4, output=int)  # type: ignore[arg-type]

    with mmc.ProtectionDomain(mmc.IBDevice(mem), mm) as pd:
        mr = pd.reg_mr(addr, 4096, mmc.IB_ACCESS.LOCAL_WRITE)
        assert_type(mr.lkey, int)
    with mmc.PinLedger(mem) as ledger, ledger.tag("driver"):
        assert_type(ledger.outstanding()[0].folio, mmc.Folio)
    with mmc.VFIOContainer(mem, release="folio") as container:
        container.attach(mmc.IOMMUDomain(mem, windows=[(0, 1 << 40)], reserved=[(0xfee00000, 0xfeefffff, "msi")]))
        container.map_dma(mm, addr, 0, "1M", mmc.VFIO_DMA_MAP_FLAG_READ)
        assert_type(container.mappings[0].pins[0].pfn, int)
        assert_type(container.dma_rw(0, 16, False), bytes)
        assert_type(container.dma_rw(0, b"data", True), int)
        assert_type(container.dirty_pages_get_bitmap(0, 4096), bytes)
        mmc.VFIOContainer(mem, acquire="list")  # type: ignore[arg-type]
    with mem.inject("iommu_map") as injection:
        assert_type(injection.fired, bool)
    assert_type(mmc.dump_page(mem.page(7)), str)
    for entry in mmc.for_each_sg(mmc.sg_alloc_table_from_pages(pages, 0, 4096)):
        assert_type(entry, mmc.SGEntry)
        assert_type(mmc.sg_page(entry), mmc.Page | None)

with live.buffer("16M", backing="thp") as real:
    assert_type(live.capture(real), live.Capture)
    assert_type(live.preflight(real).needed, int)
    live.buffer("16M", backing="2m")  # type: ignore[arg-type]
    assert_type(live.preflight([real], apis=["VFIO"]).charges[0].verdict, str)
    assert_type(live.why_not_longterm(live.capture(real), real.addr).reason, str)
    assert_type(live.Capture.load("buffer.npz").replay().pages, mmc.PageList)
