"""A real Linux machine: buffers, what backs them, limits, and the kernel's own counts.

    with live.buffer("256M", backing="thp") as buf:
        snapshot = live.capture(buf)
        print(snapshot.backing())
        with snapshot.replay() as engine:
            mmcore.grab_pages(engine.pages)

A capture is read once and reported many ways, here or from its file on any machine: capture.backing(), and by the
modules types (pages by their flags), picture (physical memory and folios as cells and boxes; plot draws them), frag
(free memory), diff (two captures), pins (who holds pins).

/proc/kpagecount is how often a page is mapped; no file shows _refcount or _pincount.
Whatever this machine cannot answer raises NotPossible with the reason and the remedy.
"""

from . import diff, frag, picture, pins, plot, types
from .backing import Backing
from .buffer import BACKINGS, Buffer, buffer
from .capture import Capture, capture
from .errors import NotPossible
from .frames import Frames
from .iouring import KernelRegister, Prediction, kernel_register, predict_iouring_pins
from .limits import Limits, limits
from .longterm import Longterm, why_not_longterm
from .machine import Machine
from .mapped import MappingBacking
from .preflight import Charge, Preflight, preflight
from .replay import Replay
from .thp import why_not_huge
from .units import format_size, parse_size
from .vma import Vma, vmas
from .vmstat import foll_pins, vmstat

__all__ = [
    "BACKINGS", "Backing", "Buffer", "Capture", "Charge", "Frames", "KernelRegister", "Limits",
    "Longterm", "Machine", "MappingBacking", "NotPossible", "Prediction", "Preflight", "Replay", "Vma",
    "buffer", "capture", "diff", "foll_pins", "format_size", "frag", "kernel_register", "limits",
    "parse_size", "picture", "pins", "plot", "predict_iouring_pins", "preflight", "types", "vmas",
    "vmstat", "why_not_huge", "why_not_longterm",
]
