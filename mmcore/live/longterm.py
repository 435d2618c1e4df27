"""Why can this page not be pinned long-term (FOLL_PIN | FOLL_LONGTERM)? The kernel's rules, on what /proc shows.

In its order: is something mapped there; is it memory with struct pages; may it be written; may a device write to that
file behind its file system's back; then the page: its zone and migrate type. A page in ZONE_MOVABLE or CMA is not
refused: the pin moves it out first, which fails (ENOMEM) while somebody else holds a reference. /proc shows no
reference counts: what hints at holders is said as a hint.
"""

import errno
import os
from dataclasses import asdict, dataclass, field

import numpy as np

from mmcore.core.errors import InvalidArgument, MMError

from .pagemap import (
    KPF_ANON,
    KPF_COMPOUND_HEAD,
    KPF_COMPOUND_TAIL,
    KPF_HUGE,
    KPF_HWPOISON,
    KPF_KSM,
    KPF_LOCKED,
    KPF_LRU,
    KPF_NOPAGE,
    KPF_OFFLINE,
    KPF_SWAPBACKED,
    KPF_WRITEBACK,
    KPF_ZERO_PAGE,
    PM_SWAP,
)
from .units import format_size

# In memory only: nothing writes them back, so that no write has to be noticed.
NOT_TRACKED = {"tmpfs", "devtmpfs", "ramfs", "rootfs", "hugetlbfs"}
MEMORY_PATHS = ("/dev/zero", "/memfd:", "/dev/shm/", "/SYSV", "/anon_hugepage", "/dev/dax")
SECRETMEM = "/secretmem"
# kpageflags bit, what it says of a frame, remedy: such frames cannot be pinned.
UNFIT = (
    (KPF_NOPAGE, "has no struct page that could hold a pin",
     "VFIO maps such frames without pinning; for RDMA export the memory as a dma-buf"),
    (KPF_HWPOISON, "had a memory error (hwpoison)", "unmap and touch it again: another page takes its place"),
    (KPF_OFFLINE, "is offline: a balloon or hotplug driver owns it", "look at that driver"),
)


@dataclass(frozen=True)
class Longterm:
    """The answer for one page: `.verdict` "pinnable", "moved" (first, out of its place), "refused" or "unknown".

    `.errno` is the kernel's (0 unless refused); `.checks` each rule with its answer, as (rule, words), in the kernel's
    order.
    """

    addr: int
    pfn: int  # 0: no page is present
    write: bool
    verdict: str
    errno: int
    reason: str
    remedy: str
    checks: "list[tuple[str, str]]" = field(default_factory=list)

    def as_dict(self) -> dict:
        """Return plain data for JSON."""
        return asdict(self) | {
            "errno": errno.errorcode.get(self.errno, ""),
            "checks": [list(row) for row in self.checks],
        }

    def lines(self) -> "list[str]":
        """Return the report as lines of text."""
        name = f" ({errno.errorcode[self.errno]})" if self.errno else ""
        out = [f"{self.verdict}{name}: {self.reason}"]
        out += [f"{rule}: {words}" for rule, words in self.checks]
        return out + ([f"remedy: {self.remedy}"] if self.remedy else [])

    def __str__(self) -> str:
        return "\n".join(self.lines())


# ---- mappings
# ---------------------------------------------------------------------------------------------------------
def mapping_rule(vma, *, write=True, shmem=None, filesystem=None):
    """Judge a mapping: (errno or 0, None where it is not known; reason; remedy).

    shmem: whether a page of it is known to be shared memory; filesystem: (type, mount options) of its file, None
    unknown.
    """
    where = f"the mapping {vma.start:#x}-{vma.end:#x}"
    if "pf" in vma.flags or "io" in vma.flags:
        return (
            errno.EFAULT,
            f"{where} is raw frames of a device (VM_PFNMAP or VM_IO): there are no pages to pin",
            "VFIO maps such ranges without pinning; for RDMA export the memory as a dma-buf",
        )
    if vma.path.startswith(SECRETMEM):
        return (
            errno.EFAULT,
            f"{where} is secret memory (memfd_secret), which the kernel itself has no mapping of",
            "copy the data to ordinary memory and register that",
        )
    if vma.perms[:2] == "--" or (not write and vma.perms[0] != "r"):
        return errno.EFAULT, f"{where} may not be accessed ({vma.perms})", "mprotect(PROT_READ | PROT_WRITE) it first"
    if write and vma.perms[1] != "w":
        return (
            errno.EFAULT,
            f"{where} is not writable ({vma.perms}), and a device is to write to it",
            "mprotect(PROT_READ | PROT_WRITE) it, or register it for reading only",
        )
    kind, options = filesystem or (None, "")
    if any(option in ("dax", "dax=always") for option in options.split(",")):
        return (
            errno.EOPNOTSUPP,
            f"{where} is a file on a DAX file system, whose blocks a truncate would have to wait for",
            "use device-dax, or a file system without dax",
        )
    if vma.perms[3] != "s" or not vma.inode or not write:
        return 0, "", ""
    if vma.hugetlb or shmem or vma.path.startswith(MEMORY_PATHS) or kind in NOT_TRACKED:
        return 0, "", ""
    if kind is None and vma.dev.startswith("00:"):
        return (
            None,
            f"{where} shares the file {vma.path or '(name not kept)'}, and which file system that is on is not known "
            "here",
            "",
        )
    return (
        errno.EFAULT,
        f"{where} shares the file {vma.path or '(name not kept)'} on {kind or 'a block device'}, which writes back: it "
        "would not notice what a device writes later",
        "map it MAP_PRIVATE, or keep the data in anonymous memory, a memfd, tmpfs or hugetlbfs; short-term pins "
        "(O_DIRECT) are allowed",
    )


def mapping_obstacle(vma):
    """Return (address, errno, words) if a long-term pin for writing is refused anywhere in the mapping, else None."""
    number, reason, remedy = mapping_rule(vma, filesystem=filesystem_of(vma.dev) if vma.inode else None)
    return (vma.start, number, f"{reason} ({errno.errorcode[number]}); {remedy}") if number else None


def filesystem_of(dev):
    """Return (type, options of the superblock) of the device that maps shows as "08:01", None if it is not mounted
    here."""
    major, _, minor = dev.partition(":")
    try:
        wanted = f"{int(major, 16)}:{int(minor, 16)}"
        with open("/proc/self/mountinfo") as file:
            for line in file:
                mount, _, rest = line.partition(" - ")
                if mount.split()[2] == wanted:
                    kind, _, options = rest.split(maxsplit=2)
                    return kind, options.strip()
    except (OSError, ValueError, IndexError):
        pass
    return None


# ---- frames
# -----------------------------------------------------------------------------------------------------------
def zone_of(pfn):
    """Return the name of the zone that spans a frame, "" if none does; from /proc/zoneinfo."""
    name, spanned = "", 0
    with open("/proc/zoneinfo") as file:
        for line in file:
            words = line.split()
            if words[:1] == ["Node"]:
                name = words[3]
            elif words[:1] == ["spanned"]:
                spanned = int(words[1])
            elif words[:1] == ["start_pfn:"] and int(words[1]) <= pfn < int(words[1]) + spanned:
                return name
    return ""


def page_blocks(zone):
    """Return {migrate type: page blocks} of a zone, added over nodes, from /proc/pagetypeinfo; {} where it may not be
    read."""
    types, counts, inside = [], {}, False
    try:
        with open("/proc/pagetypeinfo") as file:
            for line in file:
                if line.startswith("Number of blocks type"):
                    types, inside = line.split()[4:], True
                elif inside and line.startswith("Node"):
                    words = line.replace(",", " ").split()
                    if words[3] == zone:
                        for kind, nr in zip(types, words[4:]):
                            counts[kind] = counts.get(kind, 0) + int(nr)
    except OSError:
        return {}
    return counts


def in_cma(pfn, zone):
    """Tell whether a frame is in CMA: True, False, or None where that cannot be seen."""
    blocks = page_blocks(zone)
    if blocks and not blocks.get("CMA"):
        return False
    known = 0
    root = "/sys/kernel/debug/cma"
    try:
        for name in os.listdir(root):
            first, count = (int(open(f"{root}/{name}/{key}").read()) for key in ("base_pfn", "count"))
            if first <= pfn < first + count:
                return True
            known += 1
    except (OSError, ValueError):
        return None
    return False if known else None


def of_this_machine(capture):
    """Tell whether a capture is of a process that runs here now, so that what /proc says of frames holds for it."""
    return capture.runs_here


def captured_zone(capture, pfn):
    """Return the Zone that spanned a frame when the capture was made, None if none is known."""
    return next((zone for zone in capture.machine.zones if zone.start_pfn <= pfn < zone.end_pfn), None)


# ---- the question
# -----------------------------------------------------------------------------------------------------
def why_not_longterm(capture, addr, *, write=True):
    """Tell whether the page at an address of a capture can be pinned long-term, and why not; returns Longterm.

    write: for a device that writes (FOLL_WRITE). Zone and file system are those of this machine: for a capture of
    another one they are "unknown". Raises MMError (EFAULT) where nothing is mapped or captured, InvalidArgument for
    what is no address.
    """
    if isinstance(addr, bool) or not hasattr(addr, "__index__"):
        raise TypeError(f"an address is an int, not {addr!r}")
    addr = addr.__index__()
    if not 0 <= addr < 1 << 64:
        raise InvalidArgument(f"{addr:#x} is no address")
    vma = next((vma for vma in capture.vmas if vma.start <= addr < vma.end), None)
    page = addr // capture.page_size * capture.page_size
    index = int(np.searchsorted(capture.addresses, page))
    if index == len(capture.words) or int(capture.addresses[index]) != page or vma is None:
        spans = ", ".join(
            f"{int(start):#x}-{int(start) + int(count) * capture.page_size:#x}"
            for start, count in list(zip(capture.starts, capture.counts))[:3]
        )
        more = f" and {len(capture.starts) - 3} more" if len(capture.starts) > 3 else ""
        what = "nothing is mapped there (EFAULT)" if vma is None and spans else "the capture does not cover it"
        raise MMError(errno.EFAULT, f"process {capture.pid} at {addr:#x}: {what}; captured is {spans}{more}", addr=addr)
    return _judge(
        capture,
        addr,
        vma,
        int(capture.words[index]),
        int(capture.pfns[index]),
        int(capture.flags[index]),
        int(capture.mapcounts[index]),
        int(capture.orders[index]),
        write,
    )


def _judge(capture, addr, vma, word, pfn, flags, mapcount, order, write):
    here = of_this_machine(capture)
    checks = []

    def bit(number):
        return flags >> number & 1

    def answer(verdict, reason, remedy="", number=0):
        return Longterm(addr, pfn, write, verdict, number, reason, remedy, checks)

    shmem = pfn and bit(KPF_SWAPBACKED) and not bit(KPF_ANON)
    filesystem = filesystem_of(vma.dev) if here and vma.inode else None
    number, reason, remedy = mapping_rule(vma, write=write, shmem=shmem, filesystem=filesystem)
    name = vma.path or ("anonymous" if not vma.inode else "file")
    checks.append(("mapping", f"{vma.start:#x}-{vma.end:#x} {vma.perms} {name}: " + _allowed(number)))
    if number:
        return answer("refused", reason, remedy, number)
    unsure = [reason] if number is None else []
    if not pfn:
        swapped = word & int(PM_SWAP)
        checks.append(("page", "swapped out, or being moved" if swapped else "not present"))
        text = "the pin faults it in, and the kernel allocates pages for long-term pins outside of ZONE_MOVABLE and CMA"
        return answer("unknown" if unsure else "pinnable", "; ".join(unsure + [text]))
    for flag, what, remedy in UNFIT:
        if bit(flag):
            checks.append(("page", f"PFN {pfn:#x} {what}"))
            return answer("refused", f"PFN {pfn:#x} {what}", remedy, errno.EFAULT)
    checks.append(("page", _page_words(pfn, order, mapcount, capture.page_size, bit)))
    replaced = _replaced(vma, word, write, bit)
    if replaced:
        checks.append(("copy", replaced))
        return answer("unknown" if unsure else "pinnable", "; ".join(unsure + [replaced]))
    if not here:
        zone = captured_zone(capture, pfn)
        checks.append(("zone", zone.name if zone else "unknown"))
        if zone and zone.name == "Movable":
            text = (
                "the page lies in ZONE_MOVABLE: the pin first moves it elsewhere, and fails with ENOMEM while another "
                "reference holds it"
            )
            return answer("moved", "; ".join(unsure + [text]), "nothing, if the pin succeeds; else find the holder")
        if zone and not zone.cma and not unsure:
            return answer("pinnable", f"nothing forbids it: PFN {pfn:#x} in zone {zone.name}, which has no CMA, stays "
                                      "where it is")
        what = f"whether PFN {pfn:#x} lies in CMA" if zone else f"the zone of PFN {pfn:#x}"
        text = (
            f"{what} is not known: the capture is of another machine, or its process has ended; everything else that "
            "the capture shows allows it"
        )
        return answer("unknown", "; ".join(unsure + [text]), "run it on that machine, while the process lives")
    zone = zone_of(pfn)
    cma = in_cma(pfn, zone)
    blocks = page_blocks(zone)
    checks.append(
        ("zone", f"{zone or 'none'}" + (" : pages there are movable by promise" if zone == "Movable" else ""))
    )
    cma_words = {True: "CMA", False: "not CMA", None: "whether it is CMA cannot be seen (mount debugfs)"}[cma]
    spread = ", ".join(f"{nr} {kind}" for kind, nr in blocks.items() if nr)
    checks.append(
        (
            "migrate type",
            f"{cma_words}; page blocks of the zone: {spread or 'pagetypeinfo may not be read'}; no file shows "
            "the type of one page",
        )
    )
    hints = _holders(capture, mapcount, bit)
    checks.append(
        ("references", "; ".join(hints) if hints else "nothing hints at another holder; /proc shows no _refcount")
    )
    if zone == "Movable" or cma:
        place = "ZONE_MOVABLE" if zone == "Movable" else "a CMA area"
        return answer(
            "moved",
            "; ".join(
                unsure
                + [
                    f"the page lies in {place}: the pin first moves it elsewhere, and fails with ENOMEM while another "
                    "reference holds it"
                ]
            ),
            "nothing, if the pin succeeds; else find the holder (mmcore pins), make room in the other zones "
            "(echo 1 > /proc/sys/vm/compact_memory), or online less memory as movable",
        )
    if unsure or cma is None:
        return answer(
            "unknown",
            "; ".join(unsure + (["whether its page block is CMA cannot be seen here"] if cma is None else [])),
            "as root: mount -t debugfs none /sys/kernel/debug" if cma is None else "",
        )
    return answer("pinnable", f"nothing forbids it: PFN {pfn:#x} in zone {zone} stays where it is")


def _allowed(number):
    return {0: "a long-term pin may be asked for", None: "whether a long-term pin may be asked for is not known"}.get(
        number, "not allowed"
    )


def _page_words(pfn, order, mapcount, page_size, bit):
    kind = (
        "hugetlb"
        if bit(KPF_HUGE)
        else "zero page"
        if bit(KPF_ZERO_PAGE)
        else "KSM"
        if bit(KPF_KSM)
        else "anonymous"
        if bit(KPF_ANON)
        else "shared memory"
        if bit(KPF_SWAPBACKED)
        else "page cache"
    )
    compound = bit(KPF_COMPOUND_HEAD) or bit(KPF_COMPOUND_TAIL)
    folio = f" in a folio of {format_size(page_size << order)}" if compound else ""
    return f"PFN {pfn:#x}, {kind}{folio}, mapped {mapcount} time{'' if mapcount == 1 else 's'}"


def _replaced(vma, word, write, bit):
    """Say why the pin lands on another page than the one mapped now; "" if it does not."""
    if vma.perms[3] == "s" or bit(KPF_HUGE):
        return ""
    text = "the pin breaks copy-on-write first, and lands on a new page of this process's own"
    if bit(KPF_ZERO_PAGE):
        return f"the zero page is mapped: {text}"
    if bit(KPF_KSM):
        return f"the page is merged with others of its content (KSM): {text}"
    if not bit(KPF_ANON):
        return f"the page belongs to the page cache and the mapping is private: {text}"
    return ""


def _holders(capture, mapcount, bit):
    """Say what hints at references beyond the mappings."""
    hints = []
    if bit(KPF_WRITEBACK):
        hints.append("being written back: moving it waits for that")
    if bit(KPF_LOCKED):
        hints.append("locked at this moment")
    if not bit(KPF_LRU) and not bit(KPF_HUGE):
        hints.append("not on an LRU list: in a per-CPU batch (the pin drains it), or isolated by somebody")
    if mapcount > 1:
        hints.append(f"mapped {mapcount} times: each mapping is moved with it")
    if capture.limits.pinned:
        hints.append(
            f"process {capture.pid} has {format_size(capture.limits.pinned)} pinned long-term (VmPin): such a "
            "page is in place already, and cannot be moved"
        )
    return hints
