"""The model's swap."""
from libc.stdint cimport uint8_t, uint32_t
from libc.stdlib cimport free
from libc.string cimport memcpy
from mmcore.core.space cimport grow, spaces_of, swap_t

cdef uint64_t slot_take(mem_t *m, swap_t *s) noexcept nogil:
    """A free slot, or 0. Under s.lock."""
    cdef uint64_t room_count, room_bytes
    if s.nr_free:
        s.nr_free -= 1
        return s.free[s.nr_free]
    room_count = room_bytes = s.room
    if not grow(m, <void **>&s.count, &room_count, s.nr_slots + 1, sizeof(uint32_t)):
        return 0
    if not grow(m, <void **>&s.bytes, &room_bytes, s.nr_slots + 1, sizeof(void *)):
        return 0
    # Room to note it as free later on: giving a slot back cannot fail then.
    if not grow(m, <void **>&s.free, &s.free_room, s.nr_slots + 1, sizeof(uint64_t)):
        return 0
    s.room = room_bytes
    if s.nr_slots == 1:
        s.count[0] = 0
        s.bytes[0] = NULL
    s.nr_slots += 1
    return s.nr_slots - 1

cdef uint64_t swap_store(mem_t *m, uint64_t pfn, uint64_t count) noexcept nogil:
    cdef swap_t *s = &spaces_of(m).swap
    cdef uint8_t *bytes = NULL
    cdef uint64_t slot, size = ONE << m.page_shift
    if test_flag(&m.map[pfn], PG_mm_written):
        bytes = <uint8_t *>mem_malloc(m, size)
        if bytes == NULL:
            return 0
        memcpy(bytes, page_bytes(m, pfn), size)
    pthread_mutex_lock(&s.lock)
    slot = slot_take(m, s)
    if slot:
        s.count[slot] = <uint32_t>count
        s.bytes[slot] = bytes
        s.nr_used += 1
    pthread_mutex_unlock(&s.lock)
    if slot == 0:
        free(bytes)
    return slot

cdef void swap_dup(mem_t *m, uint64_t slot) noexcept nogil:
    cdef swap_t *s = &spaces_of(m).swap
    pthread_mutex_lock(&s.lock)
    s.count[slot] += 1
    pthread_mutex_unlock(&s.lock)

cdef uint64_t swap_count(mem_t *m, uint64_t slot) noexcept nogil:
    cdef swap_t *s = &spaces_of(m).swap
    cdef uint64_t count
    pthread_mutex_lock(&s.lock)
    count = s.count[slot]
    pthread_mutex_unlock(&s.lock)
    return count

cdef void swap_free(mem_t *m, uint64_t slot, uint64_t count) noexcept nogil:
    cdef swap_t *s = &spaces_of(m).swap
    pthread_mutex_lock(&s.lock)
    s.count[slot] -= <uint32_t>count
    if s.count[slot] == 0:
        free(s.bytes[slot])
        s.bytes[slot] = NULL
        s.free[s.nr_free] = slot
        s.nr_free += 1
        s.nr_used -= 1
    pthread_mutex_unlock(&s.lock)

cdef void swap_load(mem_t *m, uint64_t slot, uint64_t pfn) noexcept nogil:
    """The caller's entry names the slot, so that it stays."""
    cdef swap_t *s = &spaces_of(m).swap
    cdef uint8_t *bytes
    pthread_mutex_lock(&s.lock)
    bytes = s.bytes[slot]
    pthread_mutex_unlock(&s.lock)
    if bytes != NULL:
        memcpy(page_bytes(m, pfn), bytes, ONE << m.page_shift)
