from .core.boot import DevicePages as DevicePages, DeviceRegion as DeviceRegion
from .core.buddy import *
from .core.content import folio_address as folio_address, page_address as page_address
from .core.dma import *
from .core.dump import dump_page as dump_page
from .core.errors import BadPage as BadPage, InvalidArgument as InvalidArgument, MMError as MMError
from .core.file import File as File
from .core.folio import *
from .core.gup import *
from .core.hmm import *
from .core.include import get_include as get_include
from .core.iommu import *
from .core.lock import *
from .core.look import *
from .core.memory import Folio as Folio, Memory as Memory, Page as Page, Zone as Zone
from .core.memfd import *
from .core.migrate import *
from .core.mm import MM as MM, VMA as VMA
from .core.output import *
from .core.page import FOLIO_DTYPE as FOLIO_DTYPE, PAGE_DTYPE as PAGE_DTYPE, PageFlags as PageFlags, PageType as PageType
from .core.pagelist import *
from .core.remap import reclaim as reclaim
from .core.scatterlist import *
from .core.sgalloc import *
from .core.sgcopy import *
from .core.sgdraw import *
from .core.sgiter import *
from .core.sgsplit import *
from .core.space import *
from .core.unpin import *
from .drivers.bio import *
from .drivers.ibaccess import *
from .drivers.iouring import *
from .drivers.iov import *
from .drivers.mr import *
from .drivers.umem import *
from .drivers.umem_blocks import *
from .drivers.vfio import *
from .ledger import PinLedger as PinLedger

__version__: str
