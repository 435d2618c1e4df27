"""Two worlds for one scenario: real processes that do as they are told, and address spaces of the engine.

Both have the methods of the scenario's words (write, read, fork, ...); state() tells of each page what /proc says, and
its first byte, so that the two can be compared after every step.
"""

import contextlib
import ctypes
import json
import mmap
import os
import signal
import socket
import time

import numpy as np
from live_support import PAGE, or_skip
from oracle_support import (
    ANON,
    HUGE,
    HUGETLB,
    MADV_HUGEPAGE,
    MADV_NOHUGEPAGE,
    MREMAP_FIXED,
    MREMAP_MAYMOVE,
    PRIVATE,
    SHARED,
    Area,
    advise,
    checked,
    libc,
)

import mmcore as mmc
from mmcore import live
from mmcore.live import pagemap as pm
from mmcore.live.iouring import _Ring
from mmcore.live.limits import status

ROOM = 4 * HUGE  # bytes of addresses that a scenario may use
PROCESSES = "abcd"
PAGES = {"4k": 8, "mthp 64k": 32, "thp": 1024, "hugetlb": 1024, "shmem": 8, "private file": 8}
ORDER = {"4k": 0, "mthp 64k": 4, "thp": 9, "hugetlb": 9, "shmem": 0, "private file": 0}


def canonical(rows):
    """Return the states of several processes with PFNs replaced by numbers in order of first sight: who shares what.

    rows: {name: [(PFN, pagemap bits, folio order, first byte) or None, a page each]}.
    """
    seen, out = {}, {}
    for name in sorted(rows):
        out[name] = [None if row is None else (seen.setdefault(row[0], len(seen)), *row[1:]) for row in rows[name]]
    return out


class Processes:
    """Real processes: a, forked by the test, and its descendants. Each reads its orders from a socket of its own."""

    def __init__(self, backing):
        self.backing = backing
        self.pairs = {name: socket.socketpair() for name in PROCESSES}
        for mine, _ in self.pairs.values():
            mine.settimeout(20)  # a process that died holds no other back
        self.pids = {}
        pid = os.fork()
        if pid == 0:
            _serve("a", self.pairs, backing)
        self.pids["a"] = pid
        self.base = self.ask("a", "base")

    def ask(self, who, *words):
        """Have a process do something; returns its answer, raises OSError with the errno it got."""
        mine = self.pairs[who][0]
        mine.sendall(json.dumps(words).encode() + b"\n")
        text = b""
        while not text.endswith(b"\n"):
            part = mine.recv(1 << 16)
            if not part:
                raise RuntimeError(f"process {who} died of {words}")
            text += part
        answer = json.loads(text)
        if isinstance(answer, dict):
            raise OSError(answer["errno"], f"{who}: {words}: {os.strerror(answer['errno'])}")
        return answer

    def fork(self, who, new):
        self.pids[new] = self.ask(who, "fork", new)
        # The parent closes its end only when the child serves it.
        self.ask(new, "base")

    def exit(self, who):
        self.pairs[who][0].sendall(b'["exit"]\n')
        pid = self.pids.pop(who)
        for _ in range(3000):  # a zombie has no memory any more
            try:
                if status(pid)["State"][0] in "ZX":
                    break
            except ProcessLookupError:
                break
            time.sleep(0.001)
        else:
            raise RuntimeError(f"process {who} does not end")

    def __getattr__(self, word):
        return lambda who, *args: self.ask(who, word, *args)

    def state(self):
        """Return {name: rows} for canonical()."""
        return {who: self._rows(pid) for who, pid in self.pids.items()}

    def _rows(self, pid):
        snapshot = or_skip(live.capture, pid, self.base, ROOM)
        told = (snapshot.words & (pm.PM_FILE | pm.PM_MMAP_EXCLUSIVE)) >> np.uint64(56)
        rows = []
        with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
            for i, pfn in enumerate(snapshot.pfns.tolist()):
                if not pfn:
                    rows.append(None)
                    continue
                memory.seek(self.base + i * PAGE)
                rows.append((pfn, int(told[i]), int(snapshot.orders[i]), memory.read(1)))
        return rows

    def close(self):
        """End all processes and wait for those that are this one's children."""
        for pid in list(self.pids.values()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for mine, theirs in self.pairs.values():
            mine.close()
            theirs.close()
        for pid in self.pids.values():
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _serve(name, pairs, backing):
    """The life of one real process: never returns."""
    try:
        # One CPU: pages that wait in another one's LRU batch look like referenced ones.
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        area = Area(ROOM - 2 * HUGE)
        base = real_memory(area, backing)
        ring = None
        while True:
            line = pairs[name][1].makefile("rb").readline()
            if not line:
                break
            word, *args = json.loads(line)
            answer = 0
            try:
                if word == "base":
                    answer = base
                elif word == "exit":
                    break
                elif word == "fork":
                    child = os.fork()
                    if child == 0:
                        name, ring = args[0], None
                        continue
                    answer = child
                elif word == "pin":
                    ring = ring or _Ring()
                    packed = ctypes.string_at((ctypes.c_size_t * 2)(base + args[0] * PAGE, args[1] * PAGE), 16)
                    number = ring.register(0, packed, 1)
                    if number:
                        raise OSError(number, "io_uring_register")
                elif word == "unpin":
                    ring.register(1, None, 0)
                else:
                    answer = _act(base, word, *args)
            except OSError as error:
                answer = {"errno": error.errno}
            pairs[name][1].sendall(json.dumps(answer).encode() + b"\n")
    finally:
        os._exit(0)


def _act(base, word, first, *args):
    addr = base + first * PAGE
    if word == "write":
        ctypes.memset(addr, ord(args[0]), 1)
    elif word == "read":
        return ctypes.string_at(addr, 1).decode("latin1")
    elif word == "munmap":
        checked(libc.munmap(addr, args[0] * PAGE), word)
    elif word == "mprotect":
        checked(libc.mprotect(addr, args[0] * PAGE, args[1]), word)
    elif word == "madvise":
        advise(addr, args[0] * PAGE, args[1])
    elif word == "mremap":
        n = args[0] * PAGE
        checked(libc.mremap(addr, n, n, MREMAP_MAYMOVE | MREMAP_FIXED, base + args[1] * PAGE), word)
    else:
        raise ValueError(word)
    return 0


def real_memory(area, backing):
    """Map a scenario's memory, and write its first pages; returns the address."""
    length = PAGES[backing] * PAGE
    if backing == "private file":
        fd = os.memfd_create("oracle")
        os.write(fd, b"".join(b"f" * PAGE for _ in range(length // PAGE)))
        addr = area.map(length, PRIVATE, fd)
        os.close(fd)
        return addr
    flags = (SHARED if backing == "shmem" else PRIVATE) | ANON | (HUGETLB if backing == "hugetlb" else 0)
    addr = area.map(length, flags)
    if backing == "4k":
        advise(addr, length, MADV_NOHUGEPAGE)
    elif backing in ("thp", "mthp 64k"):
        advise(addr, length, MADV_HUGEPAGE)
    return addr


class Spaces:
    """The same with MM: a, and what is forked of it."""

    def __init__(self, backing):
        huge = {"hugetlb": {"2M": 8}} if backing == "hugetlb" else {}
        self.mem = mmc.Memory("64M", thp="madvise", mthp=(4,) if backing == "mthp 64k" else (), **huge)
        self.mms = {"a": mmc.MM(self.mem)}
        self.base, self.tables = 1 << 32, {}
        mm, length = self.mms["a"], PAGES[backing] * PAGE
        flags, file = mmc.MAP_PRIVATE | mmc.MAP_ANONYMOUS, None
        if backing == "private file":
            flags, file = mmc.MAP_PRIVATE, mmc.File(self.mem, length, "tmpfs")
            file.write(0, b"f" * length)
        elif backing == "shmem":
            flags = mmc.MAP_SHARED | mmc.MAP_ANONYMOUS
        elif backing == "hugetlb":
            flags |= mmc.MAP_HUGETLB
        mm.mmap(length, flags=flags | mmc.MAP_FIXED, file=file, addr=self.base)
        if backing == "4k":
            mm.madvise(self.base, length, mmc.MADV_NOHUGEPAGE)
        elif backing in ("thp", "mthp 64k"):
            mm.madvise(self.base, length, mmc.MADV_HUGEPAGE)

    def fork(self, who, new):
        self.mms[new] = self.mms[who].fork()

    def exit(self, who):
        self.mms.pop(who).exit()

    def write(self, who, page, byte):
        self.mms[who].write(self.base + page * PAGE, byte.encode())
        return 0

    def read(self, who, page):
        return self.mms[who].read(self.base + page * PAGE, 1).decode("latin1")

    def munmap(self, who, page, n):
        self.mms[who].munmap(self.base + page * PAGE, n * PAGE)
        return 0

    def mprotect(self, who, page, n, prot):
        self.mms[who].mprotect(self.base + page * PAGE, n * PAGE, prot)
        return 0

    def madvise(self, who, page, n, advice):
        self.mms[who].madvise(self.base + page * PAGE, n * PAGE, advice)
        return 0

    def mremap(self, who, page, n, to):
        self.mms[who].mremap(self.base + page * PAGE, n * PAGE, n * PAGE, self.base + to * PAGE)
        return 0

    def pin(self, who, page, n):
        table = self.tables.setdefault(who, mmc.BufferTable(self.mms[who]))
        table.register([(self.base + page * PAGE, n * PAGE)])
        return 0

    def unpin(self, who):
        self.tables[who].unregister()
        return 0

    def state(self):
        """Return {name: rows} for canonical()."""
        return {who: self._rows(mm) for who, mm in self.mms.items()}

    def _rows(self, mm):
        words = mm.pagemap(self.base, ROOM // PAGE)
        rows = []
        for word in words.tolist():
            if not word >> 63:
                rows.append(None)
                continue
            page = self.mem.page(word & int(pm.PM_PFN_MASK))
            rows.append(
                (
                    page.pfn,
                    (word & int(pm.PM_FILE | pm.PM_MMAP_EXCLUSIVE)) >> 56,
                    page.folio.order,
                    bytes(mmc.page_address(page)[:1]) if page.refcount or page.folio.refcount else b"\0",
                )
            )
        return rows

    def close(self):
        """Give all back, and see that every law holds."""
        for table in self.tables.values():
            if table.buffers:
                table.unregister()
        self.tables.clear()
        for mm in self.mms.values():
            mm.exit()
        self.mem.check()
        stat = self.mem.vmstat()
        assert stat["nr_foll_pin_acquired"] == stat["nr_foll_pin_released"]
        self.mms.clear()
        self.mem.close()


def words_of(prot):
    """Return mprotect's number for "r", "rw" or ""."""
    return sum({"r": mmap.PROT_READ, "w": mmap.PROT_WRITE}[letter] for letter in prot)
