"""The system's mutexes and reader/writer locks: through atomic.h, where the race explorer marks their steps."""
cdef extern from "atomic.h" nogil:
    ctypedef struct pthread_mutex_t:
        pass
    int pthread_mutex_init(pthread_mutex_t *, const void *)
    int pthread_mutex_destroy(pthread_mutex_t *)
    int pthread_mutex_lock(pthread_mutex_t *)
    int pthread_mutex_unlock(pthread_mutex_t *)

    ctypedef struct pthread_rwlock_t:
        pass
    int pthread_rwlock_init(pthread_rwlock_t *, const void *)
    int pthread_rwlock_destroy(pthread_rwlock_t *)
    int pthread_rwlock_rdlock(pthread_rwlock_t *)
    int pthread_rwlock_tryrdlock(pthread_rwlock_t *)
    int pthread_rwlock_wrlock(pthread_rwlock_t *)
    int pthread_rwlock_unlock(pthread_rwlock_t *)
