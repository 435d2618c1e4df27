"""What a wrong call gets: MMError, InvalidArgument, BadPage.

Units: errno: int as the kernel's; pfn, addr: int or None.
Raises: these are what is raised.
Threads: plain values; they can be pickled.
Kernel: -Exxx.
"""
import errno as _errno
import os


class MMError(OSError):
    """Report what the kernel would report as a negative errno.

    ``errno`` is the kernel's number; ``pfn`` and ``addr`` say where, or are None; the text says what failed, the
    numbers, the likely cause and the remedy.
    """

    def __init__(self, errno, reason, *, pfn=None, addr=None):
        super().__init__(errno, f"{os.strerror(errno)}: {reason}")
        self.pfn = pfn
        self.addr = addr

    def __reduce__(self):
        # OSError would pickle (errno, strerror) only.
        return (_rebuild, (type(self), self.errno, self.strerror, self.pfn, self.addr))


class InvalidArgument(MMError, ValueError):
    """Report an argument that is refused before anything changes; both an MMError with EINVAL and a ValueError."""

    def __init__(self, reason, *, pfn=None, addr=None):
        MMError.__init__(self, _errno.EINVAL, reason, pfn=pfn, addr=addr)


class BadPage(RuntimeError):
    """Report that going on would break a law of the engine; raised after undoing what the call had done.

    ``pfn`` is where, ``law`` names what would break.
    """

    def __init__(self, law, reason, *, pfn=None):
        super().__init__(f"{law}: {reason}")
        self.law = law
        self.reason = reason
        self.pfn = pfn

    def __reduce__(self):
        return (_rebuild_bad_page, (type(self), self.law, self.reason, self.pfn))


def _rebuild(cls, errno, strerror, pfn, addr):
    error = cls.__new__(cls, errno, strerror)
    OSError.__init__(error, errno, strerror)
    error.pfn, error.addr = pfn, addr
    return error


def _rebuild_bad_page(cls, law, reason, pfn):
    return cls(law, reason, pfn=pfn)
