/*
 * The scheduler of the race explorer. Actors are threads; one at a time runs, from one step to the next. At each step where
 * more than one could go on, the schedule says who does; beyond its end, whoever runs goes on. What was chosen, and what
 * could have been, is written down for whoever explores.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_ACTORS = 4, MOST_CHOICES = 4096, MOST_STEPS = 200000, MOST_IDLE = 20000 };
enum { NEW, READY, BLOCKED, DONE };

int mm_planted_bug;

static pthread_mutex_t big = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t woken = PTHREAD_COND_INITIALIZER;
static int nr_actors, entered, turn, active, idle;
static int state[MOST_ACTORS];
static long steps;
static int nr_prefix, nr_trace, diverged;
static unsigned char prefix[MOST_CHOICES];
static struct { unsigned char chosen, enabled, current; } trace[MOST_CHOICES];
static __thread int me = -1;

static int (*gil_check)(void);
static void *(*gil_save)(void);
static void (*gil_restore)(void *);

void races_begin(int actors, const unsigned char *schedule, int length)
{
	nr_actors = actors;
	entered = idle = nr_trace = diverged = 0;
	steps = 0;
	turn = -1;
	active = 1;
	memset(state, 0, sizeof(state));
	nr_prefix = length;
	memcpy(prefix, schedule, length);
	gil_check = (int (*)(void))dlsym(RTLD_DEFAULT, "PyGILState_Check");
	gil_save = (void *(*)(void))dlsym(RTLD_DEFAULT, "PyEval_SaveThread");
	gil_restore = (void (*)(void *))dlsym(RTLD_DEFAULT, "PyEval_RestoreThread");
}

int races_end(unsigned char *out)
{
	active = 0;
	memcpy(out, trace, 3 * nr_trace);
	return diverged ? -1 : nr_trace;
}

long races_steps(void) { return steps; }

/* Under `big`: who goes next. current: who was running, or -1 */
static void pick(int current)
{
	int i, n = 0, first = -1, enabled = 0, chosen, runs = current >= 0 && state[current] == READY;

	for (i = 0; i < nr_actors; i++)
		if (state[i] == READY) {
			enabled |= 1 << i;
			n++;
			if (first < 0)
				first = i;
		}
	if (n == 0) {
		/* All wait for each other, or for a moment to pass: each tries again, in turn. */
		if (++idle > MOST_IDLE) {
			fprintf(stderr, "races: deadlock: no actor gets on\n");
			_Exit(3);
		}
		for (i = 1; i <= nr_actors; i++)
			if (state[(current + i) % nr_actors] == BLOCKED) {
				turn = (current + i) % nr_actors;
				return;
			}
		turn = -1;
		return;
	}
	chosen = runs ? current : first;
	if (n > 1 && nr_trace < MOST_CHOICES) {
		if (nr_trace < nr_prefix) {
			if (enabled >> prefix[nr_trace] & 1)
				chosen = prefix[nr_trace];
			else
				diverged = 1;
		}
		trace[nr_trace].chosen = chosen;
		trace[nr_trace].enabled = enabled;
		trace[nr_trace].current = runs ? current : 255;
		nr_trace++;
	}
	turn = chosen;
}

static void wait_for_turn(void)
{
	void *saved = NULL;

	if (turn == me)
		return;
	pthread_cond_broadcast(&woken);
	/* Not with the GIL: whoever goes next may want it. */
	if (gil_check && gil_check()) {
		pthread_mutex_unlock(&big);
		saved = gil_save();
		pthread_mutex_lock(&big);
	}
	while (turn != me)
		pthread_cond_wait(&woken, &big);
	if (saved) {
		pthread_mutex_unlock(&big);
		gil_restore(saved);
		pthread_mutex_lock(&big);
	}
}

static void stop_here(int how)
{
	int i;

	if (me < 0 || !active)
		return;
	pthread_mutex_lock(&big);
	if (++steps > MOST_STEPS) {
		fprintf(stderr, "races: no end after %d steps\n", MOST_STEPS);
		_Exit(3);
	}
	if (how == READY) {
		idle = 0;
		for (i = 0; i < nr_actors; i++)
			if (state[i] == BLOCKED)
				state[i] = READY;
	}
	state[me] = how;
	pick(me);
	wait_for_turn();
	pthread_mutex_unlock(&big);
}

void mm_step_hook(void) { stop_here(READY); }
void mm_blocked_hook(void) { stop_here(BLOCKED); }

void races_enter(int actor)
{
	pthread_mutex_lock(&big);
	me = actor;
	state[actor] = READY;
	if (++entered == nr_actors)
		pick(-1);
	wait_for_turn();
	pthread_mutex_unlock(&big);
}

void races_leave(void)
{
	int i;

	pthread_mutex_lock(&big);
	state[me] = DONE;
	for (i = 0; i < nr_actors; i++)
		if (state[i] == BLOCKED)
			state[i] = READY;
	idle = 0;
	pick(me);
	me = -1;
	pthread_cond_broadcast(&woken);
	pthread_mutex_unlock(&big);
}
