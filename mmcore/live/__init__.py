"""A real Linux machine: buffers, what backs them, limits, and the kernel's own counts.

    with live.buffer("256M", backing="thp") as buf:
        snapshot = live.capture(buf)
        print(snapshot.backing())
        with snapshot.replay() as engine:
            mmcore.grab_pages(engine.pages)

/proc/kpagecount is how often a page is mapped; no file shows _refcount or _pincount.
Whatever this machine cannot answer raises NotPossible with the reason and the remedy.
"""

from .backing import Backing
from .buffer import BACKINGS, Buffer, buffer
from .capture import Capture, capture
from .errors import NotPossible
from .iouring import KernelRegister, Prediction, kernel_register, predict_iouring_pins
from .limits import Limits, limits
from .longterm import Longterm, why_not_longterm
from .preflight import Charge, Preflight, preflight
from .replay import Replay
from .units import format_size, parse_size
from .vma import Vma, vmas, why_not_huge
from .vmstat import foll_pins, vmstat

__all__ = [
    "BACKINGS", "Backing", "Buffer", "Capture", "Charge", "KernelRegister", "Limits", "Longterm",
    "NotPossible", "Prediction", "Preflight", "Replay", "Vma", "buffer", "capture", "foll_pins",
    "format_size", "kernel_register", "limits", "parse_size", "predict_iouring_pins",
    "preflight", "vmas", "vmstat", "why_not_huge", "why_not_longterm",
]
