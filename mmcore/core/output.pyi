from typing_extensions import disjoint_base

from .memory import Page

@disjoint_base
class GupOutput:
    @property
    def nr_pages(self) -> int: ...
    def gup_output_single_page(self, page: Page) -> None: ...
    def gup_output_pages(self, page: Page, npages: int) -> None: ...
