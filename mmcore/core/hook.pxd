"""Who wants to know about pins: the hook that PinLedger hangs on.

The thin functions that take or drop pins look at one C integer; while nobody watches, that is all it costs.
"""
from mmcore.core.memory cimport Memory

cdef int pin_watchers                   # how many watch

cdef object pins_changed(Memory mem, object heads, object counts, int sign)     # sequences: folios, pins of each; +1 or -1
