"""Watching pins."""
__all__ = ["watch_pins", "unwatch_pins"]

pin_watchers = 0
_watchers = []


def watch_pins(callback):
    """Call callback(mem, heads, counts, sign) after each call that took (sign 1) or dropped (-1) pins."""
    global pin_watchers
    _watchers.append(callback)
    pin_watchers = len(_watchers)


def unwatch_pins(callback):
    """Stop what watch_pins() began."""
    global pin_watchers
    _watchers.remove(callback)
    pin_watchers = len(_watchers)

cdef object pins_changed(Memory mem, object heads, object counts, int sign):
    for callback in tuple(_watchers):
        callback(mem, heads, counts, sign)
