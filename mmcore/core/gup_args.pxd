"""What get_user_pages* and pin_user_pages* accept, and what they say when they refuse or fail.

Each call is its wrapper's rule (spec: to_set): flags that it adds, and how it walks. is_valid_gup_args in the kernel's order:
    1. no internal flag from outside (FOLL_TOUCH, TRIED, REMOTE, PIN, FAST_ONLY, UNLOCKABLE, MADV_POPULATE)
    2. not FOLL_PIN and FOLL_GET both: pin_user_pages* with FOLL_GET
    3. no FOLL_LONGTERM without FOLL_PIN: get_user_pages* with FOLL_LONGTERM
    4. not FOLL_LONGTERM with FOLL_PCI_P2PDMA
The fast calls know FAST_FLAGS only. Where the kernel returns 0 for such arguments (pin_user_pages, _remote, _unlocked) the
errno is EINVAL here too.
"""
from mmcore.core.folio cimport *
from mmcore.core.gup_walk cimport gup_t
from mmcore.core.mm cimport MM

cdef enum:
    INTERNAL_FLAGS = FOLL_TOUCH | FOLL_TRIED | FOLL_REMOTE | FOLL_PIN | FOLL_FAST_ONLY | FOLL_UNLOCKABLE | FOLL_MADV_POPULATE
    FAST_FLAGS = FOLL_WRITE | FOLL_LONGTERM | FOLL_FORCE | FOLL_PIN | FOLL_GET | FOLL_FAST_ONLY | FOLL_NOFAULT | \
        FOLL_PCI_P2PDMA | FOLL_HONOR_NUMA_FAULT
    KNOWN_FLAGS = 0x1fff        # all that may come from outside

cdef struct wrapper_t:
    const char *name
    unsigned to_set             # FOLL_*
    bint fast

cdef unsigned flags_arg(const wrapper_t *wrapper, object gup_flags) except? 0xffffffff    # with to_set; raises InvalidArgument
cdef object gup_error(MM mm, const gup_t *w, str call)      # what a walk that got nothing ended with
