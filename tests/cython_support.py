"""Building a small extension outside of the tree, against the package that can be imported."""
import importlib.util
import os
import subprocess
import sys

import pytest

SETUP = '''
import sys
from Cython.Build import cythonize
from setuptools import Extension, setup
import mmcore

setup(script_args=["-q", "build_ext", "--inplace"],
      ext_modules=cythonize([Extension(sys.argv[1], [sys.argv[1] + ".pyx"], include_dirs=[mmcore.get_include()],
                                       extra_compile_args=["-O1", "-fno-strict-aliasing"])],
                            language_level=3, quiet=True))
'''


def build(folder, name, source, *, python=sys.executable, path=None):
    """Compile source, a .pyx, in a folder; path: where mmcore is to be found. Returns the path of the extension."""
    (folder / f"{name}.pyx").write_text(source)
    (folder / "build_extension.py").write_text(SETUP)
    env = dict(os.environ)
    env.pop("PYTHONPATH", None)
    if path is not None:
        env["PYTHONPATH"] = str(path)
    done = subprocess.run([python, "build_extension.py", name], cwd=folder, capture_output=True, text=True, env=env)
    if done.returncode and ("unable to execute" in done.stderr or "command 'cc' failed: No such" in done.stderr):
        pytest.skip("no C compiler")
    assert done.returncode == 0, done.stderr
    return next(folder.glob(f"{name}.*.so"))


def load(path):
    """Import the extension at a path."""
    spec = importlib.util.spec_from_file_location(path.name.split(".")[0], path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
