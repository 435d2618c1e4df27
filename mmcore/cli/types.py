"""
List and count pages by their flags, with the letters, options and line shapes of the kernel's page-types: every frame
of the machine, the pages of a process or of a capture, or those of a file in the page cache. Bits without a name are
shown as bitNN. Like page-types, flags for kernel developers appear with --raw only.
"""

from .output import print_json
from .progress import progress
from .register import _positive
from .target import add_target, heading, open_target

HELP = "count and list pages by their flags, as page-types does"
SPECS = """
addr-spec, in pages: N one page; N+M pages N to N+M-1; N,M pages N to M-1; N, from N to the end; ,M from 0 to M-1.
bits-spec: a,b any of them; a,b=a of these exactly a; a,~b a and not b; =a,b exactly these.
Bits are names (--legend), bitNN or numbers.
"""


def add_arguments(parser):
    """Declare the options of the verb."""
    import argparse

    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = SPECS
    add_target(parser, required=False, otherwise="; without it every frame of this machine")
    parser.add_argument("-p", "--pid", type=_positive, help="walk this process, as PID does")
    parser.add_argument("-f", "--file", metavar="FILE", help="walk this file's pages in the page cache")
    parser.add_argument("--frames", action="store_true",
                        help="of a capture: every frame of the machine, not the process")
    parser.add_argument("-a", "--addr-spec", action="append", default=[], metavar="ADDR-SPEC", help="only these pages")
    parser.add_argument("-b", "--bits", action="append", default=[], metavar="BITS-SPEC",
                        help="only pages with these flags")
    parser.add_argument("-r", "--raw", action="store_true", help="show the flags for kernel developers too")
    parser.add_argument("-l", "--list", action="store_true", help="list pages in ranges")
    parser.add_argument("-L", "--list-each", action="store_true", help="list pages one by one")
    parser.add_argument("-M", "--list-mapcnt", action="store_true", help="list how often each page is mapped, too")
    parser.add_argument("-N", "--no-summary", action="store_true", help="no summary")
    parser.add_argument("-d", "--describe", metavar="FLAGS", help="say what flags mean, and do nothing else")
    parser.add_argument("--legend", action="store_true",
                        help="list every flag's bit, letter and name, and do nothing else")


def run(args):
    """Walk, filter, and print."""
    from mmcore.live import types

    if args.legend:
        print_legend(args.json)
        return
    if args.describe is not None:
        try:
            word = types.parse_flags(args.describe)
        except ValueError as error:
            args.usage_error(str(error))
        if args.json:
            print_json({"flags": f"{word:#018x}", "symbolic": types.letters(word), "names": types.names(word)})
        else:
            print(f"{word:#018x}\t{types.letters(word)}\t{types.names(word)}")
        return
    if sum(one is not None for one in (args.target, args.pid, args.file)) > 1:
        args.usage_error("one of PID|FILE, --pid and --file")
    if args.list and args.list_each:
        args.usage_error("-l or -L, not both")
    try:
        addresses = [types.parse_addresses(text) for text in args.addr_spec]
        bits = [types.parse_bits(text) for text in args.bits]
    except ValueError as error:
        args.usage_error(str(error))
    pages, head = walk(args)
    chosen = types.select(pages, addresses, bits, args.raw)
    summary = types.summarise(chosen, head["page_size"])
    if args.json:
        rows = list(listed(chosen, args)) if args.list or args.list_each else None
        print_json({**head, **summary.as_dict(), **({} if rows is None else {"pages": rows})})
        return
    if args.list or args.list_each:
        print_list(chosen, args)
        print()
    if not args.no_summary:
        print_summary(summary)


def print_legend(as_json):
    """Print every flag."""
    from mmcore.live import types

    rows = types.legend()
    if as_json:
        print_json([{"bit": bit, "letter": letter, "name": name} for bit, letter, name in rows])
        return
    for bit, letter, name in rows:
        print(f"{bit:2d} {letter} {name}")


def walk(args):
    """Return (Pages, what to say about them)."""
    import mmap

    from mmcore.live import types
    from mmcore.live.cached import cached
    from mmcore.live.capture import capture
    from mmcore.live.errors import NotPossible

    if args.file is not None:
        return cached(args.file), {"file": args.file, "page_size": mmap.PAGESIZE}
    if args.pid is not None:
        args.target = str(args.pid)
    if args.target is None:
        if args.addr is not None or args.vma is not None:
            args.usage_error("--addr, --length and --vma choose a part of a process: they need a PID")
        with progress() as show:
            taken = capture("memory", progress=show)
    else:
        taken = open_target(args)
    if taken.pid and not args.frames:
        return types.pages_of(taken), heading(taken)
    if taken.frames is None:
        raise NotPossible("the capture has no frames of the machine", "take it with mmcore capture --all")
    return types.frames_of(taken.frames), heading(taken)


def print_summary(summary):
    """Print pages by flags."""
    from mmcore.live import types

    print(f"{'flags':>18}\tpage-count       MB  symbolic-flags\t\t\tlong-symbolic-flags")
    for word, count in summary.rows:
        megabytes = count * summary.page_size >> 20
        print(f"{word:#018x}\t{count:10d} {megabytes:8d}  {types.letters(word)}\t{types.names(word)}")
    print(f"{'total':>18}\t{summary.total:10d} {summary.total * summary.page_size >> 20:8d}")


def listed(pages, args):
    """Yield the pages, or the ranges of pages, as plain data."""
    import numpy as np

    from mmcore.live import types

    if args.list_each:
        firsts, lengths = np.arange(len(pages.where)), np.ones(len(pages.where), np.int64)
    else:
        firsts, lengths = types.stretches(pages, args.list_mapcnt)
    texts = {word: types.letters(word) for word in np.unique(pages.words).tolist()}
    for first, length in zip(firsts.tolist(), lengths.tolist()):
        row = {"voffset": int(pages.where[first])} if pages.virtual else {}
        pfn = int(pages.pfns[first])
        row["offset"] = pfn or None
        if args.list_mapcnt:
            row["mapcount"] = int(pages.mapcounts[first])
        row["length"] = length
        row["flags"] = texts[int(pages.words[first])]
        yield row


def print_list(pages, args):
    """Print a line a page or a range; a page without a frame shows "-"."""
    columns = (["voffset"] if pages.virtual else []) + ["offset"] + (["map-cnt"] if args.list_mapcnt else [])
    columns += ["flags"] if args.list_each else ["len", "flags"]
    print("\t".join(columns))
    for row in listed(pages, args):
        cells = [f"{row['voffset']:x}"] if pages.virtual else []
        cells.append("-" if row["offset"] is None else f"{row['offset']:x}")
        if args.list_mapcnt:
            cells.append(str(row["mapcount"]))
        if not args.list_each:
            cells.append(f"{row['length']:x}")
        print("\t".join(cells + [row["flags"]]))
