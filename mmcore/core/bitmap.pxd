"""Sets of numbers as bits, with summary levels: what is in a set is found by looking at a word a level, however large it is.

Law: a bit of level k + 1 is set when the word of level k that it stands for is not 0. The caller has the set's lock.
"""
from libc.stdint cimport uint64_t
from mmcore.core.page cimport ctz64

cdef enum:
    BITMAP_LEVELS = 7           # 2^42 numbers

cdef struct bitmap_t:
    uint64_t *level[BITMAP_LEVELS]  # [0] a bit a number; [k + 1] a bit for each word of [k] that is not 0
    int nr_levels
    uint64_t nr_bits

cdef uint64_t bitmap_words(uint64_t nr_bits) noexcept nogil     # 64-bit words of all levels
cdef uint64_t *bitmap_place(bitmap_t *b, uint64_t nr_bits, uint64_t *at) noexcept nogil    # an empty set in zeros at `at`;
                                                                                        # returns what follows
# The lowest member from a number on, or nr_bits.
cdef uint64_t bitmap_next(const bitmap_t *b, uint64_t bit) noexcept nogil

cdef inline bint bitmap_test(const bitmap_t *b, uint64_t bit) noexcept nogil:
    return (b.level[0][bit >> 6] >> (bit & 63)) & 1

cdef inline void bitmap_set(bitmap_t *b, uint64_t bit) noexcept nogil:
    cdef int k = 0
    cdef uint64_t old
    while True:
        old = b.level[k][bit >> 6]
        b.level[k][bit >> 6] = old | (<uint64_t>1 << (bit & 63))
        k += 1
        if old != 0 or k == b.nr_levels:
            return
        bit >>= 6

cdef inline void bitmap_clear(bitmap_t *b, uint64_t bit) noexcept nogil:
    cdef int k = 0
    cdef uint64_t left
    while True:
        left = b.level[k][bit >> 6] & ~(<uint64_t>1 << (bit & 63))
        b.level[k][bit >> 6] = left
        k += 1
        if left != 0 or k == b.nr_levels:
            return
        bit >>= 6

cdef inline uint64_t bitmap_first(const bitmap_t *b) noexcept nogil:
    """The lowest member; the set must not be empty."""
    cdef int k = b.nr_levels - 1
    cdef uint64_t at = 0
    while k >= 0:
        at = (at << 6) + <uint64_t>ctz64(b.level[k][at])
        k -= 1
    return at
