"""Setting files up: which pool, which device, how much room."""
from libc.errno cimport ENOMEM
from libc.stdint cimport uint64_t
from mmcore.core.buddy cimport alloc_frames
from mmcore.core.file cimport File
from mmcore.core.filemap cimport cache_fill, file_room
from mmcore.core.pgtable cimport *
from mmcore.core.space cimport *

import errno as _errno

from .errors import InvalidArgument, MMError
from .file import KIND_NAMES, KINDS
from .size import format_size, parse_size

__all__ = ["open_file"]

cdef device_t *device_arg(Memory mem, object device, int kind) except? NULL:
    """One of mem.devices, by object or by index."""
    cdef int i
    cdef int wanted = <int>(DEVICE_GENERIC if kind == FILE_DEVDAX else DEVICE_FSDAX)
    if device is None and kind == FILE_PFNMAP:
        return NULL
    if device is None:
        raise InvalidArgument("a devdax or fsdax file needs device=, one of mem.devices: make the Memory with "
                              "devices=[DevicePages(...)]")
    if device in mem.devices:
        i = mem.devices.index(device)
    elif isinstance(device, int) and 0 <= device < len(mem.devices):
        i = device
    else:
        raise InvalidArgument(f"device={device!r} is none of this Memory's {len(mem.devices)} devices")
    if kind != FILE_PFNMAP and mem.m.device[i].type != wanted and not (kind == FILE_DEVDAX
                                                                    and mem.m.device[i].type == DEVICE_PCI_P2PDMA):
        raise InvalidArgument(f"{mem.devices[i]!r}: a {KIND_NAMES[kind]} file is made of a device of type "
                              f"{'generic' if kind == FILE_DEVDAX else 'fsdax'}")
    return &mem.m.device[i]

def open_file(File self not None, Memory mem not None, size, name, page_size, device):
    """Set a File up; see File(), which converts the size."""
    cdef mem_t *m = mem.ptr()
    cdef file_t *f
    cdef device_t *d = NULL
    cdef uint64_t nbytes, i, pages, pfn
    cdef unsigned order = 0
    cdef int error = 0, kind
    if name not in KINDS:
        raise InvalidArgument(f"kind={name!r} is none of {', '.join(KINDS)}")
    kind = KINDS[name]
    if page_size is not None and kind != FILE_HUGETLBFS:
        raise InvalidArgument(f"page_size= goes with hugetlbfs, not with {KIND_NAMES[kind]}")
    if kind == FILE_HUGETLBFS:
        wanted = parse_size(page_size, "page_size") if page_size is not None else (ONE << m.page_shift) << m.pmd_order
        if wanted not in mem.hugetlb_pools():
            raise InvalidArgument(f"no hugetlb pool of {format_size(wanted)} pages: make the Memory with hugetlb={{size: number}}")
        order = (wanted >> m.page_shift).bit_length() - 1
        if order != m.pmd_order and order != 2 * m.pmd_order:
            raise InvalidArgument(f"hugetlb pages of {format_size(wanted)} have no leaf of their own: only PMD and PUD sizes can be mapped")
        if size % wanted:
            raise InvalidArgument(f"size {size:#x} is no multiple of the huge page size {wanted:#x}")
    if kind in (FILE_DEVDAX, FILE_FSDAX, FILE_PFNMAP):
        d = device_arg(mem, device, kind)
    elif device is not None:
        raise InvalidArgument(f"device= goes with devdax, fsdax and pfnmap, not with {KIND_NAMES[kind]}")
    if d != NULL and size > (d.end - d.start) << m.page_shift:
        raise InvalidArgument(f"size {size:#x} is more than the device has ({(d.end - d.start) << m.page_shift:#x})")
    if d != NULL and kind == FILE_FSDAX:
        for i in range(d.start, d.end):
            if m.map[i].mapping and not page_is_tail(&m.map[i]):
                raise MMError(_errno.EBUSY, "another fsdax file has pages of this device")
    if spaces_get(m) == NULL:
        raise MemoryError()
    f = <file_t *>mem_calloc(m, 1, sizeof(file_t))
    if f == NULL:
        raise MemoryError()
    pthread_mutex_init(&f.lock, NULL)
    f.m = m
    f.kind = kind
    f.order = order
    f.device = d
    self.mem = mem
    self.kind = KIND_NAMES[kind]
    self.device = device
    self.f = f
    nbytes = size
    pages = (nbytes + (ONE << m.page_shift) - 1) >> m.page_shift
    if kind not in (FILE_DEVDAX, FILE_FSDAX) and d == NULL:
        error = file_room(f, nbytes)
    if error == 0:
        error = file_register(f)
    f.size = nbytes
    if error == 0 and kind == FILE_IOMEM:
        f.iomem_pfn = spaces_of(m).next_iomem
        spaces_of(m).next_iomem += pages
    if error == 0 and kind == FILE_PFNMAP and d == NULL:
        for i in range(pages):
            pfn = alloc_frames(m, 1, 0)
            if pfn == 0:
                error = -ENOMEM
                break
            page_init(&m.map[pfn], m.region[0].zone_flags, 1)
            cache_fill(f, i, 1)
            f.cache[i] = pfn
            f.nr_cached += 1
    if error:
        raise MMError(-error, f"no memory for a {self.kind} file of {format_size(size)}")
