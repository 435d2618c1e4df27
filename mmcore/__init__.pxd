"""The C face: what Cython code outside of the package may build on. The .pxd of each noun is its design.

    memory      Memory, mem_t, statistics, the bytes behind pages
    page        struct page, flags, the tail word, atomics
    folio       references and pins of one folio
    pagelist    PageList, PageRanges
    walk        groups of a list by folio; batches that release, lists that are grabbed
    output      GupOutput: a place of one's own for what the pinning calls take
"""
from mmcore.core.memory cimport *
from mmcore.core.folio cimport *
from mmcore.core.pagelist cimport *
from mmcore.core.walk cimport *
from mmcore.core.output cimport *
