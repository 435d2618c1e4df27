"""Capture files: a zip of plain arrays (.npz), one of which is a JSON text. Nothing in them is executed or trusted.

Before anything is unpacked, the directory of the zip must name exactly the expected members, and what they say they
unpack to must fit into memory: a small file cannot ask for all of it.
"""

import ast
import json
import os
import stat
import struct
import zipfile
import zlib

import numpy as np

from .limits import Limits, available_memory
from .machine import Machine
from .pagemap import KPF_NOPAGE, MAX_ORDER, PM_PRESENT, has_flag, overlapping, pfns_of
from .units import format_size
from .vma import clean

FORMAT = "mmcore-capture"
VERSION = 2
WORD, BYTE = np.dtype("<u8"), np.dtype("u1")
PAGES = {"words": WORD, "flags": WORD, "mapcounts": WORD, "heads": WORD, "orders": BYTE, "leaves": BYTE}
ARRAYS = {"starts": WORD, "counts": WORD, **PAGES, "sizes": WORD, "frame_flags": WORD, "frame_mapcounts": WORD}
KINDS = {"info": BYTE, **ARRAYS}       # info: the description, as JSON
MAX_PAGES = 1 << 27          # 512 GiB of 4 KiB pages: 4 GiB of arrays
MAX_FRAMES = 1 << 32         # 16 TiB of 4 KiB frames
MAX_INFO = 256 << 20         # bytes of JSON: a million mappings
MAX_HEADER = 4096            # bytes of an array's header
UNKNOWN_ROOM = 8 << 30       # bytes a capture may unpack to where this system does not say what is available
TOP = 1 << 64
DAMAGE = (zipfile.BadZipFile, zipfile.LargeZipFile, zlib.error, EOFError, KeyError, TypeError, AttributeError,
          IndexError, ValueError, OverflowError, RecursionError, NotImplementedError, struct.error, SyntaxError)


def save(path, info, arrays):
    """Write a capture file; it appears whole or not at all. Raises OSError."""
    text = json.dumps({"format": FORMAT, "version": VERSION, **info}).encode()
    arrays = {"info": np.frombuffer(text, BYTE), **arrays}
    part = f"{os.fspath(path)}.part{os.getpid()}"
    try:
        with zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as whole:
            for name, kind in KINDS.items():
                with whole.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, np.asarray(arrays[name], kind), version=(1, 0),
                                              allow_pickle=False)
        os.replace(part, path)
    finally:
        if os.path.exists(part):
            os.unlink(part)


def load(path):
    """Read a capture file: (info, arrays), checked. Raises FileNotFoundError, or ValueError saying what is wrong."""
    try:
        with open(path, "rb", opener=regular) as file, zipfile.ZipFile(file) as whole:
            sizes = members(whole)
            if sizes["info.npy"] > MAX_INFO:
                raise ValueError(f"{format_size(sizes['info.npy'])} of description")
            info = cleaned(json.loads(read_array(whole, "info.npy", BYTE, sizes["info.npy"]).tobytes()))
            if info["format"] != FORMAT:
                raise KeyError("format")
            if info["version"] != VERSION:
                raise Refused(f"capture version {info['version']!r}, this mmcore reads {VERSION}; "
                              "use the mmcore that wrote it")
            room, needed = available_memory(), sum(sizes.values())
            room = UNKNOWN_ROOM if room is None else room
            if needed > room:
                raise Refused(f"the capture unpacks to {format_size(needed)}, and {format_size(room)} of memory is "
                              "available; load it on a larger machine")
            arrays = {name: read_array(whole, f"{name}.npy", kind, sizes[f"{name}.npy"])
                      for name, kind in ARRAYS.items()}
            check(info, arrays)
            return info, arrays
    except Refused as error:
        raise ValueError(f"{path}: {error}") from None
    except MemoryError:
        raise ValueError(f"{path}: the capture does not fit into memory; load it on a larger machine") from None
    except DAMAGE as error:
        said = " ".join(str(error).split())[:100] or type(error).__name__
        raise ValueError(f"{path}: not a whole mmcore capture ({said}); it is truncated, damaged or another kind of "
                         "file: capture again") from None


def regular(path, flags):
    """Open a path for open(). Raises Refused for what is no regular file: a device may have no end, a pipe no writer."""
    fd = os.open(path, flags | os.O_NONBLOCK)
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):       # open() says what a folder is
        os.close(fd)
        raise Refused("no regular file, which captures are")
    return fd


class Refused(Exception):
    """A capture file that is whole, but not for this mmcore or this machine."""


def cleaned(value):
    """Return JSON data without control characters in its texts: they are printed, and a terminal would obey them."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, list):
        return [cleaned(one) for one in value]
    if isinstance(value, dict):
        return {clean(key): cleaned(one) for key, one in value.items()}
    return value


def members(whole):
    """Return the sizes of the members when unpacked. Raises ValueError where others than the expected are there."""
    sizes = {}
    for member in whole.infolist():
        if member.filename in sizes or member.flag_bits & 1:
            raise ValueError(f"member {member.filename[:40]!r} is there twice or encrypted")
        sizes[member.filename] = member.file_size
    expected = {f"{name}.npy" for name in KINDS}
    if set(sizes) != expected:
        odd = sorted(set(sizes) ^ expected)[0]
        raise ValueError(f"member {odd[:40]!r} is missing or unknown")
    return sizes


def read_array(whole, member, kind, size):
    """Read one array, told by its header to be of this kind and by the zip's directory to be of this size."""
    with whole.open(member) as file:
        lead = file.read(10)
        if lead[:8] != b"\x93NUMPY\x01\x00":
            raise ValueError(f"{member} is no array")
        length = int.from_bytes(lead[8:10], "little")
        if length > MAX_HEADER:
            raise ValueError(f"{member} has a header of {length} bytes")
        header = ast.literal_eval(file.read(length).decode("latin-1").strip())
        if header["descr"] not in ("<u8", "|u1") or np.dtype(header["descr"]) != kind or header["fortran_order"]:
            raise ValueError(f"{member} is an array of {header['descr']!r}, not {kind}")
        (count,) = header["shape"]
        if isinstance(count, bool) or not isinstance(count, int) or count < 0 or count > MAX_FRAMES \
                or count * kind.itemsize != size - 10 - length:
            raise ValueError(f"{member} is of another size than it says")
        array = np.empty(count, kind)
        view = memoryview(array.view(np.uint8))
        done = 0
        while done < len(view):
            got = file.readinto(view[done:])
            if not got:
                raise EOFError(f"{member} ends early")
            done += got
        if file.read(1):             # also lets the zip module compare the checksum
            raise ValueError(f"{member} is longer than it says")
    return array


def check(info, arrays):
    """Raise ValueError where the description and the arrays cannot come from a capture."""
    size = info["page_size"]
    require(whole_number(size) and 1 << 10 <= size <= 1 << 20 and not size & (size - 1), f"page size {size!r}")
    npages = len(arrays["words"])
    require(npages <= MAX_PAGES, f"{npages} pages")
    require(all(len(arrays[name]) == npages for name in PAGES), "its arrays disagree in length")
    require(len(arrays["frame_flags"]) == len(arrays["frame_mapcounts"]), "its arrays of frames disagree in length")
    require(len(arrays["sizes"]) == len(info["vmas"]) * len(info["size_names"]), "its table of sizes has another shape")
    check_info(info)
    check_ranges(arrays["starts"], arrays["counts"], npages, size)
    check_folios(arrays)


def check_info(info):
    """Raise ValueError or TypeError unless the description has every field, each of its kind."""
    for name in ("pid", "moved", "started"):
        require(whole_number(info[name]), f"{name} {info[name]!r}")
    for name in ("whole", "has_leaves"):
        require(isinstance(info[name], bool), f"{name} {info[name]!r}")
    require(isinstance(info["when"], (int, float)) and 0 <= info["when"] < 1 << 40, "its date")
    require(isinstance(info["boot"], str), "boot")
    for name in ("partial", "size_names"):
        require(isinstance(info[name], list) and all(isinstance(text, str) for text in info[name]), name)
    require(all(isinstance(key, str) and whole_number(value) for key, value in info["status"].items()), "status")
    for key, pair in info["rlimits"].items():
        require(isinstance(key, str) and len(pair) == 2 and all(n is None or whole_number(n) for n in pair), "rlimits")
    have = Limits(**info["limits"])
    require(all(n is None or whole_number(n) for n in (have.soft, have.hard)), "limits")
    require(all(map(whole_number, (have.pid, have.locked, have.pinned))), "limits")
    require(isinstance(have.cap_ipc_lock, bool), "limits")
    Machine.from_dict(info["machine"])
    require(isinstance(info["vmas"], list), "vmas")
    end = 0
    for vma in info["vmas"]:
        numbers = [vma[name] for name in ("start", "end", "offset", "inode", "kernel_page_size", "rss", "huge")]
        texts = [*(vma[name] for name in ("perms", "dev", "path")), *vma["flags"]]
        require(len(vma) == 11 and all(map(whole_number, numbers)) and all(isinstance(text, str) for text in texts)
                and len(vma["perms"]) == 4 and isinstance(vma["flags"], list), "a mapping")
        require(end <= vma["start"] < vma["end"], "its mappings overlap")
        end = vma["end"]


def check_ranges(starts, counts, npages, page_size):
    """Raise ValueError unless the ranges are whole pages, apart, in order, and as many pages as there are."""
    require(len(starts) == len(counts), "its arrays disagree in length")
    require(not np.any(counts > npages) and sum(counts.tolist()) == npages and np.all(counts > 0),
            "its arrays disagree in length")
    end = 0
    for start, count in zip(starts.tolist(), counts.tolist()):
        require(start % page_size == 0 and start >= end and start + count * page_size <= TOP, "its ranges overlap")
        end = start + count * page_size


def check_folios(arrays):
    """Raise ValueError unless every page lies in its folio, which is aligned, and holes say nothing."""
    words, flags, heads, orders = (arrays[name] for name in ("words", "flags", "heads", "orders"))
    pfns = pfns_of(words)
    hole = pfns == 0
    require(not np.any(hole & (words & PM_PRESENT != 0)), "a page is present without a frame")
    require(not np.any(hole & ((flags != 0) | (heads != 0) | (orders != 0) | (arrays["mapcounts"] != 0))),
            "a hole has a folio")
    require(not np.any(orders > MAX_ORDER), "a folio is too large")
    outside = has_flag(flags, KPF_NOPAGE) & (heads == 0) & (orders == 0)
    pages = np.uint64(1) << orders.astype(np.uint64)
    inside = (heads % pages == 0) & (heads <= pfns) & (pfns - heads < pages)
    require(np.all(inside | outside | hole), "a page lies outside its folio")
    require(not overlapping(np.where(outside, np.uint64(0), pfns), heads, orders).any(), "its folios overlap")


def whole_number(value, top=TOP):
    """Tell whether a value of the description is a count below top."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < top


def require(true, what):
    """Raise ValueError(what) unless true."""
    if not true:
        raise ValueError(f"damaged capture: {what}")
