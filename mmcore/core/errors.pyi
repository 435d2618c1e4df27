class MMError(OSError):
    pfn: int | None
    addr: int | None
    def __init__(self, errno: int, reason: str, *, pfn: int | None = None, addr: int | None = None) -> None: ...

class InvalidArgument(MMError, ValueError):
    def __init__(self, reason: str, *, pfn: int | None = None, addr: int | None = None) -> None: ...

class BadPage(RuntimeError):
    law: str
    reason: str
    pfn: int | None
    def __init__(self, law: str, reason: str, *, pfn: int | None = None) -> None: ...
