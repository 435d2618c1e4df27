"""Buffers and reservations, from the system."""
from libc.stdlib cimport free, malloc
from mmcore.core.pthread cimport *

cdef extern from *:
    """
    #include <sys/mman.h>
    #ifndef MAP_NORESERVE
    #define MAP_NORESERVE 0
    #endif
    #ifndef MAP_ANONYMOUS
    #define MAP_ANONYMOUS MAP_ANON
    #endif

    static void *mm_reserve(size_t size, int huge)
    {
        void *at = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

        if (at == MAP_FAILED)
            return NULL;
    #ifdef MADV_HUGEPAGE
        if (huge)
            madvise(at, size, MADV_HUGEPAGE);
    #endif
        return at;
    }
    static void mm_unreserve(void *at, size_t size)
    {
        munmap(at, size);
    }
    """
    void *mm_reserve(size_t size, bint huge) nogil
    void mm_unreserve(void *at, size_t size) nogil

cdef void *reserve(uint64_t size, bint huge) noexcept nogil:
    return mm_reserve(size, huge)

cdef void unreserve(void *at, uint64_t size) noexcept nogil:
    mm_unreserve(at, size)

cdef enum:
    BIG_BUFFER = 1 << 18        # from here on a buffer is mapped, advised to be huge, and kept when it is given back
    KEPT_BUFFERS = 8
    KEPT_BYTES = 160 << 20    # a scatterlist of 4 Mi entries fits

cdef struct kept_t:
    void *at
    uint64_t size

cdef kept_t kept[KEPT_BUFFERS]
cdef uint64_t kept_bytes = 0
cdef pthread_mutex_t kept_lock
pthread_mutex_init(&kept_lock, NULL)

cdef uint64_t buffer_size(uint64_t size) noexcept nogil:
    cdef uint64_t rounded = BIG_BUFFER
    while rounded < size:
        rounded <<= 1
    return rounded

cdef void *buffer_alloc(uint64_t size) noexcept nogil:
    """Memory for a list of this many bytes, NULL when there is none. Content is undefined."""
    cdef int i
    cdef void *at = NULL
    if size < BIG_BUFFER:
        return malloc(size if size else 1)
    size = buffer_size(size)
    pthread_mutex_lock(&kept_lock)
    global kept_bytes
    for i in range(KEPT_BUFFERS):
        if kept[i].size == size:
            at = kept[i].at
            kept[i].size = 0
            kept_bytes -= size
            break
    pthread_mutex_unlock(&kept_lock)
    if at == NULL:
        at = mm_reserve(size, True)
    return at

cdef void buffer_free(void *buffer, uint64_t size) noexcept nogil:
    """Give a buffer back; size is what buffer_alloc was asked for."""
    cdef int i
    if size < BIG_BUFFER:
        free(buffer)
        return
    size = buffer_size(size)
    pthread_mutex_lock(&kept_lock)
    global kept_bytes
    if kept_bytes + size <= KEPT_BYTES:
        for i in range(KEPT_BUFFERS):
            if kept[i].size == 0:
                kept[i].at = buffer
                kept[i].size = size
                kept_bytes += size
                buffer = NULL
                break
    pthread_mutex_unlock(&kept_lock)
    if buffer != NULL:
        mm_unreserve(buffer, size)
