"""What if the memory of a virtual machine were 4 KiB pages, THP, or hugetlb? Pin, map for a device, unmap, unpin.

    python examples/what_if.py [SIZE]       # default 64G: 1.5 GiB of struct pages and tables with 4 KiB pages
"""
import sys
import time

import mmcore as mmc
from mmcore.live import parse_size

SEGMENT = 1 << 30               # a multiple of huge pages: the default, 4 GiB less a page, would misalign what follows
KINDS = {
    "4 KiB": {"thp": "never"},
    "THP": {"thp": "always"},
    "hugetlb 2M": {"hugetlb": "2M"},
    "hugetlb 1G": {"hugetlb": "1G"},
}


def study(size, config):
    """What each phase costs: [(what, count, seconds)]."""
    config, flags = dict(config), mmc.MAP_PRIVATE | mmc.MAP_ANONYMOUS
    if "hugetlb" in config:
        page = config["hugetlb"]
        config["hugetlb"] = {page: size // parse_size(page)}
        flags |= mmc.MAP_HUGETLB | {"2M": mmc.MAP_HUGE_2MB, "1G": mmc.MAP_HUGE_1GB}[page]
    rows = []

    def phase(name, call, count):
        start = time.perf_counter()
        result = call()
        rows.append((name, count(result), time.perf_counter() - start))
        return result

    def updates(_):
        counts = mem.opstats()
        mem.reset_opstats()
        return f"{counts['ref_atomics'] + counts['pincount_atomics']} counter updates"

    with mmc.Memory(size + size // 16 + (2 << 30), **config) as mem:
        mm = mmc.MM(mem)
        addr = mm.mmap(size, flags=flags)
        phase("fault in", lambda: mm.touch(addr, size), lambda faults: f"{faults} faults")
        mem.reset_opstats()
        nr = size // mem.page_size
        table = phase("pin", lambda: mmc.pin_user_pages(mm, addr, nr, mmc.FOLL_WRITE | mmc.FOLL_LONGTERM,
                                                        output=mmc.SGAppendTable(mem, max_segment=SEGMENT)), updates)
        device = mmc.Device(mem, max_seg_size=SEGMENT, iommu=True)
        phase("map", lambda: mmc.dma_map_sgtable(device, table), lambda _: f"{device.domain.stats['leaves']} IOMMU leaves")
        phase("unmap", lambda: mmc.dma_unmap_sgtable(device, table), lambda _: "")
        mem.reset_opstats()

        def unpin():
            for entry in mmc.for_each_sg(table):
                pages = -(-(entry.offset + entry.length) // mem.page_size)
                mmc.unpin_user_page_range_dirty_lock(entry.page, pages, True)
        phase("unpin", unpin, updates)
        mmc.sg_free_append_table(table)
        phase("free", mm.exit, lambda _: "")
        mem.check()
    return rows


def main(size="64G"):
    size = parse_size(size)
    for name, config in KINDS.items():
        if "hugetlb" in config and size % parse_size(config["hugetlb"]):
            continue
        print(f"{name}: {size >> 20} MiB")
        for what, count, seconds in study(size, config):
            print(f"    {what:9} {seconds * 1e3:10.2f} ms   {count}")


if __name__ == "__main__":
    main(*sys.argv[1:])
