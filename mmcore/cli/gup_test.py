"""
The kernel's gup_test on the engine: acquire a buffer some pages a call, release it in one, and print the times of both.
The options and the lines are gup_test's. Here a short acquire, or a page that is not pinned as it should be, is an
error (exit status 1); -n -1 means the whole buffer wherever it stands; -f names a kind of file of the model.
"""

import argparse
import sys

from .output import print_json, print_table
from .register import _positive

HELP = "the kernel's gup_test on the engine: get, pin and pin long-term, timed"
FILES = ("tmpfs", "ext4", "hugetlbfs", "hugetlbfs:2M", "hugetlbfs:1G", "devdax", "devdax:2M", "devdax:1G", "/dev/zero")
PUBLISHED = "{before_ms:g} -> {after_ms:g} ms, {ratio:.1f}x ({what})"
MAX_MIB = 1 << 24           # 16 TiB


def add_arguments(parser):
    """Declare the options of the verb."""
    which = parser.add_argument_group("what to do; the last one counts (default -u)")
    for letter, text in (("a", "pin_user_pages_fast (PIN_FAST_BENCHMARK)"), ("b", "pin_user_pages (PIN_BASIC_TEST)"),
                         ("L", "pin_user_pages with FOLL_LONGTERM (PIN_LONGTERM_BENCHMARK)"),
                         ("c", "dump struct pages (DUMP_USER_PAGES_TEST)"), ("U", "get_user_pages (GUP_BASIC_TEST)"),
                         ("u", "get_user_pages_fast (GUP_FAST_BENCHMARK)")):
        which.add_argument(f"-{letter}", dest="command", action="store_const", const=letter, default="u", help=text)
    which.add_argument("-p", dest="pin_dump", action="store_true",
                       help="with -c: pin_user_pages instead of get_user_pages")
    which.add_argument("pages", nargs="*", type=_index, metavar="PAGE",
                       help="with -c: up to 8 pages to dump, counted from 0 (default 0)")
    how = parser.add_argument_group("how")
    how.add_argument("-F", dest="raw_flags", type=_flags, default=0, metavar="FLAGS",
                     help="gup_flags as a number, 0x1 as well (default 0)")
    how.add_argument("-w", dest="write", action="store_true", default=True, help="add FOLL_WRITE (default)")
    how.add_argument("-W", dest="write", action="store_false", help="do not add FOLL_WRITE")
    how.add_argument("-n", dest="per_call", type=_number, default=1, metavar="PAGES",
                     help="pages a call; below 0: all (default 1)")
    how.add_argument("-m", dest="mib", type=_mib, default=128, metavar="MIB",
                     help="size of the buffer in MiB (default 128)")
    how.add_argument("-r", dest="repeats", type=_positive, default=1, metavar="TIMES",
                     help="repeats of -a, -L and -u (default 1)")
    how.add_argument("-j", dest="threads", type=_threads, default=1, metavar="THREADS",
                     help="threads, all on the one buffer (default 1)")
    what = parser.add_argument_group("on what")
    what.add_argument("-t", dest="advice", action="store_const", const="t", default="", help="MADV_HUGEPAGE")
    what.add_argument("-T", dest="advice", action="store_const", const="T", help="MADV_NOHUGEPAGE")
    what.add_argument("-S", dest="shared", action="store_true", help="MAP_SHARED instead of MAP_PRIVATE")
    what.add_argument("-H", dest="hugetlb", action="store_true", help="MAP_HUGETLB")
    what.add_argument("-f", dest="file", choices=FILES, default="/dev/zero", metavar="FILE",
                      help="tmpfs, ext4, hugetlbfs[:2M|:1G], devdax[:2M|:1G] or /dev/zero (default: anonymous memory)")
    what.add_argument("--shmem-thp", choices=("never", "madvise", "always"), default="",
                      help="THPs in shared memory (default madvise with -t, so that -t -S gets them, else never)")
    more = parser.add_argument_group("not in the kernel's test")
    more.add_argument("--acquire", choices=("leaf", "page"), default="leaf",
                      help="generation of acquiring (default leaf)")
    more.add_argument("--release", choices=("run", "head", "page"), default="run",
                      help="generation of releasing (default run)")
    more.add_argument("--plain", action="store_true", help="plain lines instead of TAP")
    more.add_argument("--compare", action="store_true",
                      help="time all generations interleaved and show their ratios beside the published ones")
    more.add_argument("--rounds", type=_positive, default=9, help="rounds of --compare (default 9)")


def run(args):
    """Test and print; raises an error at the end when a page was missing or not pinned as it should be."""
    _check(args)
    from mmcore.bench import gup_test

    options = gup_test.Options(
        command=args.command, size=args.mib << 20, per_call=args.per_call, repeats=args.repeats, threads=args.threads,
        raw_flags=args.raw_flags, write=args.write, pin_dump=args.pin_dump, advice=args.advice, shared=args.shared,
        hugetlb=args.hugetlb, file="" if args.file == "/dev/zero" else args.file, shmem_thp=args.shmem_thp,
        dump=args.pages,
        acquire=args.acquire, release=args.release)
    if args.compare:
        _compare(args, options)
    else:
        _test(args, options)


def _check(args):
    if args.pages and args.command != "c":
        args.usage_error("page numbers go with -c")
    if len(args.pages) > 8:
        args.usage_error(f"{len(args.pages)} pages to dump; the kernel's test dumps 8 at most")
    if args.hugetlb and args.file != "/dev/zero":
        args.usage_error("-H maps anonymous memory; use -f hugetlbfs for a file")
    if args.file.startswith("devdax") and not args.shared:
        args.usage_error("device-dax can only be mapped shared: add -S")
    if args.release == "head" and args.command in "uU":
        args.usage_error("--release head is a generation of unpin_user_pages(); put_page() has page and run")
    if args.compare and (args.command == "c" or args.threads > 1 or args.per_call == 0):
        args.usage_error("--compare times one thread; not with -c, -j or -n 0")


def _test(args, options):
    from mmcore.bench.gup_test import COMMANDS, TIMED

    name = COMMANDS[args.command][0]
    mark, results = ("" if args.plain else "# "), []

    def tell(thread, result):
        results.append((thread, result))
        if args.json:
            return
        for line in result.lines:
            print(mark + line)
        if args.command in TIMED:
            line = f"{name}: Time: get:{result.get_usec} put:{result.put_usec} us"
            cut = f", truncated (size: {result.size})"
        else:
            line, cut = f"{name}: done", f"\n{mark}Truncated (size: {result.size})"
        # In TAP, the kernel's test marks the end of its line as another comment.
        end = "# " if mark and args.command in TIMED else ""
        print(mark + line + end + (cut + end if result.short else ""))
        sys.stdout.flush()

    if not args.plain and not args.json:
        print(f"TAP version 13\n1..{args.threads}")
    from mmcore.bench.gup_test import run as run_test

    size = run_test(options, tell)
    bad = {thread: result for thread, result in results if result.why}
    if args.json:
        print_json({"command": name, "size": size, "flags": options.flags, "threads": args.threads, "ok": not bad,
                    "results": [{"thread": thread, "get_usec": result.get_usec, "put_usec": result.put_usec,
                                 "size": result.size,
                                 "why": result.why, "lines": result.lines} for thread, result in results]})
    elif not args.plain:
        for thread in range(args.threads):
            print(f"{'not ok' if thread in bad else 'ok'} {thread + 1} ioctl status 0")
        passed = args.threads - len(bad)
        print(f"# Totals: pass:{passed} fail:{len(bad)} xfail:0 xpass:0 skip:0 error:0")
    if bad:
        result = next(iter(bad.values()))
        short = f"{result.size >> 12} of {result.asked >> 12} pages acquired: " if result.short else ""
        raise RuntimeError(short + result.why)


def _compare(args, options):
    from mmcore.bench.gup_test import compare
    from mmcore.live.units import format_size

    report = compare(options, args.rounds)
    if args.json:
        print_json(report)
        return
    calls = "all pages in one call" if args.per_call < 0 else f"{args.per_call} pages a call"
    print(f"{report['command']}: {format_size(report['size'])} of {report['backing']}, {calls}, median of "
          f"{report['rounds']} rounds of each, interleaved; spread without the lowest and the highest")
    rows = []
    for row in report["rows"]:
        published = row["published"]
        rows.append((f"{row['phase']}: {row['before']} -> {row['after']}", f"{row['before_ms']:.3f}",
                     f"{row['after_ms']:.3f}",
                     f"{row['ratio']:.2f}x", f"{row['low']:.2f}-{row['high']:.2f}", row["verdict"],
                     PUBLISHED.format(**published) if published else "-"))
    print_table(("phase: before -> after", "before ms", "after ms", "ratio", "spread", "verdict",
                 "published for 16 GiB"), rows)


def _whole(text, low, high, what):
    try:
        value = int(text, 0)
    except ValueError:
        raise argparse.ArgumentTypeError(f"not a number: {text!r}") from None
    if not low <= value <= high:
        raise argparse.ArgumentTypeError(f"{value} is no {what}: {low}..{high}")
    return value


def _index(text):
    return _whole(text, 0, (1 << 40) - 1, "page number")


def _flags(text):
    return _whole(text, 0, (1 << 32) - 1, "set of flags")


def _number(text):
    return _whole(text, -(1 << 40), 1 << 40, "number of pages")


def _mib(text):
    return _whole(text, 1, MAX_MIB, "size in MiB")


def _threads(text):
    return _whole(text, 1, 256, "number of threads")
