"""The machine around a buffer: free blocks, zones, huge page settings and pools, as a capture keeps them."""

import os
import platform
import re
from dataclasses import asdict, dataclass, field

from .limits import require_proc

_THP = "/sys/kernel/mm/transparent_hugepage"
_POOLS = "/sys/kernel/mm/hugepages"
_BUDDY = re.compile(r"Node\s+(\d+), zone\s+(\S+)\s+([\d\s]+)$")
_ZONE = re.compile(r"Node\s+(\d+), zone\s+(\S+)")
_ZONE_FIELDS = ("min", "low", "high", "spanned", "present", "managed", "cma")
_POOL_FILES = {"total": "nr_hugepages", "free": "free_hugepages", "reserved": "resv_hugepages",
               "surplus": "surplus_hugepages", "overcommit": "nr_overcommit_hugepages"}


@dataclass(frozen=True)
class Zone:
    """One zone of memory, in pages, with its free blocks by order."""

    node: int
    name: str
    start_pfn: int = 0
    spanned: int = 0
    present: int = 0
    managed: int = 0
    cma: int = 0
    free: int = 0
    min: int = 0
    low: int = 0
    high: int = 0
    blocks: tuple = ()            # free blocks of order 0, 1, 2, ... from buddyinfo

    @property
    def end_pfn(self) -> int:
        """Return the first PFN after the zone."""
        return self.start_pfn + self.spanned

    @property
    def free_in_blocks(self) -> int:
        """Return the pages on the free lists: what buddyinfo adds up to, without the lists of each processor."""
        return sum(count << order for order, count in enumerate(self.blocks))


@dataclass(frozen=True)
class Machine:
    """What holds for every process of a machine; read by machine(), kept in captures."""

    kernel: str = ""
    page_size: int = 4096
    pmd_size: int = 2 << 20
    zones: tuple = ()                            # Zone
    thp: dict = field(default_factory=dict)      # switch -> chosen word: enabled, defrag, shmem_enabled, ...
    mthp: dict = field(default_factory=dict)     # size in bytes -> {"enabled": word, "shmem_enabled": word}
    hugetlb: dict = field(default_factory=dict)  # size in bytes -> pages: total, free, reserved, surplus, overcommit

    def as_dict(self) -> dict:
        """Return plain data for JSON; from_dict() takes it back."""
        data = asdict(self)
        data["mthp"] = {str(size): words for size, words in self.mthp.items()}
        data["hugetlb"] = {str(size): counts for size, counts in self.hugetlb.items()}
        return data

    @classmethod
    def from_dict(cls, data):
        """Make a Machine of as_dict()'s data. Raises TypeError, KeyError or ValueError where it is none."""
        return cls(
            kernel=_text(data["kernel"]), page_size=_count(data["page_size"]), pmd_size=_count(data["pmd_size"]),
            zones=tuple(_zone(**zone) for zone in data["zones"]),
            thp={_text(key): _text(word) for key, word in data["thp"].items()},
            mthp={_count(int(size)): {_text(key): _text(word) for key, word in words.items()}
                  for size, words in data["mthp"].items()},
            hugetlb={_count(int(size)): {_text(key): _count(number) for key, number in counts.items()}
                     for size, counts in data["hugetlb"].items()})

    @property
    def free_blocks(self) -> "list[int]":
        """Return the free blocks by order, of all zones together."""
        longest = max((len(zone.blocks) for zone in self.zones), default=0)
        return [sum(zone.blocks[order] for zone in self.zones if order < len(zone.blocks)) for order in range(longest)]

    def buddyinfo(self) -> str:
        """Return the zones in the form of /proc/buddyinfo."""
        rows = ((zone, "".join(f"{count:6d} " for count in zone.blocks)) for zone in self.zones if zone.blocks)
        return "".join(f"Node {zone.node}, zone {zone.name:>8} {counts}\n" for zone, counts in rows)


def _text(value):
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def _count(value):
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 64:
        raise TypeError(f"{value!r} is no count")
    return value


def _zone(node, name, blocks, **counts):
    return Zone(_count(node), _text(name), blocks=tuple(map(_count, blocks)),
                **{key: _count(value) for key, value in counts.items()})


def machine():
    """Read this machine: Machine. Raises NotPossible off Linux; what this kernel has not is left empty."""
    require_proc()
    switches = [name for name in _names(_THP) if os.path.isfile(f"{_THP}/{name}")]
    sizes = sorted(_size(name) for name in _names(_THP) if name.startswith("hugepages-"))
    pools = sorted(_size(name) for name in _names(_POOLS))
    return Machine(
        kernel=platform.release(), page_size=os.sysconf("SC_PAGE_SIZE"),
        pmd_size=int(_read(f"{_THP}/hpage_pmd_size") or 2 << 20), zones=tuple(zones()),
        thp={name: chosen(_read(f"{_THP}/{name}")) for name in switches if name != "hpage_pmd_size"},
        mthp={size: {key: chosen(_read(f"{_THP}/hugepages-{size >> 10}kB/{key}"))
                     for key in ("enabled", "shmem_enabled")} for size in sizes},
        hugetlb={size: {key: int(_read(f"{_POOLS}/hugepages-{size >> 10}kB/{name}") or 0)
                        for key, name in _POOL_FILES.items()} for size in pools})


def zones(buddyinfo=None, zoneinfo=None):
    """Return the Zones of the text of /proc/buddyinfo and /proc/zoneinfo, read from there by default."""
    require_proc()
    buddyinfo = _read("/proc/buddyinfo") if buddyinfo is None else buddyinfo
    zoneinfo = _read("/proc/zoneinfo") if zoneinfo is None else zoneinfo
    blocks = {}
    for line in buddyinfo.splitlines():
        match = _BUDDY.match(line)
        if match:
            blocks[int(match[1]), match[2]] = tuple(map(int, match[3].split()))
    found, current = [], None
    for line in zoneinfo.splitlines():
        match = _ZONE.match(line)
        words = line.split()
        if match:
            current = {"node": int(match[1]), "name": match[2]}
            found.append(current)
        elif current is None or not words:
            continue
        elif words[:2] == ["pages", "free"]:
            current["free"] = int(words[2])
        elif words[0] == "start_pfn:":
            current["start_pfn"] = int(words[1])
        elif words[0] in _ZONE_FIELDS and len(words) == 2:
            # The processors' own lists say high, low and min again, with a colon; the zone's come first.
            current.setdefault(words[0], int(words[1]))
    named = {(zone["node"], zone["name"]) for zone in found}
    found += [{"node": node, "name": name} for node, name in blocks if (node, name) not in named]
    return [Zone(**zone, blocks=blocks.get((zone["node"], zone["name"]), ())) for zone in found]


def chosen(text):
    """Return the word in brackets of a switch's text, or all of it where there is none."""
    match = re.search(r"\[(.*?)\]", text)
    return match[1] if match else text.strip()


def _names(folder):
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _size(name):
    return int(name[len("hugepages-"):-len("kB")]) << 10


def _read(path):
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""
