from typing import Literal

from .memory import Folio
from .pagelist import PageList, _Pages

def longterm_unpinnable(pages: _Pages, *, acquire: Literal["leaf", "page"] = "leaf") -> PageList: ...
def migrate_folio_longterm(folio: Folio) -> Folio: ...
