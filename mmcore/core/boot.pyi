from typing import Literal, NamedTuple

from .memory import _Size

_DeviceType = Literal["generic", "fsdax", "coherent", "private", "pci_p2pdma"]

class DevicePages:
    size: int
    type: _DeviceType
    align: int
    compound: bool
    def __init__(self, size: _Size, type: _DeviceType = "generic", align: _Size = "4K", compound: bool = True) -> None: ...

class DeviceRegion(NamedTuple):
    start_pfn: int
    nr_pages: int
    type: _DeviceType
    align: int
    compound: bool
