"""live.buffer: real mappings, their backing, and how they end."""

import errno
import mmap
import sys

import numpy as np
import pytest
from live_support import PAGE, linux, or_skip

from mmcore import MMError, live
from mmcore.live.buffer import hugetlb_pool, hugetlb_size, thp_size
from mmcore.live.limits import available_memory

pytestmark = linux


@pytest.mark.parametrize("backing", ["4k", "thp", "shmem"])
def test_buffer_is_memory_that_views_share(backing):
    with live.buffer("2M", backing=backing) as buf:
        assert buf.length == len(buf) == 2 << 20 and buf.backing == backing
        assert buf.addr % PAGE == 0
        view = memoryview(buf)
        assert view.format == "B" and not view.readonly and view.nbytes == buf.length
        array = np.frombuffer(buf, np.uint8)
        assert array.ctypes.data == buf.addr
        view[5:8] = b"abc"
        assert bytes(array[5:8]) == b"abc" == buf[5:8]
        assert np.all(array[::PAGE] == 1), "every page was written"
        view.release()
        del array


@pytest.mark.parametrize("backing", ["4k", "thp", "shmem"])
def test_mapping_is_of_the_kind_that_was_asked_for(backing):
    with live.buffer("4M", backing=backing) as buf:
        vma, = live.vmas("self", buf.addr, buf.addr + buf.length)
        assert (vma.perms[3] == "s") == (backing == "shmem")
        assert ("hg" in vma.flags) == (backing == "thp")
        assert ("nh" in vma.flags) == (backing == "4k")
        assert vma.rss >= buf.length


@pytest.mark.parametrize("size", ["2M", "3M", "10M", 5 << 20, PAGE])
def test_thp_starts_on_a_huge_page_boundary(size):
    kept = [live.buffer(PAGE, "4k"), live.buffer(size, "thp"), live.buffer(size, "thp")]
    for buf in kept[1:]:
        assert buf.addr % thp_size() == 0 == buf.length % thp_size()
    for buf in kept:
        buf.close()


def test_size_is_rounded_up_to_a_page():
    with live.buffer(1) as buf:
        assert buf.length == PAGE
    with live.buffer(PAGE + 1) as buf:
        assert buf.length == 2 * PAGE


@pytest.mark.parametrize("size", [0, -1, "", "x", "12Q", "0M", 1 << 64])
def test_bad_size(size):
    with pytest.raises(ValueError):
        live.buffer(size)


def test_bad_arguments():
    with pytest.raises(ValueError, match="4k, thp, hugetlb, shmem"):
        live.buffer("2M", backing="2m")
    with pytest.raises(TypeError):
        live.buffer(None)


def test_too_much_is_refused_before_the_machine_is_harmed():
    room = available_memory()
    if room is None:
        pytest.skip("no MemAvailable")
    with pytest.raises(OSError, match="is available; ask for less") as caught:
        live.buffer(room * 4)
    assert caught.value.errno == 12


def test_close_is_idempotent_and_use_after_it_is_refused():
    buf = live.buffer("1M")
    buf.close()
    buf.close()
    assert buf.closed and "closed" in repr(buf)
    for use in (lambda: buf.addr, lambda: buf.length, lambda: buf[0], lambda: memoryview(buf)):
        with pytest.raises(ValueError):
            use()


def test_close_refuses_while_a_view_lives():
    buf = live.buffer("1M")
    view = buf.view
    with pytest.raises(BufferError, match="release every view"):
        buf.close()
    assert view[0] == 1, "a refused close changes nothing"
    view.release()
    buf.close()


def test_leaving_the_block_with_a_view_raises_unless_another_error_is_on_its_way():
    with pytest.raises(BufferError):
        with live.buffer("1M") as buf:
            view = buf.view
    view.release()
    buf.close()
    with pytest.raises(KeyError):
        with live.buffer("1M") as buf:
            view = buf.view
            raise KeyError("first")
    view.release()
    buf.close()


def test_hugetlb_without_a_pool_names_need_and_remedy_and_grows_nothing():
    size = hugetlb_size()
    if size is None:
        with pytest.raises(live.NotPossible, match="no hugetlb"):
            live.buffer("2M", backing="hugetlb")
        return
    before = hugetlb_pool(size)
    wanted = before["available"] + 3
    with pytest.raises(live.NotPossible) as caught:
        live.buffer(wanted * size, backing="hugetlb")
    assert f"{wanted} pages of" in caught.value.reason
    assert f"{before['available']} available" in caught.value.reason
    assert f"echo {before['total'] + 3} >" in caught.value.remedy
    assert hugetlb_pool(size) == before


def test_hugetlb_with_a_pool():
    size = hugetlb_size()
    if size is None or not hugetlb_pool(size)["available"]:
        pytest.skip("no hugetlb page is available, and tests never grow the pool")
    with or_skip(live.buffer, 1, backing="hugetlb") as buf:
        assert buf.length == size and buf.addr % size == 0
        vma, = live.vmas("self", buf.addr, buf.addr + buf.length)
        assert vma.hugetlb and vma.kernel_page_size == size


@pytest.mark.parametrize("npages, align", [(512, 512), (1536, 512), (64, 64)])
def test_alignment_does_not_rely_on_the_kernel(npages, align):
    # Recent kernels align by 2 MiB only, older ones not at all.
    module = sys.modules["mmcore.live.buffer"]
    made = [module._mmap_aligned(npages * PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, align * PAGE)
            for _ in range(8)]
    for buf in made:
        assert buf.addr % (align * PAGE) == 0
        buf[0] = buf[npages * PAGE - 1] = 7
    assert len({buf.addr for buf in made}) == 8
    for buf in made:
        buf.close()


# ---- what other kernels answer ---------------------------------------------------------------------------------------
def answering(monkeypatch, **answers):
    """Let madvise(2) fail with an errno by the name of the advice; returns the Buffer type that buffer() makes now."""
    module = sys.modules["mmcore.live.buffer"]
    numbers = {getattr(mmap, name, getattr(module, name, None)): error for name, error in answers.items()}

    class Answering(module.Buffer):
        def madvise(self, advice, *range):
            if advice in numbers:
                raise OSError(numbers[advice], "as told")
            return super().madvise(advice, *range)

    monkeypatch.setattr(module, "Buffer", Answering)
    return Answering


def test_kernels_without_populate_are_written_page_by_page(monkeypatch):
    answering(monkeypatch, MADV_POPULATE_WRITE=errno.EINVAL)
    with live.buffer("1M") as buf:
        assert bytes(buf[::PAGE]) == b"\1" * 256
        assert sum(vma.rss for vma in live.vmas("self", buf.addr, buf.addr + buf.length)) >= buf.length


def test_a_buffer_that_cannot_be_populated_is_unmapped_and_says_why(monkeypatch):
    made = []
    kind = answering(monkeypatch, MADV_POPULATE_WRITE=errno.ENOMEM)
    monkeypatch.setattr(kind, "close", lambda self: (made.append(self.closed), mmap.mmap.close(self)))
    with pytest.raises(MMError, match="populating 1 MiB of 4k failed: as told; memory or the hugetlb limit") as caught:
        live.buffer("1M")
    assert caught.value.errno == errno.ENOMEM and made == [False]


def test_base_pages_need_no_switch_on_kernels_without_thp(monkeypatch):
    answering(monkeypatch, MADV_NOHUGEPAGE=errno.EINVAL)
    with live.buffer("64K") as buf:
        assert buf.length == 64 << 10 and buf.backing == "4k"
    answering(monkeypatch, MADV_NOHUGEPAGE=errno.EPERM)
    with pytest.raises(OSError, match="as told"):
        live.buffer("64K")


def test_thp_where_there_is_none(monkeypatch):
    answering(monkeypatch, MADV_HUGEPAGE=errno.EINVAL)
    with pytest.raises(live.NotPossible, match="this kernel has no THP") as caught:
        live.buffer("2M", "thp")
    assert "--backing 4k or hugetlb" in caught.value.remedy


def test_elsewhere_than_on_linux(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(live.NotPossible, match="needs Linux, and this is darwin") as caught:
        live.buffer("1M")
    assert "register --model" in caught.value.remedy


def test_no_address_space(monkeypatch):
    module = sys.modules["mmcore.live.buffer"]
    monkeypatch.setattr(module, "available_memory", lambda: None)
    with pytest.raises(MMError, match="mmap of .* failed: .*; check ulimit -v") as caught:
        live.buffer(1 << 60, populate=False)
    assert caught.value.errno == errno.ENOMEM


def test_a_place_that_others_take_again_and_again(monkeypatch):
    """Every mapping lands off the boundary: after so many tries it is said, and nothing stays mapped."""
    module = sys.modules["mmcore.live.buffer"]
    closed = []

    class Elsewhere(module.Buffer):
        addr = 0x1000

        def close(self):
            closed.append(self)
            super().close()

    monkeypatch.setattr(module, "Buffer", Elsewhere)
    with pytest.raises(MMError, match="aligned to 2 MiB in 64 tries; another thread may be mapping memory") as caught:
        module._mmap_aligned(2 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, 2 << 20)
    assert caught.value.errno == errno.ENOMEM
    assert len(closed) == 65 and all(buf.closed for buf in closed)


def test_hugetlb_sizes_are_those_of_the_kernel(monkeypatch, tmp_path):
    module = sys.modules["mmcore.live.buffer"]
    monkeypatch.setattr(module, "_HUGEPAGES", str(tmp_path / "none"))
    assert hugetlb_size() is None
    with pytest.raises(live.NotPossible, match="no hugetlb pages"):
        live.buffer("2M", "hugetlb")
    monkeypatch.setattr(module, "_HUGEPAGES", str(tmp_path))
    assert hugetlb_size() is None, "a directory without a size"
    for kib, free, resv in ((65536, 5, 2), (32 << 20, 1, 3)):
        pool = tmp_path / f"hugepages-{kib}kB"
        pool.mkdir()
        for name, count in (("nr", 9), ("free", free), ("resv", resv)):
            (pool / f"{name}_hugepages").write_text(f"{count}\n")
    assert hugetlb_size() == 64 << 20, "without 2M the smallest"
    assert hugetlb_pool(64 << 20) == {"total": 9, "free": 5, "reserved": 2, "available": 3}
    assert hugetlb_pool(32 << 30)["available"] == 0, "more promised than free"
    (tmp_path / "hugepages-2048kB").mkdir()
    assert hugetlb_size() == 2 << 20


def test_thp_settings_that_are_not_there(monkeypatch, tmp_path):
    module = sys.modules["mmcore.live.buffer"]
    monkeypatch.setattr(module, "_THP", str(tmp_path))
    assert thp_size() == 2 << 20 and module.thp_enabled() == ""
    (tmp_path / "hpage_pmd_size").write_text("536870912\n")
    (tmp_path / "enabled").write_text("always [madvise] never\n")
    assert thp_size() == 512 << 20 and module.thp_enabled() == "madvise"
