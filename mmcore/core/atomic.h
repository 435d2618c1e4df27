/*
 * Atomics named by what they promise. The suffix is the memory order:
 *   _relaxed   only the access itself is atomic: statistics, hints, flags read under a lock
 *   _acquire   what follows stays behind it: taking a lock, taking a reference
 *   _release   what precedes stays before it: dropping a lock, publishing
 *   _acq_rel   both: dropping a reference (whoever reaches 0 must see all that the others did)
 * 32-bit operations are on counters that the kernel keeps as signed int. They are unsigned here, so that crossing
 * INT_MAX wraps in a defined way and "less than" means underflow.
 */
#ifndef MMCORE_ATOMIC_H
#define MMCORE_ATOMIC_H

#include <stdint.h>
#include <pthread.h>
#include <string.h>
#include "step.h"

static inline uint32_t a32_load_relaxed(const void *p) { return __atomic_load_n((const uint32_t *)p, __ATOMIC_RELAXED); }
static inline uint32_t a32_load_acquire(const void *p) { mm_step(); return __atomic_load_n((const uint32_t *)p, __ATOMIC_ACQUIRE); }
static inline void a32_store_relaxed(void *p, uint32_t v) { __atomic_store_n((uint32_t *)p, v, __ATOMIC_RELAXED); }
static inline void a32_store_release(void *p, uint32_t v) { mm_step(); __atomic_store_n((uint32_t *)p, v, __ATOMIC_RELEASE); }
/* All fetch operations return the value before. */
static inline uint32_t a32_fetch_add_relaxed(void *p, uint32_t v) { mm_step(); return __atomic_fetch_add((uint32_t *)p, v, __ATOMIC_RELAXED); }
static inline uint32_t a32_fetch_add_acq_rel(void *p, uint32_t v) { mm_step(); return __atomic_fetch_add((uint32_t *)p, v, __ATOMIC_ACQ_REL); }
static inline uint32_t a32_fetch_sub_acq_rel(void *p, uint32_t v) { mm_step(); return __atomic_fetch_sub((uint32_t *)p, v, __ATOMIC_ACQ_REL); }

/* Between a store and a load of something else, where two threads each look for the other's store. */
#define mm_full_barrier() __atomic_thread_fence(__ATOMIC_SEQ_CST)

/* Replace the value when it still is *expected; otherwise put what it is into *expected. */
static inline int a32_cas_acq_rel(void *p, uint32_t *expected, uint32_t v)
{
	mm_step();
	if (mm_planted(1)) {	/* does not compare */
		a32_store_relaxed(p, v);
		return 1;
	}
	return __atomic_compare_exchange_n((uint32_t *)p, expected, v, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
}

/*
 * A small folio's two counts are one word for some operations and two for others. The processor orders accesses of
 * different width to the same bytes; ThreadSanitizer knows an atomic by its address alone, so it is told that the wide
 * ones are at the address of the upper half as well. Nothing of this is in an ordinary build.
 */
#ifdef __SANITIZE_THREAD__
void __tsan_acquire(void *);
void __tsan_release(void *);
#define mm_wide_before(p) __tsan_release((char *)(p) + 4)
#define mm_wide_after(p) __tsan_acquire((char *)(p) + 4)
#else
#define mm_wide_before(p) ((void)0)
#define mm_wide_after(p) ((void)0)
#endif

/*
 * Bytes of a file's page: processes that map it, reads, writes and writeback use them at the same time and ask nobody, here as
 * in the kernel. Which of two bytes is seen is theirs to settle, so ThreadSanitizer does not watch these copies. Those of
 * anonymous pages it does: there one process is alone, or nobody writes.
 */
#ifdef __SANITIZE_THREAD__
__attribute__((no_sanitize("thread"), noinline, unused)) static void copy_shared(void *to, const void *from, size_t n)
{
	volatile char *d = to;
	const volatile char *s = from;

	while (n--)
		*d++ = *s++;
}
#else
#define copy_shared(to, from, n) memcpy(to, from, n)
#endif

static inline int a64_cas_acq_rel(void *p, uint64_t *expected, uint64_t v)
{
	int done;

	mm_step();
	mm_wide_before(p);
	done = __atomic_compare_exchange_n((uint64_t *)p, expected, v, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
	mm_wide_after(p);
	return done;
}

static inline uint64_t a64_load_relaxed(const void *p) { return __atomic_load_n((const uint64_t *)p, __ATOMIC_RELAXED); }
static inline uint64_t a64_load_acquire(const void *p)
{
	uint64_t v;

	mm_step();
	v = __atomic_load_n((const uint64_t *)p, __ATOMIC_ACQUIRE);

	mm_wide_after((void *)p);
	return v;
}

static inline void a64_store_relaxed(void *p, uint64_t v) { __atomic_store_n((uint64_t *)p, v, __ATOMIC_RELAXED); }
static inline void a64_store_release(void *p, uint64_t v) { mm_step(); mm_wide_before(p); __atomic_store_n((uint64_t *)p, v, __ATOMIC_RELEASE); }
static inline uint64_t a64_fetch_add_relaxed(void *p, uint64_t v) { return __atomic_fetch_add((uint64_t *)p, v, __ATOMIC_RELAXED); }
static inline uint64_t a64_fetch_add_release(void *p, uint64_t v) { mm_step(); return __atomic_fetch_add((uint64_t *)p, v, __ATOMIC_RELEASE); }
static inline uint64_t a64_exchange_acq_rel(void *p, uint64_t v) { mm_step(); return __atomic_exchange_n((uint64_t *)p, v, __ATOMIC_ACQ_REL); }
static inline uint64_t a64_fetch_or_acquire(void *p, uint64_t v) { mm_step(); return __atomic_fetch_or((uint64_t *)p, v, __ATOMIC_ACQUIRE); }
static inline uint64_t a64_fetch_or_relaxed(void *p, uint64_t v) { mm_step(); return __atomic_fetch_or((uint64_t *)p, v, __ATOMIC_RELAXED); }
static inline uint64_t a64_fetch_or_acq_rel(void *p, uint64_t v) { mm_step(); return __atomic_fetch_or((uint64_t *)p, v, __ATOMIC_ACQ_REL); }
static inline uint64_t a64_fetch_and_release(void *p, uint64_t v) { mm_step(); return __atomic_fetch_and((uint64_t *)p, v, __ATOMIC_RELEASE); }
static inline uint64_t a64_fetch_and_acq_rel(void *p, uint64_t v) { mm_step(); return __atomic_fetch_and((uint64_t *)p, v, __ATOMIC_ACQ_REL); }

/* Tell the processor that this is a spin; costs it nothing elsewhere. */
static inline void cpu_relax(void)
{
	mm_blocked();
#if defined(__x86_64__) || defined(__i386__)
	__builtin_ia32_pause();
#elif defined(__aarch64__)
	__asm__ __volatile__("yield");
#endif
}

/*
 * The empty asm keeps the call: gcc takes a function that only prefetches for one without effect, and drops calls of it
 * that it does not inline.
 */
static inline void prefetch_read(const void *p) { __builtin_prefetch(p, 0, 3); __asm__ __volatile__(""); }
static inline void prefetch_write(const void *p) { __builtin_prefetch(p, 1, 3); __asm__ __volatile__(""); }

/*
 * Stores that go past the caches: for cache lines that are written as a whole and not looked at soon. They need no read of
 * what was there, which is half of the traffic. stream_end() puts them before all later stores.
 */
#if defined(__x86_64__)
#include <emmintrin.h>
static inline void stream64(void *p, uint64_t v) { _mm_stream_si64((long long *)p, (long long)v); }
static inline void stream_end(void) { _mm_sfence(); }
#else
static inline void stream64(void *p, uint64_t v) { __atomic_store_n((uint64_t *)p, v, __ATOMIC_RELAXED); }
static inline void stream_end(void) { __atomic_thread_fence(__ATOMIC_RELEASE); }
#endif

static inline int ctz64(uint64_t v) { return __builtin_ctzll(v); }
static inline int clz64(uint64_t v) { return __builtin_clzll(v); }
static inline int popcount64(uint64_t v) { return __builtin_popcountll(v); }

/* Branch hints: the unlikely side is an error or a rare case. */
#define mm_unlikely(x) __builtin_expect(!!(x), 0)
#define mm_likely(x) __builtin_expect(!!(x), 1)

/* A small number that is the same for all calls of one thread, and mostly another one in another thread. */
static inline unsigned thread_slot(unsigned nr_slots)
{
	uint64_t id = (uint64_t)(uintptr_t)pthread_self();

	return (unsigned)((id * 0x9e3779b97f4a7c15ULL) >> 40) & (nr_slots - 1);
}

#endif
