/*
 * Marks for the race explorer (tests/races): every atomic operation that others can see, every lock taken, and every turn
 * of a spin loop is a step, before which another thread may run. Nothing of this is in an ordinary build.
 */
#ifndef MMCORE_STEP_H
#define MMCORE_STEP_H

#ifdef MMCORE_RACES

#include <errno.h>
#include <pthread.h>
#include <sched.h>

/* In the explorer's library, which is loaded before Python; elsewhere they are NULL. */
extern void mm_step_hook(void) __attribute__((weak));
extern void mm_blocked_hook(void) __attribute__((weak));
extern int mm_planted_bug __attribute__((weak));

#define mm_step() do { if (mm_step_hook) mm_step_hook(); } while (0)
#define mm_blocked() do { if (mm_blocked_hook) mm_blocked_hook(); } while (0)
/* A fault of the tests' own, to prove that the explorer finds one. */
#define mm_planted(n) (&mm_planted_bug && mm_planted_bug == (n))

static inline int mm_step_mutex_lock(pthread_mutex_t *lock)
{
	mm_step();
	while (pthread_mutex_trylock(lock) == EBUSY)
		mm_blocked();
	return 0;
}

static inline int mm_step_rdlock(pthread_rwlock_t *lock)
{
	mm_step();
	while (pthread_rwlock_tryrdlock(lock) == EBUSY)
		mm_blocked();
	return 0;
}

static inline int mm_step_wrlock(pthread_rwlock_t *lock)
{
	mm_step();
	while (pthread_rwlock_trywrlock(lock) == EBUSY)
		mm_blocked();
	return 0;
}

/* Sleepers look again by themselves. */
static inline int mm_step_cond_wait(pthread_mutex_t *lock)
{
	pthread_mutex_unlock(lock);
	mm_blocked();
	return mm_step_mutex_lock(lock);
}

static inline int mm_step_yield(void)
{
	mm_blocked();
	return 0;
}

#define pthread_mutex_lock(lock) mm_step_mutex_lock(lock)
#define pthread_rwlock_rdlock(lock) mm_step_rdlock(lock)
#define pthread_rwlock_wrlock(lock) mm_step_wrlock(lock)
#define pthread_cond_timedwait(cond, lock, until) mm_step_cond_wait(lock)
#define sched_yield() mm_step_yield()

#else

#define mm_step() ((void)0)
#define mm_blocked() ((void)0)
#define mm_planted(n) 0

#endif
#endif
