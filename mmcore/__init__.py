"""mmcore: a user-space engine for Linux page pinning."""
from .core.boot import DevicePages, DeviceRegion
from .core.buddy import *
from .core.buddy import __all__ as _buddy
from .core.content import folio_address, page_address
from .core.dma import *
from .core.dma import __all__ as _dma
from .core.dump import dump_page
from .core.errors import BadPage, InvalidArgument, MMError
from .core.file import File
from .core.folio import *
from .core.folio import __all__ as _folio
from .core.gup import *
from .core.gup import __all__ as _gup
from .core.hmm import *
from .core.hmm import __all__ as _hmm
from .core.include import get_include
from .core.iommu import *
from .core.iommu import __all__ as _iommu
from .core.lock import *
from .core.lock import __all__ as _lock
from .core.look import *
from .core.look import __all__ as _look
from .core.memory import Folio, Memory, Page, Zone
from .core.memfd import *
from .core.memfd import __all__ as _memfd
from .core.migrate import *
from .core.migrate import __all__ as _migrate
from .core.mm import MM, VMA
from .core.output import *
from .core.output import __all__ as _output
from .core.page import FOLIO_DTYPE, PAGE_DTYPE, PageFlags, PageType
from .core.pagelist import *
from .core.pagelist import __all__ as _pagelist
from .core.remap import reclaim
from .core.scatterlist import *
from .core.scatterlist import __all__ as _scatterlist
from .core.sgalloc import *
from .core.sgalloc import __all__ as _sgalloc
from .core.sgcopy import *
from .core.sgcopy import __all__ as _sgcopy
from .core.sgdraw import *
from .core.sgdraw import __all__ as _sgdraw
from .core import sgoutput as _sgoutput     # makes SGAppendTable an output of the pinning calls
from .core.sgiter import *
from .core.sgiter import __all__ as _sgiter
from .core.sgsplit import *
from .core.sgsplit import __all__ as _sgsplit
from .core.space import *
from .core.space import __all__ as _space
from .core.unpin import *
from .core.unpin import __all__ as _unpin
from .drivers.bio import *
from .drivers.bio import __all__ as _bio
from .drivers.ibaccess import *
from .drivers.ibaccess import __all__ as _ibaccess
from .drivers.iouring import *
from .drivers.iouring import __all__ as _iouring
from .drivers.iov import *
from .drivers.iov import __all__ as _iov
from .drivers.mr import *
from .drivers.mr import __all__ as _mr
from .drivers.umem import *
from .drivers.umem import __all__ as _umem
from .drivers.umem_blocks import *
from .drivers.umem_blocks import __all__ as _umem_blocks
from .drivers.vfio import *
from .drivers.vfio import __all__ as _vfio
from .ledger import PinLedger

__version__ = "0.1.0"
__all__ = ["BadPage", "DevicePages", "DeviceRegion", "FOLIO_DTYPE", "File", "Folio", "InvalidArgument", "MM", "MMError",
           "Memory", "PAGE_DTYPE", "Page", "PageFlags", "PageType", "PinLedger", "VMA", "Zone", "dump_page",
           "folio_address", "get_include", "page_address", "reclaim", *_bio, *_buddy, *_dma, *_folio, *_gup, *_hmm, *_ibaccess,
           *_iommu, *_iouring, *_iov, *_lock, *_look, *_memfd, *_migrate, *_mr, *_output, *_pagelist, *_scatterlist,
           *_sgalloc, *_sgcopy, *_sgdraw, *_sgiter, *_sgsplit, *_space, *_umem, *_umem_blocks, *_unpin, *_vfio]
