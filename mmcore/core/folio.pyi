import enum
from typing import Final

from .memory import Folio, Page

class FOLL(enum.IntFlag):
    WRITE = 0x1
    GET = 0x2
    DUMP = 0x4
    FORCE = 0x8
    NOWAIT = 0x10
    NOFAULT = 0x20
    HWPOISON = 0x40
    ANON = 0x80
    LONGTERM = 0x100
    SPLIT_PMD = 0x200
    PCI_P2PDMA = 0x400
    INTERRUPTIBLE = 0x800
    HONOR_NUMA_FAULT = 0x1000
    TOUCH = 0x10000
    TRIED = 0x20000
    REMOTE = 0x40000
    PIN = 0x80000
    FAST_ONLY = 0x100000
    UNLOCKABLE = 0x200000
    MADV_POPULATE = 0x400000

GUP_PIN_COUNTING_BIAS: Final = 0x400
FOLL_WRITE: Final = FOLL.WRITE
FOLL_GET: Final = FOLL.GET
FOLL_DUMP: Final = FOLL.DUMP
FOLL_FORCE: Final = FOLL.FORCE
FOLL_NOWAIT: Final = FOLL.NOWAIT
FOLL_NOFAULT: Final = FOLL.NOFAULT
FOLL_HWPOISON: Final = FOLL.HWPOISON
FOLL_ANON: Final = FOLL.ANON
FOLL_LONGTERM: Final = FOLL.LONGTERM
FOLL_SPLIT_PMD: Final = FOLL.SPLIT_PMD
FOLL_PCI_P2PDMA: Final = FOLL.PCI_P2PDMA
FOLL_INTERRUPTIBLE: Final = FOLL.INTERRUPTIBLE
FOLL_HONOR_NUMA_FAULT: Final = FOLL.HONOR_NUMA_FAULT
FOLL_TOUCH: Final = FOLL.TOUCH
FOLL_TRIED: Final = FOLL.TRIED
FOLL_REMOTE: Final = FOLL.REMOTE
FOLL_PIN: Final = FOLL.PIN
FOLL_FAST_ONLY: Final = FOLL.FAST_ONLY
FOLL_UNLOCKABLE: Final = FOLL.UNLOCKABLE
FOLL_MADV_POPULATE: Final = FOLL.MADV_POPULATE

def folio_get(folio: Folio) -> None: ...
def folio_put(folio: Folio) -> None: ...
def folio_put_refs(folio: Folio, refs: int) -> None: ...
def folio_try_get(folio: Folio) -> bool: ...
def folio_ref_freeze(folio: Folio, count: int) -> bool: ...
def folio_ref_unfreeze(folio: Folio, count: int) -> None: ...
def get_page(page: Page) -> None: ...
def put_page(page: Page) -> None: ...
def try_grab_folio(folio: Folio, refs: int, flags: int = ...) -> None: ...
def folio_add_pin(folio: Folio) -> None: ...
def folio_add_pins(folio: Folio, n: int) -> None: ...
def folio_split(folio: Folio, new_order: int = 0) -> list[Folio]: ...
def zone_device_page_init(page: Page) -> None: ...
