"""Run a scenario under every schedule with few enough preemptions; each must end lawful."""
import ctypes
import threading

MOST = 4096


class Explorer:
    def __init__(self):
        lib = ctypes.CDLL(None)
        if not hasattr(lib, "races_begin"):
            raise RuntimeError("the scheduler is not loaded: run tests/races/run.py")
        self.lib = lib
        # With the GIL dropped: entering and leaving wait for others.
        self.enter, self.leave = lib.races_enter, lib.races_leave
        self.planted = ctypes.c_int.in_dll(lib, "mm_planted_bug")

    def once(self, scenario, schedule):
        """One run. Returns [(chosen, enabled, current)], and the exception it ended in."""
        world = scenario()
        actors = world.actors()
        errors = []

        def body(i, actor):
            self.enter(i)
            try:
                actor()
            except BaseException as error:
                errors.append(error)
            finally:
                self.leave()

        self.lib.races_begin(len(actors), bytes(schedule), len(schedule))
        threads = [threading.Thread(target=body, args=(i, actor)) for i, actor in enumerate(actors)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        out = ctypes.create_string_buffer(3 * MOST)
        n = self.lib.races_end(out)
        if n < 0:
            raise RuntimeError(f"{scenario.__name__} is not the same twice: its schedule cannot be followed")
        trace = [tuple(out.raw[3 * i:3 * i + 3]) for i in range(n)]
        try:
            if errors:
                raise errors[0]
            world.end()
        except Exception as error:
            return trace, error
        return trace, None

    def explore(self, scenario, preemptions, most):
        """Return (interleavings, steps, the failing ones as [(schedule, exception)], whether all within the bound were run)."""
        todo, runs, steps, failures = [[]], 0, 0, []
        while todo and runs < most:
            schedule = todo.pop()
            trace, error = self.once(scenario, schedule)
            runs += 1
            steps += self.lib.races_steps()
            if error is not None:
                failures.append(([chosen for chosen, _, _ in trace], error))
                if len(failures) >= 5:
                    break
            used = 0
            for i, (chosen, enabled, current) in enumerate(trace):
                if i >= len(schedule):
                    for other in range(4):
                        if other != chosen and enabled >> other & 1:
                            preempts = used + (current != 255 and other != current)
                            if preempts <= preemptions:
                                todo.append([step[0] for step in trace[:i]] + [other])
                used += current != 255 and chosen != current
        return runs, steps, failures, not todo
