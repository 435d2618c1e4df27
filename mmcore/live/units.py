"""Sizes as people read them: 268435456 bytes are "256 MiB"."""

from mmcore.core.errors import InvalidArgument
from mmcore.core.size import parse_size as _parse_size


def parse_size(size, what="size"):
    """Return a size above 0 in bytes from an int or from "4K", "2M", "1.5G".

    Raises InvalidArgument (a ValueError) otherwise.
    """
    value = _parse_size(size, what)
    if not 0 < value < 1 << 63:
        raise InvalidArgument(f"{what} {size!r} is {value} bytes; it must lie between 1 and 2**63 - 1")
    return value


def format_size(nbytes):
    """Return bytes as text in the largest binary unit that fits: "256 MiB", "1.50 GiB"."""
    for unit, shift in (("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if nbytes >= 1 << shift:
            value = nbytes / (1 << shift)
            return f"{value:.0f} {unit}" if nbytes % (1 << shift) == 0 else f"{value:.2f} {unit}"
    return f"{nbytes} B"


def round_up(value, unit):
    """Return value rounded up to a multiple of unit."""
    return -(-value // unit) * unit
