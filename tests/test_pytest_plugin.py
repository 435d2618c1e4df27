"""The pytest plugin: a test that leaks a pin fails, and the report says who, what, how much and where."""
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOC = Path(__file__).resolve().parent.parent / "docs" / "testing.md"


def run(pytester, text):
    pytester.makepyfile(text)
    return pytester.runpytest("-p", "no:cacheprovider")


def test_a_balanced_test_passes(pytester, mmcore_memory, pin_ledger):
    assert pin_ledger.mem is mmcore_memory
    result = run(pytester, """
        import mmcore as mmc

        def test_balanced(mmcore_memory, pin_ledger):
            assert pin_ledger.mem is mmcore_memory
            page = mmc.alloc_page(mmcore_memory)
            mmc.try_grab_folio(page.folio, 3)
            assert pin_ledger.by_holder() == {"untagged": 3}
            mmc.unpin_user_folio(page.folio, 3)
    """)
    result.assert_outcomes(passed=1)


@pytest.mark.parametrize("fixture", ["mmcore_memory", "pin_ledger"])
def test_a_leak_fails_the_test_and_is_named(pytester, fixture):
    result = run(pytester, f"""
        import mmcore as mmc

        def take(folio):
            mmc.try_grab_folio(folio, 5)        # line 4

        def test_leaks({fixture}):
            mem = getattr({fixture}, "mem", {fixture})
            folio = mmc.folio_alloc(mem, 4)
            take(folio)
            print("PFN is", hex(folio.pfn))

        def test_the_next_one_has_a_memory_of_its_own({fixture}):
            pass
    """)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.assert_outcomes(passed=2, errors=1)
    text = result.stdout.str()
    pfn = re.search("PFN is (0x[0-9a-f]+)", text).group(1)
    assert "test_leaks leaves its memory wrong" in text and "5 pins on 1 folios" in text
    assert re.search(rf"untagged: 5 on PFN {pfn} \(order 4\), taken at .*test_a_leak_fails_the_test_and_is_named.py:4$", text, re.M)


def test_a_tag_is_the_holder(pytester):
    result = run(pytester, """
        import mmcore as mmc

        def test_leaks(mmcore_memory, pin_ledger):
            mm = mmc.MM(mmcore_memory)
            a = mm.mmap("64K")
            with pin_ledger.tag("queue 7"):
                kept = mmc.pin_user_pages_fast(mm, a, 2, mmc.FOLL_WRITE)
            other = mmc.pin_user_pages_fast(mm, a + 8192, 1, mmc.FOLL_WRITE)
            mmc.unpin_user_pages(other)
    """)
    text = result.stdout.str()
    # Once in the report, and on some settings in the summary again.
    assert "2 pins on 2 folios" in text and len(set(re.findall(r"queue 7: 1 on PFN (0x\w+)", text))) == 2
    assert "untagged" not in text


def test_a_memory_region_that_stays_is_named(pytester):
    result = run(pytester, """
        import mmcore as mmc

        def test_leaks(mmcore_memory):
            mm = mmc.MM(mmcore_memory)
            mr = mmc.ProtectionDomain(mmc.IBDevice(mmcore_memory), mm).reg_mr(mm.mmap("64K"), 65536, mmc.IB_ACCESS_LOCAL_WRITE)
            globals()["kept"] = mr
    """)
    result.assert_outcomes(passed=1, errors=1)
    assert re.search(r"(?i)\bmr\b.*: 1 on PFN .*test_a_memory_region_that_stays_is_named.py:5", result.stdout.str())


def test_what_another_fixture_holds_goes_first(pytester):
    result = run(pytester, """
        import mmcore as mmc
        import pytest

        @pytest.fixture
        def pinned(mmcore_memory):
            folio = mmc.folio_alloc(mmcore_memory, 2)
            mmc.try_grab_folio(folio, 1)
            yield folio
            mmc.unpin_folio(folio)

        def test_uses(pinned, pin_ledger):
            assert len(pin_ledger.outstanding()) == 1
    """)
    result.assert_outcomes(passed=1)


def test_a_failed_test_is_not_blamed_twice(pytester):
    result = run(pytester, """
        import mmcore as mmc

        def test_fails(mmcore_memory):
            mmc.try_grab_folio(mmc.folio_alloc(mmcore_memory, 0), 1)
            assert False
    """)
    result.assert_outcomes(failed=1)


def test_a_broken_law_fails_the_test(pytester):
    result = run(pytester, """
        import ctypes
        import mmcore as mmc

        def test_breaks(mmcore_memory):
            folio = mmc.folio_alloc(mmcore_memory, 2)
            pages = mmcore_memory.pages
            offset = mmc.FOLIO_DTYPE.fields["_pincount"][1]
            ctypes.c_int.from_address(pages.ctypes.data + 64 * folio.pfn + offset).value = 7
    """)
    result.assert_outcomes(passed=1, errors=1)
    assert "leaves its memory wrong" in result.stdout.str()


def test_the_mark_says_which_memory(pytester):
    result = run(pytester, """
        import mmcore as mmc
        import pytest

        @pytest.mark.mmcore_memory("16M", movable="4M")
        def test_positional(mmcore_memory):
            assert mmcore_memory.nr_pages == 4096 and len(mmcore_memory.zones) == 2

        @pytest.mark.mmcore_memory(size="8M")
        def test_keyword(mmcore_memory):
            assert mmcore_memory.nr_pages == 2048

        def test_closed_by_the_test(mmcore_memory):
            mmcore_memory.close()
    """)
    result.assert_outcomes(passed=3)


def test_the_plugin_comes_with_the_package(pytester):
    """In a process of its own, with nothing but the entry point."""
    pytester.makepyfile("""
        import mmcore as mmc

        def test_leaks(mmcore_memory):
            mmc.try_grab_folio(mmc.folio_alloc(mmcore_memory, 0), 1)
    """)
    done = subprocess.run([sys.executable, "-m", "pytest", "-p", "no:cacheprovider"], cwd=pytester.path,
                           capture_output=True, text=True)
    assert done.returncode == 1 and "1 passed, 1 error" in done.stdout and "taken at" in done.stdout, done.stdout + done.stderr
    listed = subprocess.run([sys.executable, "-m", "pytest", "--fixtures"], cwd=pytester.path, capture_output=True, text=True)
    assert "mmcore_memory" in listed.stdout and "pin_ledger" in listed.stdout


def test_the_example_of_the_docs(pytester):
    blocks = re.findall("```python\n(.*?)```", DOC.read_text(), re.S)
    driver, tests = blocks
    pytester.makepyfile(driver=driver, test_driver=tests)
    result = pytester.runpytest("-p", "no:cacheprovider")
    result.assert_outcomes(passed=5, errors=2)
    assert re.search(r"test_a_short_pin_is_an_error leaves.*8 pins on 8 folios", result.stdout.str())
    assert re.search(r"untagged: 1 on PFN 0x[0-9a-f]+ \(order 0\), taken at .*driver.py:10", result.stdout.str())
    pytester.makepyfile(driver=driver.replace("            raise OSError",
                                                 "            mmc.unpin_user_pages(pages)\n            raise OSError"))
    fixed = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
                           cwd=pytester.path, capture_output=True, text=True)
    assert fixed.returncode == 0 and "5 passed" in fixed.stdout, fixed.stdout
