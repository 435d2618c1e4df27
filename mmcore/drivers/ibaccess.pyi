import enum
from collections.abc import Collection

from .umem import IBUmem

class IB_ACCESS(enum.IntFlag):
    LOCAL_WRITE = 0x1
    REMOTE_WRITE = 0x2
    REMOTE_READ = 0x4
    REMOTE_ATOMIC = 0x8
    MW_BIND = 0x10
    ZERO_BASED = 0x20
    ON_DEMAND = 0x40
    HUGETLB = 0x80
    FLUSH_GLOBAL = 0x100
    FLUSH_PERSISTENT = 0x200
    RELAXED_ORDERING = 0x100000

def ib_access_writable(access: int) -> bool: ...
def ib_check_mr_access(access: int) -> IB_ACCESS: ...
def ib_umem_check_rereg(umem: IBUmem, flags_changed: Collection[str], access: int) -> None: ...
