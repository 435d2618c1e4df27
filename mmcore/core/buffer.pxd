"""Memory from the system: reservations, and large buffers for lists.

A reservation costs nothing until it is touched, reads as zero then, and may be advised to be huge. Buffers that were given
back are kept warm for the next, up to a bound, since filling fresh memory costs more than a walk over the list; so their
content is undefined.
"""
from libc.stdint cimport uint64_t

cdef void *buffer_alloc(uint64_t size) noexcept nogil
cdef void buffer_free(void *buffer, uint64_t size) noexcept nogil
cdef void *reserve(uint64_t size, bint huge) noexcept nogil
cdef void unreserve(void *at, uint64_t size) noexcept nogil
