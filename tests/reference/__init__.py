"""A plain engine, written to be read, that the compiled one is compared with: dictionaries, one page at a time.

A module a noun, as in mmcore/, and no line shared with it:

    frames     folios, references, pins, dirty marks, what is freed
    spaces     what a process sees at an address: mappings, faults, fork, swap
    lists      scatterlists: which entries a list of pages becomes
    regions    what registering charges, pins and describes: RDMA regions, io_uring buffers
    vfio       a container: mappings, domains, pins of drivers, dirty pages
    world      all of it over one memory: who holds which frame, and so what every counter says

None of them chooses frames: which page of a process lies in which frame they are told, and from then on they say what must
follow. A call that must be refused raises Refused.
"""
import errno


class Refused(Exception):
    """The call is refused; with this errno, where one is the contract."""

    def __init__(self, number=None):
        super().__init__(errno.errorcode.get(number, "refused"))
        self.errno = number
