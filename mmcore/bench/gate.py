"""Instructions of the hot loops, counted by callgrind: a measure that other processes and clocks do not change.

Each loop does its job on some pages once, and then twice as often; the difference is what the job itself takes. A call
of getppid() marks where one part ends and the next begins: callgrind writes what it counted at each.
"""
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import mmcore as mmc

PAGE, HUGE = 4096, 2 << 20
PAGES = 1 << 16             # of a list: 256 MiB; what a call costs by itself is small beside it
TOLERANCE = 0.05
MARK = "getppid"
WRITE = mmc.FOLL_WRITE


class Lists:
    """Pinned lists of folios of one order."""

    def __init__(self, order, arrange=None):
        from . import layouts
        self.layout = layouts.uniform(PAGES, order, arrange or layouts.in_order)

    def grab(self):
        mmc.grab_pages(self.layout.pages)

    def unpin(self, release):
        mmc.unpin_user_pages(self.layout.pages, release=release)

    def unpin_range(self):
        mmc.unpin_user_page_range_dirty_lock(self.layout.first, PAGES, False)

    def close(self):
        self.layout.close()


class Buffer:
    """A populated buffer of a process."""

    def __init__(self, backing):
        from . import gup
        self.machine = gup.Machine(PAGES * PAGE, backing)
        self.device = mmc.IBDevice(self.machine.mem)

    def pin(self, output=mmc.PageList, call=mmc.pin_user_pages_fast, flags=WRITE):
        mmc.unpin_user_pages(call(self.machine.mm, self.machine.addr, PAGES, flags, output=output))

    def register(self):
        umem = mmc.ib_umem_get(self.device, self.machine.mm, self.machine.addr, PAGES * PAGE, mmc.IB_ACCESS.LOCAL_WRITE)
        mmc.ib_umem_release(umem)

    def fault(self):
        mm, addr, size = self.machine.mm, self.machine.addr, PAGES * PAGE
        mm.madvise(addr, size, mmc.MADV_DONTNEED)
        mm.touch(addr, size)

    def fork(self):
        self.machine.mm.fork().exit()

    def close(self):
        self.device = None
        self.machine.close()


class Frames:
    """Base pages from the allocator and back."""

    def __init__(self):
        self.mem = mmc.Memory(4 * PAGES * PAGE)

    def pair(self):
        mmc.release_pages(mmc.alloc_pages_bulk(self.mem, PAGES))

    def close(self):
        self.mem.close()


def _shuffled(*args):
    from . import layouts
    return layouts.shuffled(*args)


def _lists(order, release, arrange=None):
    return (lambda: Lists(order, arrange),
            lambda scene: (scene.grab(), scene.unpin_range() if release == "range" else scene.unpin(release)))


def _buffer(backing, job, **how):
    return lambda: Buffer(backing), lambda scene: getattr(scene, job)(**how)


#: Name -> (scene, job). Releases are counted with the pins before them.
LOOPS = {f"pin + unpin {release}, order {order}": _lists(order, release)
         for order in (9, 0) for release in ("run", "head", "page", "range")}
LOOPS |= {
    "pin + unpin run, order 0 shuffled": _lists(0, "run", _shuffled),
    "pin + unpin run, order 4 shuffled": _lists(4, "run", _shuffled),
    "pin_user_pages_fast + unpin, leaves, list": _buffer("thp", "pin"),
    "pin_user_pages_fast + unpin, leaves, runs": _buffer("thp", "pin", output=mmc.PageRanges),
    "pin_user_pages_fast + unpin, base pages": _buffer("base", "pin"),
    "pin_user_pages + unpin, base pages": _buffer("base", "pin", call=mmc.pin_user_pages),
    "longterm pin + unpin, leaves": _buffer("thp", "pin", call=mmc.pin_user_pages, flags=WRITE | mmc.FOLL_LONGTERM),
    "ib_umem_get + release, leaves": _buffer("thp", "register"),
    "ib_umem_get + release, base pages": _buffer("base", "register"),
    "fault + zap, base pages": _buffer("base", "fault"),
    "fault + zap, leaves": _buffer("thp", "fault"),
    "fork + exit, base pages": _buffer("base", "fork"),
    "alloc_pages_bulk + release_pages": (Frames, Frames.pair),
}


def inside():
    """Run every loop between marks; what callgrind runs."""
    for make, job in LOOPS.values():
        scene = make()
        job(scene)              # the first time takes memory from the system
        for times in (1, 2):
            os.getppid()
            for _ in range(times):
                job(scene)
        os.getppid()
        scene.close()


def count(valgrind="valgrind"):
    """Run the loops under callgrind; returns {name: instructions a page}. Raises RuntimeError when callgrind fails."""
    root = Path(mmc.__file__).resolve().parent.parent
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        done = subprocess.run([valgrind, "--tool=callgrind", f"--callgrind-out-file={out}", f"--dump-before={MARK}",
                               sys.executable, "-c",
                               "from mmcore.bench import gate; gate.inside()"], capture_output=True, text=True,
                               cwd=root,
                              env={**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": str(root)})
        if done.returncode:
            raise RuntimeError(f"callgrind ended with {done.returncode}: {done.stderr.strip()[-800:]}")
        parts = sorted(out.parent.glob("out.*"), key=lambda path: int(path.suffix[1:]))
        totals = [int(re.search(r"^(?:totals|summary): (\d+)", path.read_text(), re.M)[1]) for path in parts]
    # Of each loop: what came before, one time, two times. The rest of the program has the last part.
    if len(totals) not in (3 * len(LOOPS), 3 * len(LOOPS) + 1):
        raise RuntimeError(f"callgrind wrote {len(totals)} parts for {len(LOOPS)} loops: who else calls {MARK}()?")
    return {name: (totals[3 * k + 2] - totals[3 * k + 1]) / PAGES for k, name in enumerate(LOOPS)}


def setting():
    """What the counts depend on besides the source: counts of another compiler or machine do not compare."""
    compiler = shutil.which((os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[-1]) or ""
    version = subprocess.run([compiler, "-dumpfullversion"], capture_output=True,
                             text=True).stdout.strip() if compiler else ""
    return {"machine": platform.machine(), "compiler": f"{Path(compiler).name} {version}",
            "python": platform.python_version_tuple()[:2][1]}


def judge(found, stored):
    """Compare counts with stored ones; returns [(name, stored, found, change, fails)], the worst first."""
    rows = []
    for name in dict.fromkeys([*stored, *found]):
        old, new = stored.get(name), found.get(name)
        change = None if old is None or new is None else new / old - 1
        # A loop that is gone is a gate that is open.
        rows.append((name, old, new, change, new is None or (change is not None and change > TOLERANCE)))
    return sorted(rows, key=lambda row: -(row[3] or 0))
