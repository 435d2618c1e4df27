"""C peers: compile a file as the extensions are compiled, and call it without the GIL."""
import ctypes
import hashlib
import os
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path

import mmcore

INCLUDE = Path(mmcore.__file__).parent / "core"
# The extensions' own flags (setup.py), and what a shared object needs.
CFLAGS = ["-O3", "-std=gnu11", "-fno-strict-aliasing", "-fPIC", "-shared", "-pthread"]
WALKS = ("peer_page", "peer_head", "peer_run", "peer_range")


class NoPeers(Exception):
    """Say why there are no C peers here."""


def compiler():
    """Return the command of the C compiler that Python extensions are built with. Raises NoPeers when there is none."""
    command = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    if not shutil.which(command[0]):
        raise NoPeers(f"no C compiler ({command[0]})")
    return command


def flags():
    """Return Python's own flags, the extensions', and those of MMCORE_CFLAGS."""
    return [*shlex.split(sysconfig.get_config_var("CFLAGS") or ""), *CFLAGS,
            *os.environ.get("MMCORE_CFLAGS", "").split()]


def build(source):
    """Compile a C file and return the path of the shared object, next to it when that can be written.

    It is built again when the file, a header, a flag or the compiler changes. Raises NoPeers when it cannot be built.
    """
    source = Path(source)
    if not source.is_file():
        raise NoPeers(f"no C source ({source.name})")
    command = [*compiler(), *flags(), f"-I{INCLUDE}"]
    seen = hashlib.sha256(" ".join(command).encode())
    for path in [source, *sorted(INCLUDE.glob("*.h"))]:
        seen.update(path.read_bytes())
    name = f"{source.stem}-{seen.hexdigest()[:16]}.so"
    folder = source.parent
    if not os.access(folder, os.W_OK):
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mmcore"
        folder.mkdir(parents=True, exist_ok=True)
    target = folder / name
    if target.exists():
        return target
    handle, temporary = tempfile.mkstemp(suffix=".tmp", dir=folder)
    os.close(handle)
    try:
        done = subprocess.run([*command, str(source), "-o", temporary], capture_output=True, text=True)
        if done.returncode:
            raise NoPeers(f"{source.name} does not compile: {done.stderr.strip().splitlines()[-1:] or done.returncode}")
        for old in folder.glob(f"{source.stem}-*.so"):
            old.unlink(missing_ok=True)
        os.chmod(temporary, 0o755)
        os.replace(temporary, target)
    finally:
        Path(temporary).unlink(missing_ok=True)
    return target


class Peers:
    """The four walks of unpin.c, on the struct pages of a Memory.

    They change its counters behind the engine's back: nr_foll_pin_released does not move.
    """

    def __init__(self, source):
        self.library = ctypes.CDLL(str(build(source)))
        for name in WALKS:
            walk = getattr(self.library, name)
            walk.restype = ctypes.c_int64
            walk.argtypes = [ctypes.c_void_p, ctypes.c_uint64 if name == "peer_range" else ctypes.c_void_p,
                             ctypes.c_uint64, ctypes.c_uint64]

    def on_list(self, name, mem, pages):
        """Return a function that drops one pin of each page of a PageList by a walk: "page", "head" or "run"."""
        pfns = pages.pfns
        return self._bind(f"peer_{name}", mem, pfns.ctypes.data, len(pfns), pfns)

    def on_range(self, mem, pfn, nr):
        """Return a function that drops one pin of each of nr pages from pfn on."""
        return self._bind("peer_range", mem, pfn, nr, None)

    def _bind(self, name, mem, where, nr, keep):
        walk, base, zero = getattr(self.library, name), mem.pages.ctypes.data, mem.zero_page.pfn

        def call(keep=keep):
            released = walk(base, where, nr, zero)
            if released < 0:
                raise RuntimeError(f"{name}: entry {-1 - released} has no pin to drop, or no reference would be left")
            return released
        return call
