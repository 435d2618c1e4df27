"""cimport from outside: an extension against what an installation has, no more."""
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import mmcore as mmc
from cython_support import build

pytest.importorskip("Cython")

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "howto" / "cython.md"
SHIPPED = ("*.py", "*.so", "*.pxd", "*.h", "*.pyi", "py.typed")


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def test_get_include_has_the_headers():
    where = Path(mmc.get_include())
    assert (where / "page.h").is_file() and (where / "atomic.h").is_file()


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A copy of the package as a wheel holds it: without sources of its extensions."""
    site = tmp_path_factory.mktemp("site")
    package = Path(mmc.__file__).parent
    for pattern in SHIPPED:
        for path in package.rglob(pattern):
            to = site / path.relative_to(package.parent)
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, to)
    return site


@pytest.mark.skipif(not PAGE.exists(), reason="needs the source tree")
def test_the_extension_of_the_docs_builds_outside_of_the_tree_and_runs(installed, tmp_path):
    source, = blocks("cython")
    _, use = blocks("python")
    build(tmp_path, "holder", source, path=installed)
    run = subprocess.run([sys.executable, "-c", "import sys; sys.path[:0] = sys.argv[1:]\n" + use +
                          "print(mmc.__file__)", str(tmp_path), str(installed)],
                         cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith(str(installed))


EACH = '''
from libc.stdint cimport int64_t, uint64_t
from mmcore.core.folio cimport FOLL_PIN, grab_folio, put_pins
from mmcore.core.memory cimport NR_FOLL_PIN_RELEASED, Memory, mem_t, stat_add
from mmcore.core.page cimport compound_head_pfn, page_is_head
from mmcore.core.pagelist cimport PageList
from mmcore.core.unpin cimport group_t, next_run

def groups(PageList pages):
    """Pin and unpin group by group, in a loop of one's own: (groups, error)."""
    cdef Memory mem = pages.mem
    cdef mem_t *m = mem.enter()
    cdef uint64_t i = 0, n = 0
    cdef int error = 0
    cdef group_t g
    with nogil:
        while i < pages.n and not error:
            next_run(m.map, pages.p + i, pages.n - i, &g)
            error = grab_folio(m, g.head, g.count, FOLL_PIN)
            if not error:
                error = put_pins(m, &m.map[g.head], page_is_head(&m.map[g.head]), g.count)
                stat_add(m, NR_FOLL_PIN_RELEASED, <int64_t>g.count)
            i += g.count
            n += 1
    mem.leave()
    return n, error
'''


def test_folios_and_groups_can_be_cimported_one_by_one(installed, tmp_path):
    build(tmp_path, "each", EACH, path=installed)
    use = """
import mmcore as mmc, each
with mmc.Memory("64M") as mem:
    large, small = mmc.folio_alloc(mem, 4), mmc.alloc_page(mem)
    pages = mmc.PageList(mem, [*range(large.pfn, large.pfn + 16), small.pfn, small.pfn, large.pfn])
    assert each.groups(pages) == (3, 0)
    assert (large.refcount, large.pincount, small.refcount) == (1, 0, 1)
    stat = mem.vmstat()
    assert stat["nr_foll_pin_acquired"] == stat["nr_foll_pin_released"] == 19
    mem.check()
"""
    run = subprocess.run([sys.executable, "-c", "import sys; sys.path[:0] = sys.argv[1:]\n" + use, str(tmp_path), str(installed)],
                         cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
