"""What does registering a buffer cost: the scenario of `mmcore register`.

The same page list is pinned and released by every release generation of the engine, in
interleaved rounds, and beside them by the running kernel through io_uring. Then phase by phase,
and, if asked, with another backing.
`register()` returns plain data; printing it is the command line's part.
"""

import contextlib
import errno
import platform
import statistics
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass

import numpy as np

from mmcore.core.errors import MMError
from mmcore.live.backing import describe, physical_runs
from mmcore.live.buffer import buffer
from mmcore.live.capture import capture
from mmcore.live.errors import NotPossible
from mmcore.live.iouring import MAX_IOVEC, kernel_register, predict_iouring_pins
from mmcore.live.limits import available_memory, fit, limits
from mmcore.live.pagemap import (
    KPF_ANON, KPF_COMPOUND_HEAD, KPF_COMPOUND_TAIL, KPF_HUGE, KPF_SWAPBACKED, KPF_THP,
)
from mmcore.live.units import format_size, round_up

from . import costmodel
from .phases import engine_phases

LIST_RELEASES = ("page", "head", "run")
MODEL_SEED = 6
MODEL_HUGE = 2 << 20        # bytes of a huge folio in the model
MODEL_SPARE = 64 << 20      # bytes beyond the buffer, for what the engine takes for itself
MODEL_PIECE = 32            # longest stretch of consecutive PFNs in the model's base pages
MODEL_NEEDS = 256           # bytes that a page of it takes here: its struct page, lists, arrays, page tables


@dataclass
class Layout:
    """An engine and the page list of one buffer in it, with the folio of each page."""

    mem: object
    pages: object            # PageList, PFN 0 = hole
    pfns: np.ndarray
    heads: np.ndarray
    orders: np.ndarray
    flags: np.ndarray        # kpageflags words
    mm: object = None        # the address space that maps the pages, and holds them
    addr: int = 0            # of the buffer in it

    def backing(self):
        """Tell what backs the pages: live.Backing."""
        return describe(self.pfns, self.heads, self.orders, self.flags, self.mem.page_size)


def model_layout(size, backing, page_size=4096):
    """Build a buffer of size bytes in a synthetic engine; returns Layout.

    "4k", "shmem": base pages in a lightly shuffled order, as a machine that ran a while
    gives them; "thp": order-9 folios, base pages for the rest; "hugetlb": a pool of 2 MiB.
    Raises MMError where the engine's memory cannot be reserved, or would not be there when it is used.
    """
    import mmcore

    npages = round_up(size, page_size) // page_size
    room = available_memory()
    if room is not None and npages * MODEL_NEEDS > room:
        raise MMError(errno.ENOMEM, f"a model of {format_size(size)} takes {format_size(npages * MODEL_NEEDS)}, and "
                                    f"{format_size(room)} of memory is available; ask for less")
    order = (MODEL_HUGE // page_size).bit_length() - 1
    huge = npages >> order
    if backing == "hugetlb":
        huge = (npages + (1 << order) - 1) >> order
        npages = huge << order
    pool = {MODEL_HUGE: huge} if backing == "hugetlb" else None
    mem_size = round_up(npages * page_size + MODEL_SPARE, 4 << 20)
    mem = mmcore.Memory(mem_size, page_size=page_size, hugetlb=pool)
    try:
        if backing in ("4k", "shmem"):
            huge = 0
        folios = np.array(
            [mmcore.folio_alloc(mem, order, hugetlb=backing == "hugetlb").pfn for _ in range(huge)],
            np.uint64,
        )
        inside = np.arange(1 << order, dtype=np.uint64)
        large = (folios[:, None] + inside[None, :]).reshape(-1)
        rest = npages - len(large)
        small = np.zeros(0, np.uint64)
        if rest:
            small = _lightly_shuffled(np.array(mmcore.alloc_pages_bulk(mem, rest).pfns))
        pfns = np.concatenate((large, small))
        heads = np.concatenate((np.repeat(folios, 1 << order), small))
        orders = np.concatenate((np.full(len(large), order), np.zeros(rest))).astype(np.uint8)
        return Layout(
            mem, mmcore.PageList(mem, pfns), pfns, heads, orders,
            _model_flags(pfns, heads, orders, backing),
        )
    except BaseException:
        mem.close()
        raise


def _lightly_shuffled(pfns):
    """Cut into pieces of 1 to MODEL_PIECE pages and put the pieces in another order."""
    rng = np.random.default_rng(MODEL_SEED)
    cuts = np.cumsum(rng.integers(1, MODEL_PIECE + 1, len(pfns)))
    pieces = np.split(pfns, cuts[cuts < len(pfns)])
    return np.concatenate([pieces[i] for i in rng.permutation(len(pieces))])


def _model_flags(pfns, heads, orders, backing):
    def bit(number):
        return np.uint64(1 << number)

    flags = np.full(len(pfns), bit(KPF_SWAPBACKED))
    if backing != "shmem":
        flags |= bit(KPF_ANON)
    large = orders > 0
    flags[large & (pfns == heads)] |= bit(KPF_COMPOUND_HEAD)
    flags[large & (pfns != heads)] |= bit(KPF_COMPOUND_TAIL)
    flags[large] |= bit(KPF_HUGE if backing == "hugetlb" else KPF_THP)
    return flags


def live_layout(snapshot):
    """Build the engine of a capture; returns Layout."""
    engine = snapshot.replay()
    return Layout(
        engine.mem, engine.pages, snapshot.pfns, snapshot.heads, snapshot.orders, snapshot.flags,
        engine.mm, snapshot.addr,
    )


@contextlib.contextmanager
def model_space(size, backing, touched=True):
    """Give (mm, addr): a buffer of this backing in an address space of its own, populated or not touched yet."""
    import mmcore as mmc

    huge = round_up(size, MODEL_HUGE)
    pool = {MODEL_HUGE: huge // MODEL_HUGE} if backing == "hugetlb" else None
    room = round_up(huge + huge // 256 + MODEL_SPARE, 4 << 20)
    with mmc.Memory(room, thp="always" if backing == "thp" else "never", hugetlb=pool) as mem:
        mm = mmc.MM(mem)
        kind = mmc.MAP_SHARED if backing == "shmem" else mmc.MAP_PRIVATE
        hugetlb = mmc.MAP_HUGETLB if backing == "hugetlb" else 0
        length = huge if backing == "hugetlb" else round_up(size, mem.page_size)
        addr = mm.mmap(length, flags=kind | mmc.MAP_ANONYMOUS | hugetlb)
        if touched:
            mm.touch(addr, length)
        yield mm, addr
        mm.exit()


def touch_and_free(size, backing, rounds=3):
    """Return the ns that the engine takes to fault a buffer of this backing in, and to unmap it: medians."""
    taken = []
    for _ in range(rounds):
        with model_space(size, backing, touched=False) as (mm, addr):
            length = mm.vmas[0].end - addr
            times = [time.thread_time_ns()]
            mm.touch(addr, length)
            times.append(time.thread_time_ns())
            mm.munmap(addr, length)
            times.append(time.thread_time_ns())
            taken.append(times)
    return _median(t[1] - t[0] for t in taken), _median(t[2] - t[1] for t in taken)


def acquire_rows(mm, addr, npages, rounds=9):
    """Acquire a buffer by its addresses and release it; return one dict a way: get, pin, longterm.

    Each is one call of the fast family for the whole buffer, in interleaved rounds; ns are
    medians, a page; pages is how many it got. Raises MMError where it gets none.
    """
    import mmcore as mmc

    ways = {
        "get": (mmc.get_user_pages_fast, 0, mmc.release_pages),
        "pin": (mmc.pin_user_pages_fast, 0, mmc.unpin_user_pages),
        "longterm": (mmc.pin_user_pages_fast, int(mmc.FOLL_LONGTERM), mmc.unpin_user_pages),
    }
    mem = mm.mem
    times = {name: [] for name in ways}
    updates, got = {}, {}
    names = list(ways)
    for turn in range(rounds + 1):      # the first one warms up, and counts
        for name in names[turn % 3:] + names[:turn % 3]:
            call, flags, release = ways[name]
            mem.reset_opstats()
            start = time.perf_counter_ns()
            pages = call(mm, addr, npages, int(mmc.FOLL_WRITE) | flags)
            between = time.perf_counter_ns()
            if turn == 0:
                updates[name], got[name] = _updates(mem), len(pages)
            begin = time.perf_counter_ns()
            release(pages)
            end = time.perf_counter_ns()
            if turn:
                times[name].append((between - start, end - begin))
    return [
        {
            "acquire": name, "pages": got[name], "updates": updates[name],
            "acquire_ns_per_page": _median(a for a, _ in times[name]) / got[name],
            "release_ns_per_page": _median(b for _, b in times[name]) / got[name],
        }
        for name in ways
    ]


def acquire_report(layout, live, backing, rounds):
    """acquire_rows() of the buffer; with a model, of one like it. {"rows", "reason"}."""
    try:
        if layout.mm is not None:
            rows = acquire_rows(layout.mm, layout.addr, len(layout.pfns), rounds)
        elif not live:
            with model_space(len(layout.pfns) * layout.mem.page_size, backing) as (mm, addr):
                rows = acquire_rows(mm, addr, len(layout.pfns), rounds)
        else:
            return {"rows": [], "reason": "the replayed capture has no address space"}
    except MMError as error:
        return {"rows": [], "reason": str(error)}
    return {"rows": rows, "reason": ""}


def phase_report(layout, live, backing, rounds):
    """Engine phases of registering the buffer; with a model, of one like it. {"rows", "reason"}.

    First touch and freeing are those of a modelled buffer of its size and its commonest folios.
    """
    size = len(layout.pfns) * layout.mem.page_size
    like = backing if not live else _backing_of(layout)
    try:
        fault_in, free = touch_and_free(size, like)
        if layout.mm is not None:
            rows = engine_phases(layout.mm, layout.addr, size, fault_in=fault_in, free=free, rounds=rounds)
        elif not live:
            with model_space(size, backing) as (mm, addr):
                rows = engine_phases(mm, addr, size, fault_in=fault_in, free=free, rounds=rounds)
        else:
            return {"rows": [], "reason": "the replayed capture has no address space"}
    except MMError as error:
        return {"rows": [], "reason": str(error)}
    return {"rows": rows, "reason": ""}


def _backing_of(layout):
    """Return the backing that most of the pages have."""
    if np.any(layout.flags >> np.uint64(KPF_HUGE) & np.uint64(1)):
        return "hugetlb"
    huge = np.count_nonzero(layout.orders >= (MODEL_HUGE // layout.mem.page_size).bit_length() - 1)
    if 2 * huge > np.count_nonzero(layout.pfns):
        return "thp"
    anon = np.count_nonzero(layout.flags >> np.uint64(KPF_ANON) & np.uint64(1))
    return "4k" if 2 * anon >= np.count_nonzero(layout.pfns) else "shmem"


def release_rows(pages, rounds=9):
    """Pin and release a PageList by each release generation; return one dict a generation.

    "page", "head", "run" release the list; "range" pins and releases its physical runs.
    Updates are atomic changes of counters in struct pages (opstats); ns are medians of the
    interleaved rounds, a page; ratio is the median over rounds of page's time over this one's.
    """
    import mmcore

    mem = pages.mem
    pfns = np.asarray(pages.pfns)
    npages = int(np.count_nonzero(pfns))
    if not npages:
        raise ValueError("no page of the buffer is present, so nothing can be pinned; touch it first")
    firsts, counts = physical_runs(pfns)
    ranges = mmcore.PageRanges(mem, pfns[firsts], counts)
    variants = [(name, pages, {"release": name}) for name in LIST_RELEASES]
    variants.append(("range", ranges, {}))

    updates = {}
    for name, what, how in variants:       # also the warm-up: not timed
        mem.reset_opstats()
        mmcore.grab_pages(what)
        pin = _updates(mem)
        mem.reset_opstats()
        mmcore.unpin_user_pages(what, **how)
        updates[name] = pin, _updates(mem)

    times = {name: [] for name, _, _ in variants}
    for turn in range(rounds):
        # Each round starts with another generation: the first one pays for a cold cache.
        first = turn % len(variants)
        for name, what, how in variants[first:] + variants[:first]:
            start = time.perf_counter_ns()
            mmcore.grab_pages(what)
            between = time.perf_counter_ns()
            mmcore.unpin_user_pages(what, **how)
            end = time.perf_counter_ns()
            times[name].append((between - start, end - between))
    return [
        {
            "release": name,
            "pin_updates": updates[name][0],
            "unpin_updates": updates[name][1],
            "pin_ns_per_page": _median(pin for pin, _ in times[name]) / npages,
            "unpin_ns_per_page": _median(unpin for _, unpin in times[name]) / npages,
            "ratio": _median(
                base[1] / max(1, mine[1]) for base, mine in zip(times["page"], times[name])
            ),
        }
        for name, _, _ in variants
    ]


def _updates(mem):
    stats = mem.opstats()
    return int(stats["ref_atomics"] + stats["pincount_atomics"])


def _median(values):
    return statistics.median(list(values))


def kernel_row(buf, layout, rounds, page_ns):
    """Register buf with io_uring; return a dict with times, counts and the prediction.

    layout is None where PFNs are not readable: then nothing is predicted. page_ns is the
    engine's unpin time of "page", for the ratio. Not possible: a dict with the reason.
    """
    try:
        measured = kernel_register(buf, rounds, clock=time.thread_time_ns)
    except NotPossible as error:
        return {"possible": False, "reason": error.reason, "remedy": error.remedy}
    unpin = _median(measured.unregister_ns) / measured.pages
    row = {
        "possible": True,
        "kernel": platform.release(),
        "iovecs": measured.iovecs,
        "pin_ns_per_page": _median(measured.register_ns) / measured.pages,
        "unpin_ns_per_page": unpin,
        "ratio": page_ns / unpin if unpin else None,
        "counted": _counted(measured),
        "no_counts": measured.no_counts,
        "predicted": None,
        "equal": None,
    }
    if layout is not None and np.all(layout.pfns != 0):
        # Every iovec is a registered buffer of its own and is judged alone.
        predicted = predict_iouring_pins(
            layout.pfns, layout.heads, layout.orders, MAX_IOVEC // layout.mem.page_size
        )
        row["predicted"] = asdict(predicted)
        row["equal"] = _equal(row["counted"], predicted)
    return row


def _counted(measured):
    """Return what the kernel counted, in pages: of each kind what most rounds agree on."""
    counted = {
        "vmpin_at_register": _mode(measured.vmpin_at_register),
        "vmpin_at_unregister": _mode(measured.vmpin_at_unregister),
    }
    if measured.at_register is not None:
        acquired, released = _mode(measured.at_register)
        counted |= {
            "acquired": acquired, "released_at_register": released,
            "released_at_unregister": _mode(measured.at_unregister)[1],
        }
    return counted


def _mode(values):
    return Counter(values).most_common(1)[0][0]


def _equal(counted, predicted):
    keys = ("acquired", "released_at_register", "released_at_unregister")
    pins = all(counted[key] == getattr(predicted, key) for key in keys) if keys[0] in counted else None
    vmpin = counted["vmpin_at_register"] == -counted["vmpin_at_unregister"] == predicted.charge
    return {"pins": pins, "vmpin": vmpin}


def register(size=256 << 20, backing="thp", *, pid=None, addr=None, length=None, rounds=9,
             model=False, what_if=None, calibration=None):
    """Run the scenario; return plain data, ready for JSON.

    A buffer of size bytes with a backing, or [addr, addr + length) of process pid, or (model)
    a synthetic layout, which also stands in where PFNs cannot be read or off Linux.
    what_if: a backing that it has not; what it would cost then, by a costmodel.Calibration.
    Raises NotPossible (no hugetlb pool; another process's PFNs unreadable) and OSError.
    """
    with contextlib.ExitStack() as stack:
        why_model = "asked for" if model else ""
        remedy = ""
        buf = snapshot = None
        if pid is not None:
            snapshot = capture(pid, addr, length)
        elif not model:
            if not sys.platform.startswith("linux"):
                why_model, remedy = f"this is {sys.platform}, not Linux", "run on Linux"
            else:
                buf = stack.enter_context(buffer(size, backing, populate=False))
                fault_in = buf.populate(time.thread_time_ns)
                try:
                    snapshot = capture(buf)
                except NotPossible as error:
                    why_model, remedy = error.reason, error.remedy
        layout = live_layout(snapshot) if snapshot else model_layout(
            buf.length if buf else size, backing)
        try:
            report = _report(layout, snapshot, buf, backing, rounds,
                             {"reason": why_model, "remedy": remedy})
        finally:
            layout.pages = layout.mm = None
            layout.mem.close()
        if report["kernel"]["possible"]:
            start = time.thread_time_ns()
            buf.close()
            free = time.thread_time_ns() - start
            pages = report["backing"]["length"] // snapshot.page_size if snapshot else report["backing"]["pages"]
            report["kernel"] |= {"fault_in_ns_per_page": fault_in / pages, "free_ns_per_page": free / pages}
        report["what_if"] = what_if_report(report, what_if, calibration) if what_if else None
        return report


def what_if_report(report, backing, calibration):
    """Return what registering it would cost with another backing: intervals in ns, beside what was measured now."""
    nbytes = report["backing"]["length"]
    expected = calibration.predict(backing, nbytes)
    kernel, pages = report["kernel"], report["backing"]["pages"]
    now = {}
    if kernel["possible"]:
        now = {"fault_in": kernel["fault_in_ns_per_page"], "register": kernel["pin_ns_per_page"],
               "unregister": kernel["unpin_ns_per_page"], "free": kernel["free_ns_per_page"]}
        now = {phase: value * pages for phase, value in now.items()}
        now["total"] = sum(now.values())
    layout = model_layout(nbytes, backing)
    try:
        engine = next(row for row in release_rows(layout.pages, 1) if row["release"] == "run")
        folios = layout.backing().folios
    finally:
        layout.pages = None
        layout.mem.close()
    doubts = calibration.doubts() + [text for text in [calibration.doubt_of_size(backing, nbytes)] if text]
    return {
        "backing": backing, "nbytes": nbytes, "confidence": costmodel.CONFIDENCE,
        "phases": {phase: {"low": one.low, "middle": one.middle, "high": one.high, "now": now.get(phase)}
                   for phase, one in expected.items()},
        "folios": folios, "unpin_updates": engine["unpin_updates"], "pin_updates": engine["pin_updates"],
        "calibration": {"date": calibration.date, "kernel": calibration.kernel, "cpu": calibration.cpu,
                        "sessions": len(calibration.sessions),
                        "runs": sum(sample["backing"] == backing for sample in calibration.samples),
                        "spread": calibration.spread(backing), "doubts": doubts},
    }


def _report(layout, snapshot, buf, backing, rounds, why_model):
    what = snapshot.backing() if snapshot else layout.backing()
    rows = release_rows(layout.pages, rounds)
    layout.mem.check()
    stats = layout.mem.vmstat()
    live = snapshot is not None
    report = {
        "source": "live" if live else "model",
        "why_model": None if live else why_model,
        "buffer": {
            "pid": snapshot.pid if live else None,
            "own": buf is not None,
            "addr": snapshot.addr if live else None,
            "length": what.length,
            "asked_backing": backing if buf or not live else None,
            "moved": snapshot.moved if live else 0,
        },
        "backing": what.as_dict(),
        "memlock": _memlock(what.length, snapshot),
        "rounds": rounds,
        "engine": rows,
        "acquire": acquire_report(layout, live, backing, rounds),
        "phases": phase_report(layout, live, backing, min(rounds, 5)),
        "pins_left": stats["nr_foll_pin_acquired"] - stats["nr_foll_pin_released"],
    }
    if buf is not None:
        report["kernel"] = kernel_row(
            buf, layout if live else None, rounds, rows[0]["unpin_ns_per_page"])
    elif live:
        report["kernel"] = {
            "possible": False,
            "reason": f"the buffer is process {snapshot.pid}'s, and io_uring registers only the "
                      "caller's own memory",
            "remedy": "run mmcore register --size on a buffer of its own",
        }
    else:
        report["kernel"] = {
            "possible": False, "reason": "a model has no buffer that the kernel could register",
            "remedy": "run without --model on Linux",
        }
    return report


def _memlock(needed, snapshot):
    try:
        have = snapshot.limits if snapshot else limits()
    except NotPossible as error:
        return {"needed": needed, "limit": None, "current": None, "verdict": "unknown",
                "reason": error.reason, "remedy": error.remedy}
    return asdict(fit(needed, have))
