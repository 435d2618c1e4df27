"""
Tell what backs a process's memory: bytes by folio size and kind, alignment, and which huge pages each mapping may have,
or why not: its size, alignment, flags, the settings, and whether blocks of that size are free.
"""

import os
import sys

from .output import print_fields, print_json, print_table
from .target import add_target, describe, heading, open_target, partial_fields

HELP = "what backs a buffer, and why it is not huge"


def add_arguments(parser):
    """Declare the options of the verb."""
    add_target(parser)
    parser.add_argument("--proc", action="store_true", help="print the mappings as /proc/PID/smaps does")


def run(args):
    """Capture or load, and print."""
    from mmcore.live.vma import smaps

    if args.proc and args.json:
        args.usage_error("--proc or --json, not both")
    capture = open_target(args)
    if args.proc:
        print(smaps(capture.vmas), end="")
        return
    backing = capture.backing()
    if args.json:
        print_json({**heading(capture), **backing.as_dict(), "settings": settings(capture.machine)})
    else:
        print_text(capture, backing)


def settings(machine):
    """Return the settings and free memory that decide about huge pages, as plain data."""
    data = machine.as_dict()
    return {key: data[key] for key in ("thp", "mthp", "hugetlb")} | {"free_blocks": machine.free_blocks}


def print_text(capture, backing):
    """Print the total, the settings, then a line a mapping."""
    from mmcore.live.units import format_size

    fields = [("looked at", describe(capture))] + partial_fields(capture)
    fields.append(("present", f"{format_size(backing.present)} of {format_size(backing.length)}: "
                              f"{backing.pages} pages in {backing.folios} folios"))
    fields.append(("layout", f"{backing.runs} physical runs, {backing.sg_segments} scatterlist segments"))
    fields.append(("folios", sizes_text(backing.by_size) or "none"))
    fields.append(("kinds", "; ".join(f"{kind} {format_size(n)}" for kind, n in backing.by_kind.items()) or "none"))
    leaves = [one.by_leaf for one in backing.mappings]
    if leaves and None not in leaves:
        fields.append(("PMD, PUD", f"{format_size(sum(leaves))} mapped by entries of huge pages"))
    fields.append(("aligned", f"{format_size(sum(sum(one.aligned.values()) for one in backing.mappings))} at addresses "
                              "aligned like their folios"))
    fields += settings_fields(capture)
    print_fields(fields)
    print()
    print_sizes(capture, backing)
    print()
    print_mappings(backing.mappings)


def print_mappings(mappings):
    """Print a line a mapping, then the reasons that its last column but one points to."""
    from mmcore.live.units import format_size

    reasons, rows, short = {}, [], sys.stdout.isatty()
    for one in mappings:
        word, reason = verdict(one)
        mark = f"{word} ({reasons.setdefault(reason, len(reasons) + 1)})" if reason else word
        rows.append((f"{one.start:x}-{one.end:x}", one.perms, format_size(one.length), format_size(one.present),
                     format_size(one.alignment), sizes_text(one.by_size) or "-", ", ".join(one.by_kind) or "-", mark,
                     (os.path.basename(one.name) if short else one.name) or "-"))
    print_table(("mapping", "perms", "size", "present", "align", "folios", "kind", "huge", "name"), rows,
                left=(0, 1, 5, 6, 7, 8))
    if reasons:
        print()
        print_fields([(f"({number})", reason) for reason, number in reasons.items()])


def sizes_text(by_size):
    """Return "2 MiB: 256 MiB; ..." of folio size -> bytes."""
    from mmcore.live.units import format_size

    return "; ".join(f"{format_size(size)}: {format_size(n)}" for size, n in sorted(by_size.items(), reverse=True))


def verdict(one):
    """Return whether a mapping is huge or may be, in a word, and why it is not, or which sizes it may have."""
    if one.sizes and not one.reason:
        return "is", ""
    word, _, reason = one.eligibility().partition(": ")
    if word == "yes":
        reason = f"may have {reason}; {one.reason}"
    if one.eligible is not None and one.eligible != bool(one.allowed):
        reason += f" (THPeligible says {'yes' if one.eligible else 'no'})"
    return word, reason


def settings_fields(capture):
    """Return (name, text) rows of the settings."""
    from mmcore.live.units import format_size

    machine = capture.machine
    words = [f"{name} {machine.thp[name]}" for name in ("enabled", "defrag", "shmem_enabled") if name in machine.thp]
    if capture.thp_disabled:
        words.append("turned off by the process (PR_SET_THP_DISABLE)")
    pools = [f"{format_size(size)}: {pool['total']} ({pool['free']} free, {pool['reserved']} reserved)"
             for size, pool in machine.hugetlb.items()]
    return [("THP", ", ".join(words) or "not in this kernel"), ("hugetlb", "; ".join(pools) or "not in this kernel")]


def print_sizes(capture, backing):
    """Print a line for each folio size: its switches, free blocks, and the mappings that may have it."""
    from mmcore.live import thp
    from mmcore.live.units import format_size

    machine, blocks, rows = capture.machine, capture.machine.free_blocks, []
    for size in thp.sizes(machine):
        order = (size // machine.page_size).bit_length() - 1
        words = machine.mthp.get(size, {})
        free = sum(count << (at - order) for at, count in enumerate(blocks) if at >= order)
        allowed = [one for one in backing.mappings if size in one.allowed]
        used = backing.by_size.get(size, 0)
        rows.append((format_size(size), str(order), words.get("enabled") or "-", words.get("shmem_enabled") or "-",
                     str(free) if blocks else "-", f"{len(allowed)} of {len(backing.mappings)}", format_size(used)))
    print_table(("folio size", "order", "enabled", "shmem", "free blocks", "mappings that may", "present"), rows,
                left=(0, 2, 3))
