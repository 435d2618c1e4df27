from typing import Final

import numpy as np
from numpy.typing import NDArray

from .mm import MM

HMM_PFN_VALID: Final = 0x8000000000000000
HMM_PFN_WRITE: Final = 0x4000000000000000
HMM_PFN_ERROR: Final = 0x2000000000000000
HMM_PFN_REQ_FAULT: Final = 0x8000000000000000
HMM_PFN_REQ_WRITE: Final = 0x4000000000000000
HMM_PFN_DMA_MAPPED: Final = 0x1000000000000000
HMM_PFN_P2PDMA: Final = 0x800000000000000
HMM_PFN_P2PDMA_BUS: Final = 0x400000000000000

def hmm_range_fault(mm: MM, start: int, nr_pages: int, default_flags: int = 0, *, hmm_pfns: NDArray[np.uint64] | None = None, pfn_flags_mask: int = 0) -> NDArray[np.uint64]: ...
def hmm_pfn_to_map_order(word: int) -> int: ...
def hmm_pfn_to_pfn(word: int) -> int: ...
