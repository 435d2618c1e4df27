"""The walk under mmap_lock: VMAs are checked, missing and insufficient entries are faulted in (__get_user_pages).

Laws
    check_vma_flags asks in the kernel's order; the first refusal is the errno.
    A page is taken under the lock of the table that names it, so that it needs no second look.
    Only what is missing is faulted in, one page or leaf at a time: an error leaves the pages before it.

What an entry that is there still needs (follow_page_*)
    FOLL_WRITE          to be writable; or with FOLL_FORCE, in a private mapping that is not writable but may become so, to
                        name an exclusive anonymous page
    FOLL_PIN, reading   an anonymous page that is exclusive; with FOLL_LONGTERM no file's page, nor a zero page, in a private
                        mapping: it would be left behind by the first write. Both are unshared first
    FOLL_DUMP           not to be a hole, or zero
    FOLL_TOUCH          (granted) is marked accessed, and dirty for FOLL_WRITE
"""
from libc.stdint cimport uint64_t
from mmcore.core.gup_walk cimport gup_t

cdef void gup_slow(gup_t *w) noexcept nogil     # from w.addr on; mmap_lock is held. w.addr: how far; w.error, w.why: what ended it
