"""Names and numbers of VFIO's user interface, as far as type1 has them.

Units: DIRTY_BITMAP_SIZE_MAX, DIRTY_BITMAP_BYTES: bytes; *_MAX: pages or entries.
Raises: TypeError.
Threads: constants.
Kernel: include/uapi/linux/vfio.h.
"""
import enum

__all__ = ["VFIO_DMA_MAP", "VFIO_DMA_UNMAP", "VFIO_DIRTY_PAGES", "IOMMU", "VFIO_TYPE1_IOMMU", "VFIO_SPAPR_TCE_IOMMU",
           "VFIO_TYPE1v2_IOMMU", "VFIO_DMA_CC_IOMMU", "VFIO_EEH", "VFIO_TYPE1_NESTING_IOMMU", "VFIO_SPAPR_TCE_v2_IOMMU",
           "VFIO_NOIOMMU_IOMMU", "VFIO_UNMAP_ALL", "VFIO_UPDATE_VADDR", "VFIO_DMA_MAP_FLAG_READ", "VFIO_DMA_MAP_FLAG_WRITE",
           "VFIO_DMA_MAP_FLAG_VADDR", "VFIO_DMA_UNMAP_FLAG_GET_DIRTY_BITMAP", "VFIO_DMA_UNMAP_FLAG_ALL",
           "VFIO_DMA_UNMAP_FLAG_VADDR", "VFIO_IOMMU_DIRTY_PAGES_FLAG_START", "VFIO_IOMMU_DIRTY_PAGES_FLAG_STOP",
           "VFIO_IOMMU_DIRTY_PAGES_FLAG_GET_BITMAP", "IOMMU_READ", "IOMMU_WRITE", "IOMMU_CACHE", "VFIO_BATCH_MAX_CAPACITY",
           "VFIO_IOMMU_TLB_SYNC_MAX", "VFIO_PIN_PAGES_MAX_ENTRIES", "DIRTY_BITMAP_PAGES_MAX", "DIRTY_BITMAP_SIZE_MAX",
           "DIRTY_BITMAP_BYTES"]

VFIO_TYPE1_IOMMU = 1
VFIO_SPAPR_TCE_IOMMU = 2
VFIO_TYPE1v2_IOMMU = 3
VFIO_DMA_CC_IOMMU = 4
VFIO_EEH = 5
VFIO_TYPE1_NESTING_IOMMU = 6        # reserved by now; still opens as v2
VFIO_SPAPR_TCE_v2_IOMMU = 7
VFIO_NOIOMMU_IOMMU = 8
VFIO_UNMAP_ALL = 9
VFIO_UPDATE_VADDR = 10


class VFIO_DMA_MAP(enum.IntFlag):
    """Name the flags of VFIO_IOMMU_MAP_DMA."""
    FLAG_READ = 1               # the device may read
    FLAG_WRITE = 2              # the device may write
    FLAG_VADDR = 4              # a new address for a mapping whose address was invalidated


class VFIO_DMA_UNMAP(enum.IntFlag):
    """Name the flags of VFIO_IOMMU_UNMAP_DMA."""
    FLAG_GET_DIRTY_BITMAP = 1
    FLAG_ALL = 2                # every mapping; iova and size are 0
    FLAG_VADDR = 4              # invalidate addresses only; nothing is unmapped


class VFIO_DIRTY_PAGES(enum.IntFlag):
    """Name the flags of VFIO_IOMMU_DIRTY_PAGES."""
    FLAG_START = 1
    FLAG_STOP = 2
    FLAG_GET_BITMAP = 4


class IOMMU(enum.IntFlag):
    """Name the protection bits of mappings and of external pins."""
    READ = 1
    WRITE = 2
    CACHE = 4


VFIO_DMA_MAP_FLAG_READ = VFIO_DMA_MAP.FLAG_READ
VFIO_DMA_MAP_FLAG_WRITE = VFIO_DMA_MAP.FLAG_WRITE
VFIO_DMA_MAP_FLAG_VADDR = VFIO_DMA_MAP.FLAG_VADDR
VFIO_DMA_UNMAP_FLAG_GET_DIRTY_BITMAP = VFIO_DMA_UNMAP.FLAG_GET_DIRTY_BITMAP
VFIO_DMA_UNMAP_FLAG_ALL = VFIO_DMA_UNMAP.FLAG_ALL
VFIO_DMA_UNMAP_FLAG_VADDR = VFIO_DMA_UNMAP.FLAG_VADDR
VFIO_IOMMU_DIRTY_PAGES_FLAG_START = VFIO_DIRTY_PAGES.FLAG_START
VFIO_IOMMU_DIRTY_PAGES_FLAG_STOP = VFIO_DIRTY_PAGES.FLAG_STOP
VFIO_IOMMU_DIRTY_PAGES_FLAG_GET_BITMAP = VFIO_DIRTY_PAGES.FLAG_GET_BITMAP
IOMMU_READ, IOMMU_WRITE, IOMMU_CACHE = IOMMU.READ, IOMMU.WRITE, IOMMU.CACHE

VFIO_BATCH_MAX_CAPACITY = 512       # pointers in a page of 4 KiB; larger pages hold more
VFIO_IOMMU_TLB_SYNC_MAX = 512       # regions unmapped before a flush
VFIO_PIN_PAGES_MAX_ENTRIES = 512    # PFNs in a page of 4 KiB; larger pages hold more
DIRTY_BITMAP_PAGES_MAX = 2**31 - 1
DIRTY_BITMAP_SIZE_MAX = 256 << 20


def DIRTY_BITMAP_BYTES(npages: int) -> int:
    """Return the bytes of a dirty bitmap of npages: whole words of 64 bits."""
    return (npages + 63) // 64 * 8
