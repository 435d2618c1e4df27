import enum
from typing import Final

from typing_extensions import disjoint_base

from .iommu import IOMMUDomain
from .memory import Memory
from .scatterlist import SGTable

@disjoint_base
class Device:
    def __init__(self, mem: Memory, *, max_seg_size: int = 65536, seg_boundary_mask: int = 0xffffffff,
                 iommu: bool | IOMMUDomain = False, dma_mask: int = 0xffffffffffff) -> None: ...
    def check(self, sgt: SGTable) -> list[str]: ...
    @property
    def max_seg_size(self) -> int: ...
    @property
    def seg_boundary_mask(self) -> int: ...
    @property
    def dma_mask(self) -> int: ...
    @property
    def iommu(self) -> bool: ...
    @property
    def iova_ranges(self) -> list[tuple[int, int]]: ...
    @property
    def mem(self) -> Memory: ...
    @property
    def domain(self) -> IOMMUDomain | None: ...
    @property
    def mappings(self) -> int: ...

class DMA(enum.IntEnum):
    BIDIRECTIONAL = 0
    TO_DEVICE = 1
    FROM_DEVICE = 2

DMA_BIDIRECTIONAL: Final = DMA.BIDIRECTIONAL
DMA_TO_DEVICE: Final = DMA.TO_DEVICE
DMA_FROM_DEVICE: Final = DMA.FROM_DEVICE
DMA_MAPPING_ERROR: Final = 0xffffffffffffffff

def dma_map_sgtable(device: Device, sgt: SGTable, direction: int = ...) -> int: ...
def dma_unmap_sgtable(device: Device, sgt: SGTable, direction: int | None = None) -> None: ...
