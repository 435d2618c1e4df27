"""Protection domains and memory regions: access rules, keys, close in any order, re-registration, leaks by name."""
import contextlib
import errno
import gc

import pytest

from mmcore import *
from rdma_support import PAGE, RO, RW, machine, mapped, nothing_kept, pins
from support import run

A = IB_ACCESS


@pytest.mark.parametrize("access, writable", [
    (0, False), (A.REMOTE_READ, False), (A.LOCAL_WRITE, True), (A.MW_BIND, True), (A.LOCAL_WRITE | A.REMOTE_ATOMIC, True),
    (A.RELAXED_ORDERING | A.ZERO_BASED | A.FLUSH_GLOBAL, False), (A.LOCAL_WRITE | A.REMOTE_WRITE, True)])
def test_what_is_pinned_for_writing(access, writable):
    assert ib_access_writable(access) is writable
    mem, mm, dev = machine()
    with ProtectionDomain(dev, mm) as pd, pd.reg_mr(mapped(mm, PAGE), PAGE, access) as mr:
        assert mr.umem.writable is writable and mr.access == access
        assert ("WEAK_ORDERING" in mr.umem.dma_attrs) is bool(access & A.RELAXED_ORDERING)


@pytest.mark.parametrize("access", [A.REMOTE_WRITE, A.REMOTE_ATOMIC, A.REMOTE_ATOMIC | A.MW_BIND, 1 << 10, 1 << 21, 1 << 40, -1])
def test_access_that_does_not_go_together(access):
    mem, mm, dev = machine()
    addr = mapped(mm, PAGE)
    with ProtectionDomain(dev, mm) as pd, nothing_kept(mem, mm), pytest.raises(InvalidArgument):
        pd.reg_mr(addr, PAGE, access)


@pytest.mark.parametrize("access", ["rw", None, 1.0, True])
def test_access_that_is_none(access):
    with pytest.raises(TypeError):
        ib_check_mr_access(access)


def test_keys_name_regions_that_are_open():
    mem, mm, dev = machine()
    addr = mapped(mm, 8 * PAGE)
    with ProtectionDomain(dev, mm) as pd:
        mrs = [pd.reg_mr(addr + i * PAGE, PAGE, RW) for i in range(4)]
        assert len({mr.lkey for mr in mrs}) == 4 and all(mr.rkey == mr.lkey for mr in mrs)
        old = mrs[1].lkey
        mrs[1].close()
        again = pd.reg_mr(addr, PAGE, RW)
        assert again.lkey != old and again.lkey >> 8 == old >> 8        # the index is used again, the key is not
        assert pd.mrs == [mrs[0], mrs[2], mrs[3], again]
    assert pins(mem) == 0 and mm.pinned_vm == 0


def test_close_is_ordered_and_idempotent():
    mem, mm, dev = machine()
    pd = ProtectionDomain(dev, mm)
    mr, other = (pd.reg_mr(mapped(mm, 4 * PAGE), 4 * PAGE, RW) for _ in range(2))
    mr.close()
    mr.close()
    assert mr.closed and mm.pinned_vm == 4
    pd.close()
    pd.close()
    assert other.closed and pd.closed and mm.pinned_vm == 0 and pins(mem) == 0
    with pytest.raises(InvalidArgument, match="closed"):
        pd.reg_mr(0x10000, PAGE, RW)
    for use in (lambda: mr.addr, lambda: mr.length, lambda: mr.read(0, 1), lambda: mr.rereg(access=RO), mr.__enter__, pd.__enter__):
        with pytest.raises(InvalidArgument, match="closed"):
            use()
    assert "closed" in repr(mr) and "closed" in repr(pd)


def test_a_region_that_cannot_be_closed_keeps_its_domain_open():
    mem, mm, dev = machine()
    pd = ProtectionDomain(dev, mm)
    addr = mapped(mm, 2 * PAGE)
    others = [pd.reg_mr(mapped(mm, PAGE), PAGE, RW)]
    mr = pd.reg_mr(addr, 2 * PAGE, RW)
    others.append(pd.reg_mr(mapped(mm, PAGE), PAGE, RW))
    page = mm.page_at(addr)
    unpin_user_page(page)
    with pytest.raises(BadPage):
        pd.close()
    assert not pd.closed and not mr.closed and pd.mrs == [mr] and mm.pinned_vm == 2
    assert all(other.closed for other in others)
    grab_pages(PageList(mem, [page.pfn]))
    pd.close()
    assert mr.closed and pins(mem) == 0


def test_T55_read_only_stays_read_only():
    mem, mm, dev = machine()
    addr = mapped(mm, 4 * PAGE)
    with ProtectionDomain(dev, mm) as pd:
        mr = pd.reg_mr(addr, PAGE, RO)
        with nothing_kept(mem, mm), pytest.raises(MMError) as caught:
            mr.rereg(access=RW)
        assert caught.value.errno == errno.EACCES and mr.access == RO and not mr.umem.writable
        mr.rereg(access=0)                                  # less is no question
        mr.rereg(addr=addr, length=2 * PAGE, access=RW)     # pinned anew: whatever was asked for
        assert mr.access == RW and mr.umem.writable and mr.length == 2 * PAGE and mm.pinned_vm == 2
        mr.rereg(access=RO)
        mr.rereg(access=RW)                                 # its pages were pinned for writing
        with nothing_kept(mem, mm), pytest.raises(MMError):
            mr.rereg(addr=0x10000, length=PAGE)
        assert mr.addr == addr
        with pytest.raises(InvalidArgument):
            mr.rereg(addr=addr)
    assert pins(mem) == 0 and mm.pinned_vm == 0


def test_remote_reads_need_the_right():
    mem, mm, dev = machine()
    addr = mapped(mm, 2 * PAGE)
    mm.write(addr, b"abcdef")
    with ProtectionDomain(dev, mm) as pd:
        assert pd.reg_mr(addr + 1, PAGE, RO).read(1, 3) == b"cde"
        with pytest.raises(MMError) as caught:
            pd.reg_mr(addr, PAGE, IB_ACCESS.LOCAL_WRITE).read(0, 1)
        assert caught.value.errno == errno.EACCES


def test_the_ledger_names_a_leaked_region():
    mem, mm, dev = machine()
    addr = mapped(mm, 8 * PAGE)
    with PinLedger(mem) as ledger, ledger.tag("whoever"):
        pd = ProtectionDomain(dev, mm)
        kept = pd.reg_mr(addr, 5 * PAGE, RW)
        for acquire in ("sink", "list"):
            for release in ("range", "array", "page"):
                pd.reg_mr(addr, 8 * PAGE, RO, acquire=acquire, release=release).close()
        assert ledger.by_holder() == {f"MR {addr:#x}+{5 * PAGE:#x}": 5}
        with pytest.raises(BadPage, match=f"MR {addr:#x}.*test_mr.py") as caught:
            ledger.assert_balanced()
        assert caught.value.pfn
        kept.close()
        ledger.assert_balanced()
        pages = pin_user_pages(mm, addr, 3, output=SGAppendTable)
        assert ledger.by_holder() == {"whoever": 3}
        unpin_user_pages(PageList(mem, [mm.page_at(addr + i * PAGE).pfn for i in range(3)]))
        assert len(pages)
        ledger.assert_balanced()


def test_nothing_keeps_a_closed_domain_alive():
    mem, mm, dev = machine()
    with ProtectionDomain(dev, mm) as pd:
        pd.reg_mr(mapped(mm, PAGE), PAGE, RW)
    del pd, dev, mm
    gc.collect()
    mem.close()


def test_wrong_domains():
    mem, mm, dev = machine()
    for device, space in ((Device(mem), mm), (dev, mem), (None, mm)):
        with pytest.raises(TypeError):
            ProtectionDomain(device, space)
    with pytest.raises(InvalidArgument):
        ProtectionDomain(dev, MM(Memory("16M")))


def test_threads_register_the_same_pages():
    import threading
    mem, mm, dev = machine(thp="always", iommu=True)
    addr = mapped(mm, 4 << 20)
    tables = [BufferTable(mm) for _ in range(2)]
    failed = []

    def regions(acquire, release):
        try:
            with ProtectionDomain(dev, mm) as pd:
                for i in range(40):
                    with pd.reg_mr(addr + i * PAGE, (4 << 20) - 2 * i * PAGE, RW, acquire=acquire, release=release) as mr:
                        assert mr.umem.num_pages == 1024 - 2 * i
        except BaseException as error:
            failed.append(error)

    def buffers(table):
        try:
            for i in range(40):
                table.register([(addr + i * PAGE, 2 << 20), (addr, 100)])
                table.unregister()
        except BaseException as error:
            failed.append(error)
    threads = [threading.Thread(target=regions, args=pair) for pair in (("sink", "range"), ("list", "array"), ("list", "page"))]
    threads += [threading.Thread(target=buffers, args=(table,)) for table in tables]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not failed and pins(mem) == mm.pinned_vm == dev.mappings == 0 and dev.iova_ranges == []
    assert dev.domain.stats["leaves"] == 0
    mem.check()


def test_what_a_region_says():
    mem, mm, dev = machine()
    addr = mapped(mm, 2 * PAGE)
    with ProtectionDomain(dev, mm) as pd:
        mr, ro = pd.reg_mr(addr, 2 * PAGE, RW), pd.reg_mr(addr, PAGE, RO)
        assert repr(mr) == f"<MR {mr.lkey:#x} {addr:#x}+{2 * PAGE:#x} writable>"
        assert repr(ro) == f"<MR {ro.lkey:#x} {addr:#x}+{PAGE:#x} read-only>"
        mr.close()
        assert repr(mr) == f"<MR {mr.lkey:#x} closed>" and "1 regions" in repr(pd)
    assert "closed" in repr(pd)


def test_a_domain_that_is_full_keeps_no_pins(monkeypatch):
    mem, mm, dev = machine()
    addr = mapped(mm, PAGE)
    # Pinning marks pages as accessed, and that stays.
    with ProtectionDomain(dev, mm) as pd, nothing_kept(mem, mm, ignore=("flags",)):
        monkeypatch.setattr(pd, "_enter", lambda mr: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            pd.reg_mr(addr, PAGE, RO)
    assert pins(mem) == 0 and mm.pinned_vm == 0


def test_a_region_whose_old_pages_cannot_be_given_back_stays_as_it_was():
    """Somebody dropped the pin of the region: the new translation is pinned, found useless, and given back."""
    mem, mm, dev = machine()
    addr, new = mapped(mm, PAGE), mapped(mm, PAGE)
    pd = ProtectionDomain(dev, mm)
    mr = pd.reg_mr(addr, PAGE, RW)
    page = mm.page_at(addr)
    unpin_user_page(page)
    with pytest.raises(BadPage):
        mr.rereg(addr=new, length=PAGE)
    assert mr.umem.address == addr and mm.page_at(new).folio.pincount == 0 and mm.pinned_vm == 1
    grab_pages(PageList(mem, [page.pfn]))
    mr.rereg(addr=new, length=PAGE)
    assert mr.umem.address == new and pins(mem) == 1
    pd.close()
    assert pins(mem) == 0


def test_a_region_that_can_be_found_is_whole():
    """A domain may be closed, or looked at, while regions come: close() needs the keys of those that it finds."""
    class Seen(ProtectionDomain):
        def _enter(self, mr):
            super()._enter(mr)
            assert [other.lkey >> 8 for other in self.mrs] == [1]
    mem, mm, dev = machine()
    with Seen(dev, mm) as pd:
        pd.reg_mr(mapped(mm, PAGE), PAGE, RO)


def test_a_domain_that_closes_while_regions_come():
    mem, mm, dev = machine()
    addr, pd = mapped(mm, PAGE), ProtectionDomain(dev, mm)

    def register():
        with contextlib.suppress(InvalidArgument):
            for _ in range(100):
                pd.reg_mr(addr, PAGE, RO)
    run(register, register, pd.close)
    assert pd.closed and pd.mrs == [] and pins(mem) == mm.pinned_vm == 0
