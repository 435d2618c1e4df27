"""The sdist and the wheels: what is in them, and that they install in clean environments on every Python found here."""
import functools
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from test_cimport import blocks
from test_setup import copy_of_the_tree

ROOT = Path(__file__).resolve().parent.parent
MOST = 3_000_000                # bytes of a wheel

needs_tree = pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="needs the source tree")
pytestmark = needs_tree

SMOKE = """
import sys
import mmcore as mmc
from mmcore import live
assert mmc.__file__.startswith(sys.prefix), mmc.__file__
with mmc.Memory("64M", thp="always") as mem:
    mm = mmc.MM(mem)
    addr = mm.mmap("4M")
    pages = mmc.pin_user_pages_fast(mm, addr, 1024, mmc.FOLL_WRITE)
    assert len(pages) == 1024 and pages[0].folio.pincount == 512
    mmc.unpin_user_pages_dirty_lock(pages, 1024, True)
    with mmc.VFIOContainer(mem) as container:
        container.attach(mmc.IOMMUDomain(mem))
        container.map_dma(mm, addr, 0, "4M")
    mm.exit()
    mem.check()
print(mmc.__version__)
"""


@functools.cache
def pythons():
    """Interpreters of 3.10 and newer with headers: this one, those on the path, those of pyenv and uv; one a version."""
    names = [sys.executable, *(f"python3.{minor}" for minor in range(10, 20))]
    for command in (["pyenv", "root"], ["uv", "python", "dir"]):
        if shutil.which(command[0]):
            folder = Path(subprocess.run(command, capture_output=True, text=True).stdout.strip())
            names += sorted(map(str, [*folder.glob("versions/3.*/bin/python3"), *folder.glob("cpython-3.*/bin/python3")]))
    found = {}
    ask = "import os, sys, sysconfig; print(*sys.version_info[:2], sys.abiflags or '-', " \
          "os.path.exists(os.path.join(sysconfig.get_path('include'), 'Python.h')))"
    for name in names:
        if shutil.which(name) is None:
            continue
        answer = subprocess.run([name, "-c", ask], capture_output=True, text=True).stdout.split()
        if len(answer) == 4 and (int(answer[0]), int(answer[1])) >= (3, 10) and answer[2] == "-" and answer[3] == "True":
            found.setdefault(f"{answer[0]}.{answer[1]}", shutil.which(name))
    return found


def pytest_generate_tests(metafunc):
    """Look for interpreters only when slow tests were asked for: it takes seconds."""
    if "version" in metafunc.fixturenames:
        asked = metafunc.config.getoption("markexpr")
        metafunc.parametrize("version", pythons() if "slow" in asked and "not slow" not in asked else ["this"])


def check(*args, **options):
    done = subprocess.run([str(arg) for arg in args], capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    """Made from what a fresh clone holds."""
    tree = copy_of_the_tree(tmp_path_factory.mktemp("clone"))
    pytest.importorskip("Cython")
    check(sys.executable, "setup.py", "-q", "sdist", cwd=tree)
    made, = (tree / "dist").glob("mmcore-*.tar.gz")
    return made


def compiler():
    env = dict(os.environ)
    env.pop("PYTHONPATH", None)
    if shutil.which("ccache") and "CC" not in env:
        env["CC"] = f"ccache {shutil.which('gcc') or 'cc'}"
    return env


def environment(folder, python):
    """A clean virtual environment; returns its Python."""
    check(python, "-m", "venv", folder)
    return folder / "bin" / "python"


@pytest.mark.slow
def test_the_sdist_has_sources_tests_and_docs_and_no_generated_c(sdist):
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for name in ("Makefile", "setup.py", "mmcore/core/unpin.pyx", "mmcore/core/page.h", "mmcore/__init__.pyi", "mmcore/py.typed",
                 "tests/conftest.py", "docs/tutorial.md", "examples/what_if.py", "benchmarks/peers/unpin.c", "CHANGELOG.md"):
        assert name in names
    assert not [name for name in names if re.match(r"mmcore/.*\.(c|so)$", name)]


@pytest.mark.slow
def test_the_sdist_installs_in_a_clean_environment(version, sdist, tmp_path):
    python = environment(tmp_path / "env", pythons()[version])
    check(python, "-m", "pip", "install", "-q", sdist, env=compiler(), cwd=tmp_path)
    assert check(python, "-c", SMOKE, cwd=tmp_path).strip()


@pytest.mark.slow
def test_the_wheel_is_small_and_installs_without_a_compiler(version, sdist, tmp_path):
    builder = environment(tmp_path / "build", pythons()[version])
    check(builder, "-m", "pip", "wheel", "-q", "--no-deps", "-w", tmp_path, sdist, env=compiler(), cwd=tmp_path)
    wheel, = tmp_path.glob("mmcore-*.whl")
    assert wheel.stat().st_size < MOST
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        entries = archive.read(next(name for name in names if name.endswith("entry_points.txt"))).decode()
    assert "[pytest11]\nmmcore = mmcore.pytest_plugin" in entries
    for name in ("mmcore/core/page.h", "mmcore/core/atomic.h", "mmcore/core/unpin.pxd", "mmcore/__init__.pxd", "mmcore/py.typed",
                 "mmcore/core/unpin.pyi", "mmcore/__init__.pyi", "mmcore/cli/register.py", "mmcore/cli/vfio_dma_map.py",
                 "mmcore/drivers/vfio.pyi", "mmcore/drivers/vfio_pin.pxd", "mmcore/live/preflight.py", "mmcore/bench/stress.py",
                 "mmcore/core/dump.py", "mmcore/core/hook.pxd", "mmcore/pytest_plugin.py"):
        assert name in names
    assert not [name for name in names if re.search(r"\.(c|pyx)$|^tests/", name)]

    python = environment(tmp_path / "env", pythons()[version])
    bare = {"PATH": str(python.parent), "CC": "no-such-compiler", "HOME": os.environ.get("HOME", str(tmp_path))}
    bare |= {name: value for name, value in os.environ.items() if name.startswith("PIP_") or name.lower().endswith("_proxy")}
    check(python, "-m", "pip", "install", "-q", wheel, env=bare, cwd=tmp_path)
    assert check(python, "-c", SMOKE, env=bare, cwd=tmp_path).strip()
    said = check(python.parent / "mmcore", "--help", env=bare, cwd=tmp_path)
    assert all(verb in said for verb in ("register", "preflight", "why-not-longterm", "vfio-dma-map", "bench", "stress"))

    # cimport against what was installed: the extension of the docs.
    check(python, "-m", "pip", "install", "-q", "Cython>=3.1", "setuptools>=77", cwd=tmp_path)
    source, = blocks("cython")
    recipe, use = blocks("python")
    (tmp_path / "holder.pyx").write_text(source)
    (tmp_path / "setup.py").write_text(recipe)
    check(python, "setup.py", "-q", "build_ext", "--inplace", env=compiler(), cwd=tmp_path)
    check(python, "-c", use, cwd=tmp_path)


def test_every_module_declares_free_threading():
    """Declared, not claimed: docs say what was run. The generated C tells for each module that is built here."""
    setup = (ROOT / "setup.py").read_text()
    assert '"freethreading_compatible": True' in setup
    sources = [*ROOT.glob("mmcore/**/*.pyx")]
    assert sources and not [path for path in sources if "freethreading_compatible" in path.read_text()]
    for path in sources:
        made = path.with_suffix(".c")
        if made.exists():
            # What holds unless the compiler is told otherwise.
            assert re.search(r"#endif\n#else\n#define __Pyx_FREETHREADING_COMPATIBLE Py_MOD_GIL_NOT_USED\n", made.read_text()), made


def test_the_versions_agree():
    import mmcore
    assert f'version = "{mmcore.__version__}"' in (ROOT / "pyproject.toml").read_text()
    assert f"## {mmcore.__version__}" in (ROOT / "CHANGELOG.md").read_text()
