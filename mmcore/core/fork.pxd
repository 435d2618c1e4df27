"""fork: copy the tables of a process, and share its pages.

    what is mapped            child                           parent
    anonymous, not pinned     the same page, read-only        read-only, no longer exclusive
    anonymous, exclusive,     a copy, exclusive, writable     untouched: a device goes on seeing its page
      and maybe pinned
    swapped out               the same slot                   the slot is no longer exclusive
    private file              the same page, read-only        read-only
    shared file               nothing: it faults              untouched
    hugetlb, private          as anonymous memory

Laws
    MMF_HAS_PINNED gates the look at pins: a process that never pinned pays nothing for them, and copies nothing.
    write_protect_seq is odd while entries are write-protected. gup-fast that saw it odd, or changed, drops its pins.
    A fork that fails leaves no child. The parent may be left write-protected, which faults undo, as in the kernel.
"""
from libc.stdint cimport uint64_t
from mmcore.core.space cimport *

cdef int fork_mm(mm_t *child, mm_t *mm) noexcept nogil      # 0; -ENOMEM, -EHWPOISON: the child has exited; -ESRCH
