"""Memory.save and Memory.load: the same machine, byte for byte, and it goes on working."""
import json
import zipfile

import numpy as np
import pytest

import mmcore as mmc
from mmcore import BadPage, DevicePages, InvalidArgument, Memory, MMError, PageList
from support import state, unchanged

FULL = dict(movable="4M", cma="2M", hugetlb={"2M": 2, "64K": 3}, mthp=(4,), thp="always",
            devices=[DevicePages("64K"), DevicePages("4M", type="fsdax", align="2M")])


def busy():
    """A machine with a past: folios of all kinds, pins, dirty pages, bytes, a hole in every structure."""
    mem = Memory("32M", **FULL)
    held = [mmc.folio_alloc(mem, order, zone=zone) for order in (0, 0, 3, 8) for zone in ("Normal", "CMA", "Movable")]
    held += [mmc.folio_alloc(mem, 9, hugetlb=True), mmc.folio_alloc(mem, 4, hugetlb=True), mem.huge_zero_folio]
    mmc.grab_pages(PageList(mem, range(held[6].pfn, held[6].pfn + 8)))
    mmc.try_grab_folio(held[0], 3)
    mmc.try_grab_folio(mem.folio(mem.devices[0].start_pfn), 2)
    for folio in held[3:7]:
        mmc.folio_mark_dirty(folio)
    mmc.folio_start_writeback(held[4])
    mmc.page_address(held[0].page)[:6] = b"pinned"
    mmc.folio_address(held[6])[5 * 4096] = 255
    mem.memory_failure(mem.page(1900))
    mmc.folio_put(held[1])
    mem.check()
    return mem, held


def test_a_loaded_machine_is_the_saved_one(tmp_path):
    mem, held = busy()
    mem.save(tmp_path / "machine")
    files = list(tmp_path.iterdir())
    assert len(files) == 1
    loaded = Memory.load(files[0])
    assert state(loaded) == state(mem)
    assert loaded.vmstat() == mem.vmstat()
    assert loaded.zones == mem.zones and loaded.devices == mem.devices and loaded.page_size == mem.page_size
    assert (loaded.zero_page.pfn, loaded.huge_zero_folio.pfn) == (mem.zero_page.pfn, mem.huge_zero_folio.pfn)
    loaded.check()
    for folio in held:
        if folio.refcount:
            assert bytes(mmc.folio_address(loaded.folio(folio.pfn))) == bytes(mmc.folio_address(folio))


def test_a_loaded_machine_goes_on_as_the_saved_one_would(tmp_path):
    mem, held = busy()
    mem.save(str(tmp_path / "machine.npz"))
    loaded = Memory.load(str(tmp_path / "machine.npz"))

    def go_on(mem):
        pfns = [mmc.folio_alloc(mem, order).pfn for order in (0, 5, 0, 2)]
        pfns.append(mmc.folio_alloc(mem, 4, hugetlb=True).pfn)
        mmc.unpin_user_pages_dirty_lock(PageList(mem, range(held[6].pfn, held[6].pfn + 8)), 8, True)
        mmc.unpin_user_folio(mem.folio(held[0].pfn), 3)
        mmc.unpin_user_folio(mem.folio(mem.devices[0].start_pfn), 2)
        mmc.folio_end_writeback(mem.folio(held[4].pfn))
        for folio in held[2:-1]:
            mmc.folio_put(mem.folio(folio.pfn))
        with pytest.raises(BadPage):
            mmc.folio_put(mem.folio(held[1].pfn))
        mem.check()
        assert mem.vmstat()["nr_foll_pin_acquired"] == mem.vmstat()["nr_foll_pin_released"]
        return pfns, state(mem)

    assert go_on(loaded) == go_on(mem)


def test_saving_changes_nothing(tmp_path):
    mem, _ = busy()
    with unchanged(mem):
        mem.save(tmp_path / "a.npz")
        mem.save(tmp_path / "b.npz")
    with np.load(tmp_path / "a.npz") as a, np.load(tmp_path / "b.npz") as b:
        assert set(a.files) == set(b.files)
        assert all(a[name].tobytes() == b[name].tobytes() for name in a.files)


def test_a_snapshot_is_plain_arrays(tmp_path):
    # No pickle in it: it can be looked at, and loaded, without running anything that it says.
    mem, _ = busy()
    mem.save(tmp_path / "machine.npz")
    with np.load(tmp_path / "machine.npz", allow_pickle=False) as arrays:
        assert all(arrays[name].dtype != object for name in arrays.files)


@pytest.mark.parametrize("kwargs", [dict(page_size="16K"), dict(page_size="64K"), dict(debug=True), {}])
def test_settings_survive(tmp_path, kwargs):
    mem = Memory("64M", **kwargs)
    mem.save(tmp_path / "m.npz")
    loaded = Memory.load(tmp_path / "m.npz")
    assert (loaded.page_size, loaded.debug, loaded.nr_pages) == (mem.page_size, mem.debug, mem.nr_pages)
    assert state(loaded) == state(mem) and repr(loaded) == repr(mem)
    loaded.check()


def test_a_large_machine_saves_only_what_was_used(tmp_path):
    mem = Memory("1T")
    mmc.folio_alloc(mem, 9)
    mem.save(tmp_path / "m.npz")
    assert (tmp_path / "m.npz").stat().st_size < 4 << 20
    loaded = Memory.load(tmp_path / "m.npz")
    assert state(loaded) == state(mem)
    loaded.check()


def no_zip(path):
    path.write_bytes(b"no machine at all")


def empty(path):
    path.write_bytes(b"")


def another_archive(path):
    np.savez(path, a=np.arange(3))


def truncated(path):
    busy()[0].save(path)
    data = path.read_bytes()
    path.write_bytes(data[:len(data) // 2])


def without_a_part(path):
    busy()[0].save(path)
    with np.load(path) as arrays:
        kept = {name: arrays[name] for name in sorted(arrays.files)[1:]}
    np.savez(path, **kept)


@pytest.mark.parametrize("spoil", [no_zip, empty, another_archive, truncated, without_a_part])
def test_what_is_no_snapshot(tmp_path, spoil):
    path = tmp_path / "m.npz"
    spoil(path)
    with pytest.raises(MMError) as caught:
        Memory.load(path)
    assert caught.value.errno == 22


def test_snapshots_that_lie_are_refused_or_caught(tmp_path):
    # Bytes of a file are no more to be trusted than arguments: what does not hold together is refused, never walked.
    busy()[0].save(tmp_path / "m.npz")
    with np.load(tmp_path / "m.npz") as arrays:
        parts = {name: arrays[name] for name in arrays.files}
    rng = np.random.default_rng(5)
    refused = 0
    for name, part in parts.items():
        for _ in range(6):
            raw = bytearray(np.ascontiguousarray(part).tobytes())
            if not raw:
                continue
            at = int(rng.integers(len(raw)))
            raw[at] ^= int(rng.integers(1, 256))
            wrong = np.frombuffer(bytes(raw), dtype=part.dtype).reshape(part.shape)
            np.savez(tmp_path / "wrong.npz", **{**parts, name: wrong})
            try:
                loaded = Memory.load(tmp_path / "wrong.npz")
                loaded.check()
                loaded.pages.tobytes()
            except (MMError, BadPage):
                refused += 1
    assert refused


def test_missing_file(tmp_path):
    with pytest.raises(OSError):
        Memory.load(tmp_path / "nothing.npz")


def test_place_that_cannot_be_written(tmp_path):
    mem = Memory("4M")
    with unchanged(mem), pytest.raises(OSError):
        mem.save(tmp_path / "no" / "such" / "folder.npz")


def test_closed_memory_cannot_be_saved(tmp_path):
    mem = Memory("4M")
    mem.close()
    with pytest.raises(InvalidArgument):
        mem.save(tmp_path / "m.npz")
    assert not list(tmp_path.iterdir())


def test_files_are_archives(tmp_path):
    Memory("4M").save(tmp_path / "m.npz")
    assert zipfile.is_zipfile(tmp_path / "m.npz")


def rewritten(path, change):
    """Save a Memory with its description changed."""
    Memory("64M", movable="16M", hugetlb={"2M": 2}).save(path)
    with np.load(path) as file:
        arrays = dict(file)
    meta = json.loads(arrays["meta"].tobytes())
    change(meta)
    arrays["meta"] = np.frombuffer(json.dumps(meta).encode(), np.uint8)
    np.savez(path, **arrays)


@pytest.mark.parametrize("key, value", [("frontiers", []), ("frontiers", [9]), ("frontiers", None), ("pools", []), ("pools", [[1]]),
                                        ("stats", {}), ("frontiers", {}), ("pools", 7), ("huge_zero_pfn", "x")])
def test_lists_of_a_damaged_file_may_be_short(tmp_path, key, value):
    rewritten(tmp_path / "m.npz", lambda meta: meta.update({key: value}))
    with pytest.raises(mmc.InvalidArgument, match="no saved Memory, or is damaged"):
        Memory.load(tmp_path / "m.npz")


@pytest.mark.parametrize("change", [
    lambda config: config.update(mov2ble=config.pop("movable")), lambda config: config.pop("size"), lambda config: config.update(size=None),
    lambda config: config.update(size=-1), lambda config: config.update(page_size=3), lambda config: config.update(thp=7),
    lambda config: config.update(movable=[1]), lambda config: config.update(mthp=[99]), lambda config: config.update(self=1)])
def test_settings_that_no_memory_has(tmp_path, change):
    rewritten(tmp_path / "m.npz", lambda meta: change(meta["config"]))
    with pytest.raises(mmc.InvalidArgument, match="no saved Memory, or is damaged"):
        Memory.load(tmp_path / "m.npz")
