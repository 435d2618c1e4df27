"""What the tests of live and of the command line share: what this machine can do, and children with less."""

import contextlib
import ctypes
import mmap
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

import mmcore as package
from mmcore.live.errors import NotPossible
from mmcore.live.longterm import filesystem_of

ROOT = Path(package.__file__).resolve().parent.parent      # children import the same mmcore as the tests
PAGE = os.sysconf("SC_PAGE_SIZE")
CAP_IPC_LOCK = 14
CAP_SYS_PTRACE = 19
CAP_SYS_ADMIN = 21
PR_CAPBSET_DROP = 24

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux")
root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a child with fewer capabilities")


def or_skip(function, *args, **kwargs):
    """Return function(...), or skip the test with the reason why this machine cannot do it."""
    try:
        return function(*args, **kwargs)
    except NotPossible as error:
        pytest.skip(str(error))


def engine_or_skip():
    """Skip unless the engine can claim folios at given PFNs."""
    if not hasattr(package, "folios_alloc_at"):
        pytest.skip("this build of the engine has no folios_alloc_at")
    return package


def address_of(area):
    """Return the address of a writable mapping."""
    return ctypes.addressof(ctypes.c_char.from_buffer(area))


def secret_memory(length):
    """Map memory that the kernel has no mapping of; skip where it has no such thing."""
    fd = ctypes.CDLL(None, use_errno=True).syscall(447, 0)      # memfd_secret, the same number everywhere
    if fd < 0:
        pytest.skip(f"memfd_secret: {os.strerror(ctypes.get_errno())}")
    os.ftruncate(fd, length)
    try:
        return mmap.mmap(fd, length)
    finally:
        os.close(fd)


def filesystem(path):
    """Return the type of the file system that a path is on."""
    device = os.stat(path).st_dev
    name = f"{os.major(device):02x}:{os.minor(device):02x}"
    return (filesystem_of(name) or ("unknown",))[0]


def scratch_file(folder, length):
    """Return a descriptor of a written file on a file system that writes back to a disk; skip without one."""
    for place in (folder, ROOT):
        if filesystem(place) in ("ext4", "xfs", "ext3", "ext2"):
            fd, path = tempfile.mkstemp(dir=place, prefix=".mmcore-test-")
            os.unlink(path)
            os.write(fd, b"f" * length)
            os.fsync(fd)
            return fd
    pytest.skip(f"neither {folder} nor {ROOT} is on ext4 or xfs")


def part_of(buf, first_page, npages):
    """Return a stand-in for a buffer that covers some pages of buf."""
    return SimpleNamespace(addr=buf.addr + first_page * PAGE, length=npages * PAGE)


def without_capabilities(*numbers):
    """Return a preexec_fn after which the program that is run lacks these capabilities."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def drop():
        for number in numbers:
            if prctl(PR_CAPBSET_DROP, number, 0, 0, 0):
                os._exit(99)

    return drop


def run(*words, preexec_fn=None, env=None):
    """Run Python with words, importing the mmcore under test; returns the finished process with its text."""
    return subprocess.run(
        [sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=120,
        preexec_fn=preexec_fn, env={**os.environ, "PYTHONPATH": str(ROOT), **(env or {})},
    )


def mmcore(*words, **how):
    """Run `mmcore` with words as a child process."""
    return run("-m", "mmcore.cli", *words, **how)


@contextlib.contextmanager
def child(code, preexec_fn=None):
    """Run Python code in a child while the block runs; gives (Popen, the words of the first line that it prints).

    The code ends by reading stdin, which is closed when the block ends; ask() makes it go on before.
    """
    started = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                               text=True, preexec_fn=preexec_fn, env={**os.environ, "PYTHONPATH": str(ROOT)})
    try:
        yield started, started.stdout.readline().split()
    finally:
        if started.poll() is None:
            with contextlib.suppress(BrokenPipeError, ValueError):
                started.communicate(timeout=60)


def ask(started, word="go"):
    """Send a child a line, and return the words that it answers with."""
    started.stdin.write(f"{word}\n")
    started.stdin.flush()
    return started.stdout.readline().split()


def made_up_capture(pages, start=1 << 30, vmas=None, page_size=4096, flags=None, **info):
    """Return a Capture that no machine has to have: pages is a list of (pfn, head, order) or None for a hole."""
    import numpy as np

    from mmcore import live
    from mmcore.live import pagemap as pm

    rows = [(0, 0, 0) if page is None else page for page in pages]
    pfns, heads, orders = (np.array(column, np.uint64) for column in zip(*rows))
    words = np.where(pfns != 0, pfns | pm.PM_PRESENT, np.uint64(0))
    if flags is None:
        flags = np.full(len(pfns), 1 << pm.KPF_ANON | 1 << pm.KPF_SWAPBACKED, np.uint64)
        flags[(orders > 0) & (pfns == heads)] |= np.uint64(1 << pm.KPF_COMPOUND_HEAD)
        flags[(orders > 0) & (pfns != heads)] |= np.uint64(1 << pm.KPF_COMPOUND_TAIL)
    flags = np.where(pfns != 0, np.asarray(flags, np.uint64), np.uint64(0))
    end = start + len(pfns) * page_size
    if vmas is None:
        vmas = [{"start": start, "end": end, "perms": "rw-p", "rss": page_size, "flags": ["rd", "wr"]}]
    info = {"pid": 1, "page_size": page_size, "moved": 0, "vmas": [{"flags": [], **vma} for vma in vmas],
            "limits": {"pid": 1, "soft": None, "hard": None, "locked": 0, "pinned": 0, "cap_ipc_lock": False}, **info}
    return live.Capture(info, {
        "starts": np.array([start], np.uint64), "counts": np.array([len(pfns)], np.uint64), "words": words,
        "flags": flags, "mapcounts": (pfns != 0).astype(np.uint64), "heads": heads, "orders": orders.astype(np.uint8)})
