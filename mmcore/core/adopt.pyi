import numpy as np
from numpy.typing import NDArray

from .mm import MM

def adopt(self: MM, addr: int, pfns: NDArray[np.uint64], leaves: NDArray[np.integer], exclusive: NDArray[np.bool_],
          anon: NDArray[np.bool_] | None = None) -> int: ...
