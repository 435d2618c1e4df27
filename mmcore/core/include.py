"""Where the headers are, for extensions that cimport mmcore.

Units: a path, str.
Raises: nothing.
Threads: any number at once.
Kernel: none.
"""
import os

__all__ = ["get_include"]


def get_include():
    """Return the directory of page.h and atomic.h: for include_dirs of an Extension that cimports mmcore."""
    return os.path.dirname(os.path.abspath(__file__))
