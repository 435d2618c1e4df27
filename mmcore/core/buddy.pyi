from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from .memory import Folio, Memory, Page

_ZoneName = Literal["Normal", "Movable", "CMA"]

def folio_alloc(mem: Memory, order: int, *, zone: _ZoneName | None = None, hugetlb: bool = False) -> Folio: ...
def alloc_page(mem: Memory) -> Page: ...
def folio_alloc_at(mem: Memory, pfn: int, order: int, *, hugetlb: bool = False) -> Folio: ...

def folios_alloc_at(mem: Memory, pfns: Sequence[int] | NDArray[np.uint64], orders: Sequence[int] | NDArray[np.integer] | int, *,
                    hugetlb: Sequence[bool] | NDArray[np.bool_] | bool = False) -> list[Folio]: ...
