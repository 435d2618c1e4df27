"""The get and pin families: one call from its arguments to its result. gup_walk.pxd says how the parts fit together.

For code above (drivers): begin a sink, call gup_pages without the GIL, and take what the sink made. mm_t.exited is checked
under mmap_lock; the Memory must stay open (Memory.enter), and the MM alive.
"""
from libc.stdint cimport int64_t, uint64_t
from mmcore.core.gup_walk cimport gup_t
from mmcore.core.output cimport gup_output_t
from mmcore.core.space cimport mm_t

cdef int64_t gup_pages(gup_t *w, mm_t *mm, uint64_t start, uint64_t nr_pages, unsigned flags, bint fast, bint page_by_page,
                       gup_output_t *out) noexcept nogil
    # pages that `out` took, or a negative errno with w.why; 0 with WHY_NOWAIT, or for FOLL_FAST_ONLY.
    # -EINTR: a Python exception is set, and what `out` took is the caller's to give back
