"""Build the Cython parts: one extension a noun of mmcore/core and mmcore/drivers, in parallel, with the flags they need."""
import os
import sys
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

CORE = Path("mmcore/core")
DRIVERS = Path("mmcore/drivers")
SOURCES = sorted(CORE.glob("*.pyx")) + sorted(DRIVERS.glob("*.pyx"))
HEADERS = sorted(str(path) for path in CORE.glob("*.h"))
JOBS = os.cpu_count() or 1

# -O3: some Pythons default to -O2, where the walk over a page list is 1.6 times slower. struct folio overlays struct
# page, hence no strict aliasing, as in the kernel.
CFLAGS = ["-O3", "-std=gnu11", "-fno-strict-aliasing", "-Wno-unreachable-code", "-Wno-unused-function"]
CFLAGS += os.environ.get("MMCORE_CFLAGS", "").split()
STRIP = [] if sys.platform == "darwin" else ["-Wl,-s"]
LDFLAGS = ["-pthread"] + os.environ.get("MMCORE_LDFLAGS", "").split()

DIRECTIVES = {
    "language_level": 3,
    "boundscheck": False,
    "wraparound": False,
    "initializedcheck": False,
    "cdivision": True,
    "embedsignature": True,
    "freethreading_compatible": True,
}


class parallel_build_ext(build_ext):
    def finalize_options(self):
        super().finalize_options()
        if self.parallel is None:
            self.parallel = JOBS
        if not self.inplace and "MMCORE_CFLAGS" not in os.environ:
            # What is installed carries no debug information: with it a wheel is twelve times larger. Builds of one's own
            # flags keep it, for sanitizers to name lines.
            for extension in self.extensions:
                extension.extra_compile_args = [*extension.extra_compile_args, "-g0"]
                extension.extra_link_args = [*extension.extra_link_args, *STRIP]

    def run(self):
        super().run()
        if self.inplace:
            # An extension whose source is gone would shadow a module of the same name.
            sources = {path.with_suffix("") for path in SOURCES} | {Path(*SHARED.split("."))}
            for built in [*CORE.glob("*.so"), *DRIVERS.glob("*.so")]:
                if built.with_name(built.name.split(".")[0]) not in sources:
                    built.unlink()


# What Cython writes for memoryviews, once instead of in every module that has one: a fifth of the wheel.
SHARED = "mmcore.core._cyutility"
shared = Extension(SHARED, [SHARED.replace(".", "/") + ".c"], extra_compile_args=CFLAGS, extra_link_args=LDFLAGS)

extensions = [
    Extension(
        ".".join(path.with_suffix("").parts),
        [str(path)],
        depends=HEADERS,
        include_dirs=[str(CORE)],
        extra_compile_args=CFLAGS,
        extra_link_args=LDFLAGS,
    )
    for path in SOURCES
]

# The Makefile installs the metadata alone (in place) and lets `build_ext --inplace` do the compiling, once.
METADATA_ONLY = bool(os.environ.get("MMCORE_METADATA_ONLY"))

if __name__ == "__main__":
    setup(
        ext_modules=[] if METADATA_ONLY else cythonize([*extensions, shared], nthreads=JOBS, compiler_directives=DIRECTIVES,
                                                        shared_utility_qualified_name=SHARED),
        cmdclass={"build_ext": parallel_build_ext},
    )
