"""output= decides what a call returns: a list, runs, a scatterlist, or the GupOutput that was passed."""
from typing import Literal, TypeVar, overload

from .mm import MM
from .output import GupOutput
from .pagelist import PageList, PageRanges
from .scatterlist import SGAppendTable

_Acquire = Literal["leaf", "page"]
_Sink = TypeVar("_Sink", bound=GupOutput)

@overload
def get_user_pages(mm: MM, start: int, nr_pages: int, gup_flags: int = 0, *, acquire: _Acquire = "leaf",
                   output: type[PageList] | PageList = ...) -> PageList: ...
@overload
def get_user_pages(mm: MM, start: int, nr_pages: int, gup_flags: int = 0, *, acquire: _Acquire = "leaf",
                   output: type[PageRanges] | PageRanges) -> PageRanges: ...
@overload
def get_user_pages(mm: MM, start: int, nr_pages: int, gup_flags: int = 0, *, acquire: _Acquire = "leaf",
                   output: type[SGAppendTable] | SGAppendTable) -> SGAppendTable: ...
@overload
def get_user_pages(mm: MM, start: int, nr_pages: int, gup_flags: int = 0, *, acquire: _Acquire = "leaf",
                   output: type[_Sink] | _Sink) -> _Sink: ...

@overload
def get_user_pages_fast(mm: MM, start: int, nr_pages: int, gup_flags: int = 0, *, acquire: _Acquire = "leaf",
                        output: type[PageList] | PageList = ...) -> PageList: ...
@overload
def get_user_pages_fast(mm: MM, start: int, nr_pages: int, gup_flags: int = 0, *, acquire: _Acquire = "leaf",
                        output: type[PageRanges] | PageRanges) -> PageRanges: ...
@overload
def get_user_pages_fast(mm: MM, start: int, nr_pages: int, gup_flags: int = 0, *, acquire: _Acquire = "leaf",
                        output: type[SGAppendTable] | SGAppendTable) -> SGAppendTable: ...
@overload
def get_user_pages_fast(mm: MM, start: int, nr_pages: int, gup_flags: int = 0, *, acquire: _Acquire = "leaf",
                        output: type[_Sink] | _Sink) -> _Sink: ...

@overload
def get_user_pages_fast_only(mm: MM, start: int, nr_pages: int, gup_flags: int = 0, *, acquire: _Acquire = "leaf",
                             output: type[PageList] | PageList = ...) -> PageList: ...
@overload
def get_user_pages_fast_only(mm: MM, start: int, nr_pages: int, gup_flags: int = 0, *, acquire: _Acquire = "leaf",
                             output: type[PageRanges] | PageRanges) -> PageRanges: ...
@overload
def get_user_pages_fast_only(mm: MM, start: int, nr_pages: int, gup_flags: int = 0, *, acquire: _Acquire = "leaf",
                             output: type[SGAppendTable] | SGAppendTable) -> SGAppendTable: ...
@overload
def get_user_pages_fast_only(mm: MM, start: int, nr_pages: int, gup_flags: int = 0, *, acquire: _Acquire = "leaf",
                             output: type[_Sink] | _Sink) -> _Sink: ...

@overload
def get_user_pages_remote(mm: MM, start: int, nr_pages: int, gup_flags: int = 0, *, acquire: _Acquire = "leaf",
                          output: type[PageList] | PageList = ...) -> PageList: ...
@overload
def get_user_pages_remote(mm: MM, start: int, nr_pages: int, gup_flags: int = 0, *, acquire: _Acquire = "leaf",
                          output: type[PageRanges] | PageRanges) -> PageRanges: ...
@overload
def get_user_pages_remote(mm: MM, start: int, nr_pages: int, gup_flags: int = 0, *, acquire: _Acquire = "leaf",
                          output: type[SGAppendTable] | SGAppendTable) -> SGAppendTable: ...
@overload
def get_user_pages_remote(mm: MM, start: int, nr_pages: int, gup_flags: int = 0, *, acquire: _Acquire = "leaf",
                          output: type[_Sink] | _Sink) -> _Sink: ...

@overload
def get_user_pages_unlocked(mm: MM, start: int, nr_pages: int, gup_flags: int = 0, *, acquire: _Acquire = "leaf",
                            output: type[PageList] | PageList = ...) -> PageList: ...
@overload
def get_user_pages_unlocked(mm: MM, start: int, nr_pages: int, gup_flags: int = 0, *, acquire: _Acquire = "leaf",
                            output: type[PageRanges] | PageRanges) -> PageRanges: ...
@overload
def get_user_pages_unlocked(mm: MM, start: int, nr_pages: int, gup_flags: int = 0, *, acquire: _Acquire = "leaf",
                            output: type[SGAppendTable] | SGAppendTable) -> SGAppendTable: ...
@overload
def get_user_pages_unlocked(mm: MM, start: int, nr_pages: int, gup_flags: int = 0, *, acquire: _Acquire = "leaf",
                            output: type[_Sink] | _Sink) -> _Sink: ...

@overload
def pin_user_pages(mm: MM, start: int, nr_pages: int, gup_flags: int = 0, *, acquire: _Acquire = "leaf",
                   output: type[PageList] | PageList = ...) -> PageList: ...
@overload
def pin_user_pages(mm: MM, start: int, nr_pages: int, gup_flags: int = 0, *, acquire: _Acquire = "leaf",
                   output: type[PageRanges] | PageRanges) -> PageRanges: ...
@overload
def pin_user_pages(mm: MM, start: int, nr_pages: int, gup_flags: int = 0, *, acquire: _Acquire = "leaf",
                   output: type[SGAppendTable] | SGAppendTable) -> SGAppendTable: ...
@overload
def pin_user_pages(mm: MM, start: int, nr_pages: int, gup_flags: int = 0, *, acquire: _Acquire = "leaf",
                   output: type[_Sink] | _Sink) -> _Sink: ...

@overload
def pin_user_pages_fast(mm: MM, start: int, nr_pages: int, gup_flags: int = 0, *, acquire: _Acquire = "leaf",
                        output: type[PageList] | PageList = ...) -> PageList: ...
@overload
def pin_user_pages_fast(mm: MM, start: int, nr_pages: int, gup_flags: int = 0, *, acquire: _Acquire = "leaf",
                        output: type[PageRanges] | PageRanges) -> PageRanges: ...
@overload
def pin_user_pages_fast(mm: MM, start: int, nr_pages: int, gup_flags: int = 0, *, acquire: _Acquire = "leaf",
                        output: type[SGAppendTable] | SGAppendTable) -> SGAppendTable: ...
@overload
def pin_user_pages_fast(mm: MM, start: int, nr_pages: int, gup_flags: int = 0, *, acquire: _Acquire = "leaf",
                        output: type[_Sink] | _Sink) -> _Sink: ...

@overload
def pin_user_pages_remote(mm: MM, start: int, nr_pages: int, gup_flags: int = 0, *, acquire: _Acquire = "leaf",
                          output: type[PageList] | PageList = ...) -> PageList: ...
@overload
def pin_user_pages_remote(mm: MM, start: int, nr_pages: int, gup_flags: int = 0, *, acquire: _Acquire = "leaf",
                          output: type[PageRanges] | PageRanges) -> PageRanges: ...
@overload
def pin_user_pages_remote(mm: MM, start: int, nr_pages: int, gup_flags: int = 0, *, acquire: _Acquire = "leaf",
                          output: type[SGAppendTable] | SGAppendTable) -> SGAppendTable: ...
@overload
def pin_user_pages_remote(mm: MM, start: int, nr_pages: int, gup_flags: int = 0, *, acquire: _Acquire = "leaf",
                          output: type[_Sink] | _Sink) -> _Sink: ...

@overload
def pin_user_pages_unlocked(mm: MM, start: int, nr_pages: int, gup_flags: int = 0, *, acquire: _Acquire = "leaf",
                            output: type[PageList] | PageList = ...) -> PageList: ...
@overload
def pin_user_pages_unlocked(mm: MM, start: int, nr_pages: int, gup_flags: int = 0, *, acquire: _Acquire = "leaf",
                            output: type[PageRanges] | PageRanges) -> PageRanges: ...
@overload
def pin_user_pages_unlocked(mm: MM, start: int, nr_pages: int, gup_flags: int = 0, *, acquire: _Acquire = "leaf",
                            output: type[SGAppendTable] | SGAppendTable) -> SGAppendTable: ...
@overload
def pin_user_pages_unlocked(mm: MM, start: int, nr_pages: int, gup_flags: int = 0, *, acquire: _Acquire = "leaf",
                            output: type[_Sink] | _Sink) -> _Sink: ...
