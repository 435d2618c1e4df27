"""The prediction of io_uring's pins: against the cases of the rule, and against the running kernel."""

import errno
import mmap

import numpy as np
import pytest
from live_support import CAP_IPC_LOCK, PAGE, linux, or_skip, part_of, root, run, without_capabilities

from mmcore import live
from mmcore.live import iouring

TRIES = 5


def pages(*pieces):
    """Return (pfns, heads, orders) of pieces (head PFN, order, first index, last index)."""
    pfns, heads, orders = [], [], []
    for head, order, first, last in pieces:
        n = last - first + 1
        pfns += range(head + first, head + last + 1)
        heads += [head] * n
        orders += [order] * n
    return np.array(pfns, np.uint64), np.array(heads, np.uint64), np.array(orders, np.uint8)


A, B, C = 512, 1024, 2048


@pytest.mark.parametrize("layout, bvecs, charge", [
    (pages((A, 9, 3, 9)), 1, 512),                                              # part of one folio
    (pages((A, 9, 500, 511), (B, 9, 0, 511), (C, 9, 0, 6)), 3, 1536),
    (pages((A, 9, 500, 509), (B, 9, 0, 10)), None, 1024),                       # gap at A's end
    (pages((A, 9, 500, 511), (B, 9, 1, 10)), None, 1024),                       # gap at B's start
    (pages((A, 9, 0, 511), (B, 9, 0, 99), (C, 9, 0, 6)), None, 1536),           # middle not full
    (pages((A, 9, 0, 511), (B, 8, 0, 255)), None, 768),                         # sizes differ
    (pages((5, 0, 0, 0), (6, 0, 0, 0), (7, 0, 0, 0)), None, 3),                 # small pages stay
    (pages((A, 9, 0, 511), (A, 9, 0, 511)), 2, 512),                            # the same folio twice
    (pages((A, 9, 0, 5), (A, 9, 7, 9)), None, 512),                             # a hole inside
    (pages((A, 9, 3, 3)), None, 512),                                           # a single page
    (pages((A, 9, 0, 511), (5, 0, 0, 0)), None, 513),                           # large, then small
])
def test_prediction(layout, bvecs, charge):
    n = len(layout[0])
    got = live.predict_iouring_pins(*layout)
    kept = n if bvecs is None else bvecs
    assert got.acquired == n and got.bvecs == kept
    assert (got.released_at_register, got.released_at_unregister) == (n - kept, kept)
    assert got.charge == charge
    assert got.coalesced == (bvecs is not None)


def test_pieces_are_judged_apart_and_folios_charged_once():
    layout = pages((A, 9, 0, 511), (5, 0, 0, 0), (6, 0, 0, 0))
    got = live.predict_iouring_pins(*layout, max_pages=256)
    assert (got.iovecs, got.coalesced) == (3, 2)
    assert (got.acquired, got.bvecs, got.charge) == (514, 4, 514)


def test_prediction_refuses_holes_and_unequal_arrays():
    pfns, heads, orders = pages((A, 9, 0, 3))
    with pytest.raises(ValueError, match="arrays differ"):
        live.predict_iouring_pins(pfns, heads[:2], orders)
    pfns = pfns.copy()
    pfns[2] = 0
    with pytest.raises(ValueError, match="page 2 is not present"):
        live.predict_iouring_pins(pfns, heads, orders)


def test_nothing_to_register():
    empty = np.zeros(0, np.uint64)
    assert live.predict_iouring_pins(empty, empty, np.zeros(0, np.uint8)) == live.Prediction()


def agrees(target, max_pages=None, iovecs=1):
    """Assert that the kernel counts what the rule predicts for the pages of target."""
    for _ in range(TRIES):
        snapshot = or_skip(live.capture, target)
        measured = or_skip(live.kernel_register, target)
        if measured.at_register is None:
            pytest.skip(measured.no_counts)
        assert measured.iovecs == iovecs
        want = live.predict_iouring_pins(snapshot.pfns, snapshot.heads, snapshot.orders, max_pages)
        counted = measured.at_register[0], measured.at_unregister[0]
        predicted = (want.acquired, want.released_at_register), (0, want.released_at_unregister)
        # VmPin is of this process only: nothing else can show in it.
        assert measured.vmpin_at_register == [want.charge]
        assert measured.vmpin_at_unregister == [-want.charge]
        if counted == predicted:
            return want
    pytest.skip(f"other pins on the machine, or another rule: counted {counted}, predicted {predicted}")


@linux
@pytest.mark.parametrize("backing", ["4k", "thp", "shmem"])
def test_kernel_counts_what_is_predicted(backing):
    with live.buffer("16M", backing) as buf:
        agrees(buf)


@linux
@pytest.mark.parametrize("first, npages", [(3, 7), (3, 1), (500, 530), (511, 2), (0, 512), (700, 1024)])
def test_kernel_and_rule_agree_inside_folios(first, npages):
    with live.buffer("8M", "thp") as buf:
        agrees(part_of(buf, first, npages))


@linux
@pytest.mark.parametrize("gone", [0, 100, 511, 600])
def test_kernel_and_rule_agree_when_a_page_in_a_folio_is_another(gone):
    with live.buffer("4M", "thp") as buf:
        # The page's place in the folio stays empty; a base page takes its place in the buffer.
        buf.madvise(mmap.MADV_DONTNEED, gone * PAGE, PAGE)
        buf.madvise(mmap.MADV_NOHUGEPAGE)
        buf[gone * PAGE] = 1
        agrees(buf)


@linux
def test_kernel_and_rule_agree_on_several_iovecs(monkeypatch):
    monkeypatch.setattr(iouring, "MAX_IOVEC", 3 << 20)
    with live.buffer("8M", "thp") as buf:
        agrees(buf, max_pages=(3 << 20) // PAGE, iovecs=3)


@linux
def test_rounds_are_kept_apart():
    with live.buffer("1M") as buf:
        got = or_skip(live.kernel_register, buf, rounds=3)
        assert len(got.register_ns) == len(got.unregister_ns) == 3
        assert got.pages == (1 << 20) // PAGE
        with pytest.raises(ValueError):
            live.kernel_register(buf, rounds=0)


@linux
def test_registering_what_is_not_mapped_says_so():
    with live.buffer("1M") as buf:
        or_skip(live.kernel_register, buf)
        gone = part_of(buf, 0, 4)
    with pytest.raises(OSError, match="EFAULT") as caught:
        live.kernel_register(gone)
    assert caught.value.errno == errno.EFAULT


@linux
@root
def test_memlock_refusal_names_limit_and_remedy():
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 20, 1 << 20))\n"
        "from mmcore import live\n"
        "try: live.kernel_register(live.buffer('4M'))\n"
        "except live.NotPossible as error: print(error.reason); print(error.remedy)"
    )
    with live.buffer(PAGE) as buf:
        or_skip(live.kernel_register, buf)
    done = run("-c", code, preexec_fn=without_capabilities(CAP_IPC_LOCK))
    assert "ENOMEM" in done.stdout and "limit 1 MiB" in done.stdout, done.stderr
    assert "4096" in done.stdout.splitlines()[1]


@pytest.mark.parametrize("number, kind, words", [
    (errno.ENOSYS, live.NotPossible, "no io_uring"),
    (errno.EPERM, live.NotPossible, "io_uring_disabled"),
    (errno.EFAULT, OSError, "cannot be pinned"),
    (errno.EINVAL, OSError, "does not know"),
    (errno.EIO, OSError, "EIO"),
])
def test_errors_are_explained(number, kind, words):
    error = iouring._refusal("registering the buffer", number, 4096)
    assert isinstance(error, kind) and words in str(error)


# ---- what other machines answer --------------------------------------------------------------------------------------
class Ring:
    """A ring whose calls fail as told, in turn; 0: they do not."""

    def __init__(self, *answers):
        self.answers = list(answers)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def register(self, opcode, argument, count):
        return self.answers.pop(0)


@linux
def test_counts_that_cannot_be_read_are_left_out(monkeypatch):
    def refuse():
        raise live.NotPossible("the counters are hidden", "run as root")

    monkeypatch.setattr(iouring, "foll_pins", refuse)
    monkeypatch.setattr(iouring, "_Ring", lambda: Ring(0, 0))
    with live.buffer("64K") as buf:
        result = live.kernel_register(buf)
    assert "the counters are hidden" in result.no_counts and result.at_register is result.at_unregister is None
    assert len(result.register_ns) == len(result.unregister_ns) == 1 and result.vmpin_at_register == [0]


@linux
@pytest.mark.parametrize("answers, what", [((errno.EBUSY,), "registering"), ((0, errno.EINTR), "unregistering")])
def test_which_half_failed(monkeypatch, answers, what):
    monkeypatch.setattr(iouring, "_Ring", lambda: Ring(*answers))
    with live.buffer("64K") as buf, pytest.raises(OSError, match=f"{what} the buffer of 64 KiB failed") as caught:
        live.kernel_register(buf)
    assert caught.value.errno == answers[-1]


@linux
def test_more_pieces_than_one_call_takes(monkeypatch):
    monkeypatch.setattr(iouring, "MAX_IOVECS", 2)
    with live.buffer("64K") as buf:
        with pytest.raises(ValueError, match="64 KiB needs 3 iovecs, above 2"):
            live.kernel_register(buf, iovecs=[(buf.addr, PAGE)] * 3)


def test_rings_where_there_are_none(monkeypatch):
    monkeypatch.setattr(iouring.platform, "machine", lambda: "vax")
    with pytest.raises(live.NotPossible, match="system call numbers of vax are not known"):
        iouring._Ring()
    monkeypatch.undo()
    monkeypatch.setattr(iouring, "SYSCALLS", {**iouring.SYSCALLS, "io_uring_setup": 1 << 20})
    if iouring.platform.machine() in iouring.ARCHITECTURES:
        with pytest.raises(live.NotPossible, match="this kernel has no io_uring"):
            iouring._Ring()


@linux
@pytest.mark.parametrize("length, words", [(0, "no memory for a ring"), (PAGE, "memory ran out, or other registrations")])
def test_memory_that_ran_out(monkeypatch, length, words):
    monkeypatch.setattr(iouring, "fit", lambda *_: type("Fit", (), {"ok": True, "reason": "fits"}))
    error = iouring._refusal("it", errno.ENOMEM, length)
    assert isinstance(error, live.NotPossible) and words in error.reason and "ulimit -l" in error.remedy
