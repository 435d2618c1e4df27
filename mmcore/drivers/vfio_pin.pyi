from typing import Final

from ..core.iommu import IOMMUDomain
from ..core.mm import MM
from .vfio_dma import VFIODma

ACQUIRES: Final[dict[str, int]]
RELEASES: Final[dict[str, int]]

def vfio_pin_map_dma(dma: VFIODma, domains: list[IOMMUDomain], acquire: int, release: int, one_page: bool, remember: bool,
                     call: str, current: MM | None = None) -> None: ...
def vfio_replay(dma: VFIODma, domains: list[IOMMUDomain], new: IOMMUDomain, call: str) -> None: ...
