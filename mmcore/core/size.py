"""Sizes in bytes, as int or as "4K", "2M", "1G", "1T"."""
import operator
import re
from fractions import Fraction

from .errors import InvalidArgument

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_PATTERN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*\Z", re.IGNORECASE)


def parse_size(size, what="size"):
    """Return a size in bytes, given an int or a string such as "4K", "2M", "1.5G".

    Raises InvalidArgument when it is negative, no whole number of bytes, or no size at all.
    """
    if isinstance(size, str):
        match = _PATTERN.match(size)
        if not match:
            raise InvalidArgument(f'{what} {size!r} is no size; write bytes as an int, or "4K", "2M", "1G", "1T"')
        number, unit = match.groups()
        scaled = Fraction(number) * _UNITS[unit.upper()]
        if scaled.denominator != 1:
            raise InvalidArgument(f"{what} {size!r} is not a whole number of bytes")
        return int(scaled)
    if isinstance(size, bool):
        raise TypeError(f"{what} must be a number of bytes or a string, not {size!r}")
    value = operator.index(size)
    if value < 0:
        raise InvalidArgument(f"{what} {value} is negative")
    return value


def format_size(nbytes):
    """Return the shortest exact spelling of a number of bytes: 2097152 -> "2M"."""
    for unit in ("T", "G", "M", "K"):
        if nbytes and nbytes % _UNITS[unit] == 0:
            return f"{nbytes // _UNITS[unit]}{unit}"
    return str(nbytes)
