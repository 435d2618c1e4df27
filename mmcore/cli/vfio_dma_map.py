"""
Map and unmap a buffer for a device again and again, as the unit test vfio-pci-mem-dma-map does, in the engine: by a
generation of the kernel's code, or by all of them with what their authors published beside.
"""

import argparse
import sys

from .output import print_json, print_table
from .register import _positive

HELP = "map a buffer by VFIO for a device and unmap it, by each generation"
LARGEST = 1 << 20               # GiB


def add_arguments(parser):
    """Declare the options of the verb."""
    parser.add_argument("size", metavar="SIZE_GB", type=_gigabytes, help="size of the buffer in GB (GiB); fractions "
                                                                         "are taken as well")
    parser.add_argument("--backing", choices=("MADV_HUGEPAGE", "MAP_POPULATE", "HUGETLBFS"),
                        help="THPs, 4 KiB pages, or hugetlb pages of 2 MiB (default: the first two in turn, as the "
                             "unit test)")
    parser.add_argument("--loops", type=_positive, default=10, help="how often (default 10)")
    parser.add_argument("--acquire", choices=("sink", "batch", "page"), default="sink",
                        help="page: each compared and charged (to 6.17); batch: runs of 512 (6.18); sink: one walk "
                             "(default)")
    parser.add_argument("--release", choices=("range", "folio", "page"), default="range",
                        help="page: put_pfn each (to 6.17); folio: the thread's; range: 6.18 (default)")
    parser.add_argument("--ask", action="store_true", help="ask the IOMMU for every page at unmap, as the kernel "
                                                           "does, instead of "
                                                           "remembering the runs")
    parser.add_argument("--compare", action="store_true", help="all generations, interleaved, with the published times")


def run(args):
    """Measure and print."""
    from mmcore.bench import vfio

    backings = [args.backing] if args.backing else ["MADV_HUGEPAGE", "MAP_POPULATE"]
    if args.compare:
        reports = [vfio.compare(args.size, backing, args.loops) for backing in backings]
        if args.json:
            print_json(reports)
        else:
            for report in reports:
                if report is not reports[0]:
                    print()
                _print_comparison(report)
        return
    reports = []
    for backing in backings:
        say = (lambda text: None) if args.json else (lambda text: print(text, file=sys.stderr))
        if backing == "HUGETLBFS" and not args.json:
            print("Using 2MB huge page size on hugetlbfs", flush=True)
        report = vfio.run_loops(args.size, backing, args.acquire, args.release, not args.ask, args.loops, say=say)
        reports.append(report)
        if not args.json:
            _print_average(report)
    if args.json:
        print_json(reports)


def _print_average(report):
    print(f"------- AVERAGE ({report['backing']}) --------")
    for what in ("map", "unmap"):
        took = report["average"][what]
        print(f"VFIO {what.upper()} DMA in {took:.3f} s ({report['size'] / 2**30 / took:.1f} GB/s)")
    sys.stdout.flush()


def _print_comparison(report):
    from mmcore.bench import vfio
    from mmcore.live.units import format_size

    print(f"{report['backing']}, {format_size(report['size'])}, median of {report['loops']} rounds of each, "
          "interleaved; ratios against "
          f"{report['against']}. \"runs\": remembered, instead of asking the IOMMU for every page")
    rows = []
    for row in report["rows"]:
        cells = [row["generation"]]
        for what in ("map", "unmap"):
            ns = row[what]["ns"]
            cells += [f"{ns / 1e6:.3f}", f"{ns / report['pages']:.3f}", f"{row[what]['ratio']:.2f}x"]
        published = row.get("published")
        cells.append("-" if not published else "{:.3f} / {:.3f} s".format(*published["seconds"]))
        cells.append("-" if not published else "{:.2f}x / {:.2f}x".format(*published["ratio"]))
        rows.append(tuple(cells))
    print_table(("acquire + release", "MAP ms", "ns/page", "ratio", "UNMAP ms", "ns/page", "ratio",
                 f"published, {format_size(vfio.PUBLISHED_SIZE)}", "ratios"), rows)


def _gigabytes(text):
    try:
        value = float(text)
        size = int(value * 2**30) >> 21 << 21 if 0 < value <= LARGEST else 0
    except (ValueError, OverflowError):
        size = 0
    if not size:
        raise argparse.ArgumentTypeError(f"not a size in GB, 0.002 (2 MiB) to {LARGEST}: {text!r}")
    return size
