"""Records are typed where they are defined; the functions here."""
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from . import diff as diff
from . import frag as frag
from . import picture as picture
from . import pins as pins
from . import plot as plot
from . import types as types
from .backing import Backing as Backing
from .buffer import Buffer as Buffer
from .capture import Capture as Capture
from .errors import NotPossible as NotPossible
from .frames import Frames as Frames
from .iouring import KernelRegister as KernelRegister
from .iouring import Prediction as Prediction
from .limits import Limits as Limits
from .longterm import Longterm as Longterm
from .machine import Machine as Machine
from .mapped import MappingBacking as MappingBacking
from .preflight import Charge as Charge
from .preflight import Preflight as Preflight
from .replay import Replay as Replay
from .vma import Vma as Vma

_Pid = int | Literal["self"]
_Backing = Literal["4k", "thp", "hugetlb", "shmem"]
_Api = Literal["RDMA", "VFIO", "io_uring"]

class _HasRange(Protocol):
    """Anything with an address and a length in bytes."""

    @property
    def addr(self) -> int: ...
    @property
    def length(self) -> int: ...

BACKINGS: Final[tuple[_Backing, ...]]

def buffer(size: int | str, backing: _Backing = "4k", *, populate: bool = True) -> Buffer: ...
def capture(target: _Pid | Literal["memory"] | _HasRange = "self", addr: int | None = None, length: int | None = None, *,
            memory: bool = False, names: bool = True, progress: Callable[[int, int, str], object] | None = None) -> Capture: ...
def foll_pins() -> tuple[int, int]: ...
def format_size(nbytes: int) -> str: ...
def kernel_register(buffer: _HasRange, rounds: int = 1, *, iovecs: Sequence[tuple[int, int]] | None = None,
                    clock: Callable[[], int] = ...) -> KernelRegister: ...
def limits(pid: _Pid = "self") -> Limits: ...
def parse_size(size: int | str, what: str = "size") -> int: ...
def predict_iouring_pins(pfns: NDArray[np.uint64], heads: NDArray[np.uint64], orders: NDArray[np.integer],
                         max_pages: int | None = None) -> Prediction: ...
def preflight(target: Capture | _HasRange | Iterable[_HasRange], *, apis: Iterable[_Api] = ...) -> Preflight: ...
def vmas(pid: _Pid = "self", start: int = 0, end: int = 18446744073709551616) -> list[Vma]: ...
def vmstat() -> dict[str, int]: ...
def why_not_huge(vma: Vma, machine: Machine | None = None, process_disabled: bool = False) -> str: ...
def why_not_longterm(capture: Capture, addr: int, *, write: bool = True) -> Longterm: ...
