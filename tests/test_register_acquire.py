"""The rows get, pin and longterm of `mmcore register`."""
import pytest

from mmcore.bench.register import acquire_rows, model_space, register


@pytest.mark.parametrize("backing, updates", (("4k", (2048, 2048)), ("shmem", (2048, 2048)), ("thp", (4, 8)), ("hugetlb", (4, 8))))
def test_one_update_a_leaf(backing, updates):
    with model_space(8 << 20, backing) as (mm, addr):
        rows = acquire_rows(mm, addr, 2048, rounds=2)
        assert [row["acquire"] for row in rows] == ["get", "pin", "longterm"]
        assert {row["pages"] for row in rows} == {2048}
        # Large folios: a reference a leaf, and for pins their own counter as well.
        assert [row["updates"] for row in rows] == [updates[0], updates[1], updates[1]]
        assert all(row["acquire_ns_per_page"] > 0 and row["release_ns_per_page"] > 0 for row in rows)
        stat = mm.mem.vmstat()
        assert stat["nr_foll_pin_acquired"] == stat["nr_foll_pin_released"] == 3 * 2 * 2048
        mm.mem.check()


def test_the_report_has_them_for_a_model():
    report = register(4 << 20, "thp", rounds=1, model=True)
    assert [row["acquire"] for row in report["acquire"]["rows"]] == ["get", "pin", "longterm"] and report["pins_left"] == 0
