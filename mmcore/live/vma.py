"""The mappings of a process, from /proc/PID/smaps."""

from dataclasses import asdict, dataclass, field, replace

from .limits import open_proc, vanished
from .scan import mappings, parse_line

KERNEL_NAMES = ("[heap]", "[stack]", "[vdso]", "[vvar]", "[vvar_vclock]", "[vsyscall]", "[uprobes]")


@dataclass(frozen=True)
class Vma:
    """One mapping: addresses, permissions, file, and what smaps says of huge pages."""

    start: int
    end: int
    perms: str
    offset: int = 0
    dev: str = "00:00"
    inode: int = 0
    path: str = ""
    kernel_page_size: int = 4096     # of the VMA, bytes: hugetlb shows here
    rss: int = 0                     # bytes
    huge: int = 0                    # bytes mapped by PMD: anon, shmem and file
    flags: "tuple[str, ...]" = ()                # VmFlags, two letters each
    sizes: "dict[str, int]" = field(default_factory=dict, hash=False)   # every line of smaps: name -> bytes, THPeligible as it is

    @property
    def hugetlb(self) -> bool:
        """Return whether hugetlb pages back the mapping."""
        return "ht" in self.flags

    @property
    def shared_memory(self) -> bool:
        """Return whether shared anonymous memory, tmpfs, a memfd or SysV memory is mapped, as far as the name tells."""
        return self.path.startswith(("/dev/zero", "/memfd:", "/dev/shm", "/SYSV"))


PLAIN = ("THPeligible", "ProtectionKey")       # lines of smaps that are no sizes


def smaps(found):
    """Return Vmas in the form of /proc/PID/smaps."""
    lines = []
    for vma in found:
        head = f"{vma.start:08x}-{vma.end:08x} {vma.perms} {vma.offset:08x} {vma.dev} {vma.inode} "
        lines.append(f"{head:<73}{vma.path}" if vma.path else head)
        lines += [f"{key + ':':<16}{value:8d}" if key in PLAIN else f"{key + ':':<16}{value >> 10:8d} kB"
                  for key, value in vma.sizes.items()]
        lines.append("VmFlags: " + "".join(f"{flag} " for flag in vma.flags))
    return "".join(f"{line}\n" for line in lines)


def clean(name):
    """Return a name without control characters: somebody else chose it, and a terminal would obey them."""
    return name if name.isprintable() else "".join(letter if letter.isprintable() else "?" for letter in name)


def nameless(found):
    """Return Vmas without names: what stays is the kind of memory, and a number that tells files apart."""
    files, kept = {}, []
    for vma in found:
        number = files.setdefault((vma.dev, vma.inode), len(files) + 1) if vma.inode else 0
        name = vma.path if vma.path in KERNEL_NAMES else "/memfd:" if vma.shared_memory else ""
        kept.append(replace(vma, path=name, dev="00:00", inode=number))
    return kept


def vmas(pid="self", start=0, end=1 << 64):
    """Return the Vmas of a process that overlap [start, end), in order.

    Raises ProcessLookupError if the process is gone, NotPossible if it may not be read.
    """
    found = []
    current = None
    with open_proc(pid, "smaps") as file:
        try:
            for line in file:
                header = parse_line(line)
                if header:
                    if current:
                        found.append(current)
                        current = None
                    # The kernel makes smaps as it is read: stop after the last one wanted.
                    if header.start >= end:
                        break
                    if header.end > start:
                        current = {**asdict(header), "path": clean(header.path), "sizes": {}}
                elif current:
                    _field(current, line)
        except ProcessLookupError:
            raise vanished(pid) from None
    if current:
        found.append(current)
    return [Vma(**fields) for fields in found]


def find_vma(pid, which):
    """Return the Mapping of a process that is called "heap" or "stack", or stands in line N of /proc/PID/maps.

    Raises ValueError where there is none, ProcessLookupError and NotPossible as mappings() does.
    """
    found = mappings(pid)
    if which in ("heap", "stack"):
        named = [one for one in found if one.path == f"[{which}]"]
        if not named:
            raise ValueError(f"process {pid} has no [{which}]; see /proc/{pid}/maps")
        return named[0]
    if isinstance(which, bool) or not isinstance(which, int):
        raise TypeError(f'a mapping is "heap", "stack" or a line of /proc/PID/maps, not {which!r}')
    if not 1 <= which <= len(found):
        raise ValueError(f"/proc/{pid}/maps has {len(found)} lines; there is no line {which}")
    return found[which - 1]


def _field(fields, line):
    key, _, value = line.partition(":")
    if key == "VmFlags":
        fields["flags"] = tuple(value.split())
        return
    words = value.split()
    if not words or not words[0].isdigit():
        return
    size = int(words[0]) << (10 if words[1:] == ["kB"] else 0)
    fields["sizes"][key] = size
    if key == "KernelPageSize":
        fields["kernel_page_size"] = size
    elif key == "Rss":
        fields["rss"] = size
    elif key in ("AnonHugePages", "ShmemPmdMapped", "FilePmdMapped"):
        fields["huge"] = fields.get("huge", 0) + size
