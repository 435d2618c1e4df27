"""/proc/vmstat, made current first: its counters sit per CPU until they are folded."""

from .errors import NotPossible
from .limits import require_proc

STAT_REFRESH = "/proc/sys/vm/stat_refresh"


def refresh():
    """Fold the per-CPU counters into /proc/vmstat.

    Raises NotPossible without the right to (root) or on a kernel without the file.
    """
    require_proc()
    try:
        with open(STAT_REFRESH, "w") as file:
            file.write("1")
    except PermissionError:
        raise NotPossible(
            f"{STAT_REFRESH} may not be written, so that nr_foll_pin_* would be out of date",
            "run as root",
        ) from None
    except FileNotFoundError:
        raise NotPossible(f"{STAT_REFRESH} is missing", "it needs CONFIG_SMP and /proc/sys") from None
    except OSError as error:
        # EINVAL: the kernel found a counter below 0 while folding; they are folded all the same.
        if error.errno != 22:
            raise


def vmstat():
    """Return /proc/vmstat as a dict of ints, as it stands (see refresh())."""
    require_proc()
    with open("/proc/vmstat") as file:
        return {key: int(value) for key, value in (line.split() for line in file)}


def foll_pins():
    """Return (nr_foll_pin_acquired, nr_foll_pin_released), current, in pages, machine-wide.

    Raises NotPossible where they cannot be made current or do not exist.
    """
    refresh()
    stats = vmstat()
    try:
        return stats["nr_foll_pin_acquired"], stats["nr_foll_pin_released"]
    except KeyError:
        raise NotPossible(
            "/proc/vmstat has no nr_foll_pin_acquired", "it needs Linux 5.6 or newer"
        ) from None
