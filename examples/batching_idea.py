"""Try a new batching idea against the generations: build 40 lines of Cython, check that the state is the same, measure.

The idea is in batching_idea.pyx. Every list is checked once for whether it grows; only then the idea may be used.

    python examples/batching_idea.py [PAGES]
"""
import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

import mmcore as mmc
from mmcore.bench.measure import Variant, interleave, median_mad

BUILD = """
from Cython.Build import cythonize
from setuptools import Extension, setup
import mmcore
setup(script_args=["-q", "build_ext", "--inplace"],
      ext_modules=cythonize([Extension("batching_idea", ["batching_idea.pyx"], include_dirs=[mmcore.get_include()],
                                       extra_compile_args=["-O3", "-fno-strict-aliasing"])],
                            language_level=3, quiet=True,
                            compiler_directives={"boundscheck": False, "wraparound": False, "cdivision": True}))
"""


def build():
    """Compile batching_idea.pyx in a folder of its own, and import it."""
    folder = Path(tempfile.mkdtemp(prefix="mmcore-idea-"))
    (folder / "batching_idea.pyx").write_text(Path(__file__).with_suffix(".pyx").read_text())
    (folder / "build.py").write_text(BUILD)
    # Cython looks for .pxd files on the path; an editable install is not on it.
    env = {**os.environ, "PYTHONPATH": str(Path(mmc.__file__).parents[1])}
    subprocess.run([sys.executable, "build.py"], cwd=folder, check=True, env=env)
    spec = importlib.util.spec_from_file_location("batching_idea", next(folder.glob("batching_idea*.so")))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def layout(mem, order, nr, keep=1):
    """A list of nr pages in folios of one order, of which every keep-th page is in the list."""
    folios = [mmc.folio_alloc(mem, order) for _ in range(max(1, (nr * keep) >> order))]
    heads = np.array(sorted(folio.pfn for folio in folios), np.uint64)
    pfns = (heads[:, None] + np.arange(0, 1 << order, keep, dtype=np.uint64)).ravel()
    return folios, mmc.PageList(mem, pfns)


def main(nr="1048576"):
    idea, nr = build(), int(nr)
    print(f"{'list':24} {'page':>8} {'head':>8} {'run':>8} {'idea':>8}   ns/page, median of 5 rounds")
    for name, order, keep in (("order 0", 0, 1), ("order 4", 4, 1), ("order 9", 9, 1), ("order 9, every other", 9, 2)):
        with mmc.Memory(nr * keep * 4096 + (1 << 30)) as mem:
            folios, pages = layout(mem, order, nr, keep)
            assert idea.grows(pages)

            # The law: a batch leaves the state of one page at a time.
            def state(release, pages=pages, mem=mem):
                mmc.grab_pages(pages)
                release(pages)
                return mem.pages.tobytes()
            small = pages[:4096]
            assert state(idea.unpin_growing, small) == state(lambda p: mmc.unpin_user_pages(p, release="page"), small)

            def grab(pages=pages):
                mmc.grab_pages(pages)
            variants = [Variant(release, lambda r=release, p=pages: mmc.unpin_user_pages(p, release=r), grab)
                        for release in ("page", "head", "run")]
            variants.append(Variant("idea", lambda p=pages: idea.unpin_growing(p), grab))
            samples = interleave(variants, 5)
            times = [median_mad(samples[v.name])[0] / len(pages) for v in variants]
            print(f"{name:24} " + " ".join(f"{ns:8.3f}" for ns in times))
            assert mem.vmstat()["nr_foll_pin_acquired"] == mem.vmstat()["nr_foll_pin_released"]
            mmc.folios_put(folios)
            mem.check()
    lists = mmc.PageList(mmc.Memory("64M"), [9, 8])
    print(f"a list that goes back is not for it: grows() is {bool(idea.grows(lists))}")


if __name__ == "__main__":
    main(*sys.argv[1:])
