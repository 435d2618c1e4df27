"""May a mapping have transparent huge pages, of which sizes, and if not, why?

The rules are the kernel's for anonymous and shared memory: the mapping's flags, whether an aligned range of the size
fits, and the switch of the size. smaps says the same in one bit, THPeligible, without the reason.
"""

from dataclasses import dataclass

from .units import format_size

SPECIAL = {"io": "device memory (VM_IO)", "pf": "raw page frames (VM_PFNMAP)", "mm": "mixed frames (VM_MIXEDMAP)",
           "de": "the driver fixed its size (VM_DONTEXPAND)"}
ON = {"always", "within_size", "force"}
ADVISED = {"madvise", "advise"}


@dataclass(frozen=True)
class SizeRule:
    """One folio size and a mapping: `.reason` says why it may not have it, "" if it may."""

    size: int             # bytes
    reason: str
    free_blocks: int      # free blocks of this order or above when it was captured: 0 means it must be compacted first


def sizes(machine):
    """Return the folio sizes that a machine's settings know, in bytes, the PMD size among them."""
    return sorted({*machine.mthp, machine.pmd_size})


def rules(vma, machine, process_disabled=False):
    """Judge every folio size for a mapping: list of SizeRule, the smallest first.

    vma: Vma; machine: Machine; process_disabled: prctl(PR_SET_THP_DISABLE) was called.
    """
    blocks = machine.free_blocks
    found = []
    for size in sizes(machine):
        order = (size // machine.page_size).bit_length() - 1
        enough = sum(count << (at - order) for at, count in enumerate(blocks) if at >= order)
        found.append(SizeRule(size, forbidden(vma, size, machine, process_disabled), enough))
    return found


def forbidden(vma, size, machine, process_disabled=False):
    """Return in words the first rule that keeps folios of this size out of a mapping, or "" if none does."""
    if vma.hugetlb:
        return "hugetlb: its pages come from the pool"
    for letters, meaning in SPECIAL.items():
        if letters in vma.flags:
            return meaning
    if not fits(vma, size, machine.page_size):
        return f"no aligned range of {format_size(size)} in the mapping"
    if "nh" in vma.flags:
        return "madvise(MADV_NOHUGEPAGE)"
    if process_disabled:
        return "prctl(PR_SET_THP_DISABLE)"
    if vma.inode and not vma.shared_memory:
        return "file pages: their folios are the file system's choice"
    if vma.path in ("[vvar]", "[vdso]", "[vsyscall]", "[vvar_vclock]"):
        return "made by the kernel"
    return switched_off(vma, size, machine)


def fits(vma, size, page_size):
    """Tell whether an aligned range of size bytes lies in the mapping, aligned in the file too where it has one."""
    if (vma.inode or vma.shared_memory) and (vma.start - vma.offset) % size:
        return False
    return -(-vma.start // size) * size + size <= vma.end


def switched_off(vma, size, machine):
    """Return in words which switch keeps this size out, or ""."""
    switch = "shmem_enabled" if vma.shared_memory else "enabled"
    whole = machine.thp.get(switch, "")
    where, word = f"transparent_hugepage/{switch}", whole
    if size in machine.mthp:
        own = machine.mthp[size].get(switch, "")
        if own != "inherit" and (own or size != machine.pmd_size):
            where, word = f"transparent_hugepage/hugepages-{size >> 10}kB/{switch}", own
    if whole == "deny" and vma.shared_memory:
        where, word = f"transparent_hugepage/{switch}", whole
    if word in ON:
        return ""
    if word in ADVISED:
        return "" if "hg" in vma.flags else f"{where} is {word} and the mapping is not advised"
    return f"{where} is {word or 'not in this kernel'}"


def why_not_huge(vma, machine=None, process_disabled=False):
    """Return in words why a mapping has no PMD-sized THP, or "" if it is huge throughout.

    machine: Machine of the same moment; None reads this one. The first rule that forbids it is the answer; when none
    does, memory was short of huge pages at the fault or the folio was split later, which no file tells apart.
    """
    if machine is None:
        from .machine import machine as read

        machine = read()
    size = machine.pmd_size
    if vma.hugetlb or vma.huge >= (vma.end - vma.start) // size * size > 0:
        return ""
    reason = forbidden(vma, size, machine, process_disabled)
    if reason:
        return reason
    if not vma.rss:
        return "not populated"
    order = (size // machine.page_size).bit_length() - 1
    free = sum(count << (at - order) for at, count in enumerate(machine.free_blocks) if at >= order)
    if machine.zones and not free:
        return (f"no free block of {format_size(size)} now; at the touch compaction must have made none, or it was "
                "split since")
    return "no huge page was free when it was touched, or the folio was split since"
