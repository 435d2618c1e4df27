"""Releasing as Python sees it: the unpin family, release_pages, the iterators; and grab_pages.

The work and its laws are in walk.pxd; here are arguments, errors and words.
"""
from mmcore.core.walk cimport *

cdef int generation_arg(object release) except -1
