from .file import File
from .memory import Folio

def memfd_pin_folios(file: File, start: int, end: int, max_folios: int) -> tuple[list[Folio], int]: ...
