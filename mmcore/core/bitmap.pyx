"""Sets of numbers: room for them, and the search for the next member."""

cdef uint64_t bitmap_words(uint64_t nr_bits) noexcept nogil:
    cdef uint64_t total = 0
    while True:
        nr_bits = (nr_bits + 63) >> 6
        total += nr_bits
        if nr_bits <= 1:
            return total

cdef uint64_t *bitmap_place(bitmap_t *b, uint64_t nr_bits, uint64_t *at) noexcept nogil:
    b.nr_bits = nr_bits
    b.nr_levels = 0
    while True:
        nr_bits = (nr_bits + 63) >> 6
        b.level[b.nr_levels] = at
        b.nr_levels += 1
        at += nr_bits
        if nr_bits <= 1:
            return at

cdef uint64_t bitmap_next(const bitmap_t *b, uint64_t bit) noexcept nogil:
    """Up to a level whose word has a member from here on, then down to the lowest below it."""
    cdef uint64_t bits = b.nr_bits, word
    cdef int k = 0
    while k < b.nr_levels and bit < bits:
        word = b.level[k][bit >> 6] >> (bit & 63)
        if word:
            bit += <uint64_t>ctz64(word)
            while k > 0:
                k -= 1
                bit = (bit << 6) + <uint64_t>ctz64(b.level[k][bit])
            return bit
        bit = (bit >> 6) + 1
        bits = (bits + 63) >> 6
        k += 1
    return b.nr_bits
