"""Which IOVAs a container may map: what all of its domains translate, without what any of them reserves.

Windows are (first, last), both inside, sorted and apart: (0, 2^64 - 1) is all of them.
"""
ALL = [(0, 2**64 - 1)]


def intersect(one, two):
    """Return what both lists of windows hold."""
    out = []
    for first, last in one:
        out += [(max(first, a), min(last, b)) for a, b in two if a <= last and b >= first]
    return sorted(out)


def without(windows, first, last):
    """Return the windows without [first, last]."""
    out = []
    for a, b in windows:
        if last < a or first > b:
            out.append((a, b))
            continue
        if a < first:
            out.append((a, first - 1))
        if b > last:
            out.append((last + 1, b))
    return out


def excluded(domain):
    """Return the regions of a domain that must not be mapped: all but "direct-relaxable" ones."""
    return [(first, last) for first, last, kind in domain.reserved if kind != "direct-relaxable"]


def windows_of(domains):
    """Return the windows of a container with these domains; empty when nothing is left."""
    windows = ALL
    for domain in domains:
        windows = intersect(windows, domain.windows)
    for domain in domains:
        for region in excluded(domain):
            windows = without(windows, *region)
    return windows


def inside(windows, first, last):
    """Is all of [first, last] in one window? Two that touch are two."""
    return any(a <= first and last <= b for a, b in windows)


def free_iova(windows, taken, size, align):
    """Return the lowest IOVA, a multiple of align, where size bytes are free inside one window; None.

    taken: [(first, last)] in order. All in numbers without an end: aligning up never wraps.
    """
    for first, last in windows:
        at = -(-first // align) * align
        for a, b in taken:
            if b < at:
                continue
            if a > at + size - 1:
                break
            at = -(-(b + 1) // align) * align
        if at + size - 1 <= last:
            return at
    return None
