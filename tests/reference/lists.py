"""Scatterlists in plain Python, after the specification: counts first, then fills, chunk by chunk. Slow and obvious.

A table is a list of chunks, a chunk a list of slots; a slot is None (spare), "link", or [pfn, offset, length].
"""


from . import Refused


class Table:
    def __init__(self, page=4096, device_starts=()):
        self.page, self.max_ents, self.device_starts = page, page // 32, set(device_starts)
        self.chunks, self.nents, self.closed = [], 0, False
        self.total_nents = 0

    # -- looking
    def slots(self):
        """Slots that can hold entries, in order."""
        return [(c, s) for c, chunk in enumerate(self.chunks) for s, slot in enumerate(chunk) if slot != "link"]

    def entries(self):
        return [tuple(self.chunks[c][s]) for c, s in self.slots()[:self.nents]]

    def sizes(self):
        return [len(chunk) for chunk in self.chunks]

    def mergeable(self, after, before):
        return after == before + 1 and after not in self.device_starts

    # -- appending
    def append(self, pages, offset, size, max_segment, left):
        most = max_segment - max_segment % self.page
        if most < self.page or not pages or not 0 <= offset < self.page:
            raise Refused
        span = len(pages) * self.page
        if not span - self.page < offset + size <= span or (left and offset + size != span) or (self.nents and offset):
            raise Refused
        pages = list(pages)
        tail = span - offset - size
        last = None
        merged = 0
        if self.nents:
            c, s = self.slots()[self.nents - 1]
            last = self.chunks[c][s]
            end = last[1] + last[2]
            if end % self.page == 0:
                before = last[0] + end // self.page - 1
                while merged < len(pages) and self.mergeable(pages[merged], before) \
                        and end + (merged + 1) * self.page <= most:
                    before = pages[merged]
                    merged += 1
        rest = pages[merged:]
        # Count the entries: where does a new one start?
        starts = [i for i in range(len(rest)) if i == 0]
        for i in range(1, len(rest)):
            if not self.mergeable(rest[i], rest[i - 1]) or (i - starts[-1]) * self.page >= most:
                starts.append(i)
        fresh = []
        for k, i in enumerate(starts):
            stop = starts[k + 1] if k + 1 < len(starts) else len(rest)
            fresh.append([rest[i], offset, (stop - i) * self.page - offset])
            offset = 0
        if fresh and self.closed:
            raise Refused
        # Place them: the last slot of a chunk is for a link unless this is the very last entry.
        chunks = [list(chunk) for chunk in self.chunks]
        at = None
        if self.nents:
            at = self.slots()[self.nents - 1]
        for k, entry in enumerate(fresh):
            need = len(fresh) - k + left
            if at is not None and (at[1] + 1 < len(chunks[at[0]]) - 1 or (need == 1 and at[1] + 1 < len(chunks[at[0]]))):
                at = (at[0], at[1] + 1)
            else:
                if at is not None:
                    if len(chunks[at[0]]) < self.max_ents:
                        raise Refused           # the kernel links here and leaks when it frees
                    chunks[at[0]][at[1] + 1] = "link"
                chunks.append([None] * min(need, self.max_ents))
                at = (len(chunks) - 1, 0)
            chunks[at[0]][at[1]] = entry
        # Nothing failed: make it so.
        if merged:
            last[2] += merged * self.page
            for c, chunk in enumerate(self.chunks):
                for s, slot in enumerate(chunk):
                    if slot is last:
                        chunks[c][s] = last
        self.chunks = chunks
        self.nents += len(fresh)
        c, s = self.slots()[self.nents - 1]
        self.chunks[c][s][2] -= tail
        self.total_nents = sum(self.sizes()) - (len(self.chunks) - 1 if self.chunks else 0)
        if left == 0:
            self.closed = True


def geometry(n, max_ents=128, first=0):
    """Chunk sizes of a table of n entries (sg_alloc_table)."""
    sizes, limit = [], first or max_ents
    while n > limit:
        sizes.append(limit)
        n -= limit - 1
        limit = max_ents
    return sizes + [n]


def pages_of(entries, page=4096):
    """PFNs of every page that the bytes of the entries touch."""
    out = []
    for pfn, offset, length in entries:
        if length:
            out += range(pfn + offset // page, pfn + (offset + length - 1) // page + 1)
    return out


def bytes_of(entries, page=4096):
    """(pfn, offset) runs of every byte, as physical addresses: a list of (address, length)."""
    return [(pfn * page + offset, length) for pfn, offset, length in entries if length]


def cut(entries, skip, size, page=4096):
    """The bytes [skip, skip + size) of a list as physical (address, length) runs."""
    out = []
    for at, length in bytes_of(entries, page):
        here = max(0, min(length, skip))
        skip -= here
        at, length = at + here, length - here
        take = min(length, size)
        if take:
            out.append((at, take))
            size -= take
    if size:
        raise Refused
    return out


def join(runs):
    """Merge runs that touch."""
    out = []
    for at, length in runs:
        if out and out[-1][0] + out[-1][1] == at:
            out[-1] = (out[-1][0], out[-1][1] + length)
        else:
            out.append((at, length))
    return out


def dma_segments(entries, page, max_seg, boundary):
    """Segments of an IOMMU mapping as (offset in the range, length), and the size of the range."""
    used, segments, is_open = 0, [], False
    for pfn, offset, length in entries:
        if not length:
            continue                        # an empty entry takes no room
        start = offset % page
        padded = -(-(start + length) // page) * page
        room = -used % (boundary + 1)
        if room and room < padded:
            used += room
            is_open = False
        if is_open and start == 0 and used & boundary and segments[-1][1] + length <= max_seg:
            segments[-1] = (segments[-1][0], segments[-1][1] + length)
        else:
            segments.append((used + start, length))
        is_open = start + length == padded
        used += padded
    return segments, used
