"""What a verb looks at: a PID, or a capture file of this or another machine."""

import argparse
import os

from .progress import progress
from .register import _address, _positive, _size


def add_target(parser, required=True, otherwise=""):
    """Declare PID or FILE, and the part of a process to look at."""
    parser.add_argument("target", nargs=None if required else "?", metavar="PID|FILE",
                        help="a process, or a file written by mmcore capture" + otherwise)
    add_part(parser)


def add_part(parser):
    """Declare the options that choose a part of a process."""
    parser.add_argument("--addr", type=_address, help="only this range of the process; with --length")
    parser.add_argument("--length", type=_size, help="bytes, or 4K, 256M, 1G")
    parser.add_argument("--vma", type=which, metavar="heap|stack|N",
                        help="only this mapping: the heap, the stack, or line N of /proc/PID/maps")


def which(text):
    """Return "heap", "stack" or a line number."""
    if text in ("heap", "stack"):
        return text
    try:
        return _positive(text)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"heap, stack or a line number of /proc/PID/maps, not {text!r}") from None


def is_pid(text):
    """Tell whether a target is meant as a PID: digits are; a file called so is written ./123."""
    return text is not None and text.isascii() and text.isdigit()


def check_part(args, pid):
    """End with a usage error where the options that choose a part do not fit together."""
    if (args.addr is None) != (args.length is None):
        args.usage_error("--addr and --length go together")
    if args.vma is not None and args.addr is not None:
        args.usage_error("--vma or --addr, not both")
    if pid is None and (args.addr is not None or args.vma is not None):
        args.usage_error("--addr, --length and --vma choose a part of a process: they need a PID")


def open_target(args, memory=False):
    """Return the Capture of the target. Raises what live.capture() and Capture.load() raise."""
    from mmcore.live.capture import Capture

    pid = None
    if is_pid(args.target):
        pid = int(args.target)
        if pid == 0:
            args.usage_error("a PID is above 0")
    check_part(args, pid)
    if pid is None:
        return Capture.load(args.target)
    return capture_process(pid, args, memory)


def capture_process(pid, args, memory=False, names=True):
    """Capture the chosen part of a process, with a progress bar."""
    from mmcore.live.capture import capture
    from mmcore.live.vma import find_vma

    addr, length = args.addr, args.length
    if args.vma is not None:
        mapping = find_vma(pid, args.vma)
        addr, length = mapping.start, mapping.end - mapping.start
    with progress() as show:
        return capture(pid, addr, length, memory=memory, names=names, progress=show)


def describe(capture):
    """Return the first line of a report: what was looked at, and when."""
    import time

    from mmcore.live.units import format_size

    parts = []
    if capture.pid:
        parts.append(f"process {capture.pid}: {format_size(capture.length)} looked at in {len(capture.vmas)} "
                     f"mapping{'' if len(capture.vmas) == 1 else 's'}")
    if capture.frames is not None:
        parts.append(f"{len(capture.frames)} frames of the machine")
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(capture.when))
    return f"{', '.join(parts) or 'nothing'}; Linux {capture.kernel or 'unknown'}, {when}"


def partial_fields(capture):
    """Return (name, text) rows that say what a capture is missing."""
    return [("partial", text) for text in capture.partial]


def heading(capture):
    """Return what every report says of its capture, as plain data."""
    return {"pid": capture.pid, "kernel": capture.kernel, "when": capture.when, "page_size": capture.page_size,
            "length": capture.length, "moved": capture.moved, "partial": capture.partial,
            "frames": 0 if capture.frames is None else len(capture.frames)}


def existing_folder(path):
    """Raise OSError before the work is done where the file could not be written after it."""
    if os.path.isdir(os.path.abspath(path)):
        raise IsADirectoryError(21, "that is a folder; name a file to write", path)
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder):
        raise FileNotFoundError(2, "there is no such folder to write the file to; make it first", path)
