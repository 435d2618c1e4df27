"""What every public name says of itself: one imperative line; and its module: units, errors, threads, the kernel's counterpart."""
import enum
import inspect
import sys

import pytest

import mmcore as mmc

HEADS = ("Units:", "Raises:", "Threads:", "Kernel:")
# Named tuples and the like are made by the library; these modules say what they are.
HOME = {"Zone": "mmcore.core.memory", "VMA": "mmcore.core.mm", "CoalesceData": "mmcore.drivers.iobuffer",
        "VFIOMapping": "mmcore.drivers.vfio_dma", "VFIOPin": "mmcore.drivers.vfio_dma"}
CALLABLE = [name for name in mmc.__all__ if callable(getattr(mmc, name))]
# A docstring that begins with one of these names a thing; only what is a plain record or an attribute may.
NOUNS = {"A", "An", "One", "The", "What", "Whether"}
RECORDS = {"Zone", "VMA", "DeviceRegion", "CoalesceData", "VFIOMapping", "VFIOPin"}


def text_of(value):
    """The docstring without the signature that Cython puts in front."""
    lines = (inspect.getdoc(value) or "").split("\n")
    if lines[0].split("(")[0].split(".")[-1] == getattr(value, "__name__", "") and lines[0].endswith(")"):
        lines = lines[1:]
    return "\n".join(lines).strip()


def routines():
    for name in CALLABLE:
        value = getattr(mmc, name)
        yield name, value
        if isinstance(value, type) and not issubclass(value, enum.Enum):
            for key, item in vars(value).items():
                item = item.__func__ if isinstance(item, (staticmethod, classmethod)) else item
                if key[0] != "_" and inspect.isroutine(item):
                    yield f"{name}.{key}", item


ROUTINES = dict(routines())


@pytest.mark.parametrize("name", ROUTINES)
def test_one_imperative_line(name):
    text = text_of(ROUTINES[name])
    assert text, f"{name} has no docstring"
    first, *rest = text.split("\n")
    assert first.rstrip(")").endswith("."), f"the first line of {name} is no sentence of its own: {first!r}"
    assert not rest or rest[0] == "", f"{name}: an empty line belongs between the first line and the rest"
    word = first.split()[0].strip(",.:")
    assert word[0].isupper()
    if name not in RECORDS:
        assert word not in NOUNS and not word.endswith("ing"), f"{name} begins with {word!r}, which is no imperative"
        assert not word.endswith("s") or word.endswith("ss"), f"{name} begins with {word!r}: say {word.rstrip('s')!r}"


@pytest.mark.parametrize("name", CALLABLE)
def test_properties_say_what_they_are(name):
    value = getattr(mmc, name)
    if isinstance(value, type):
        for key, item in vars(value).items():
            if key[0] != "_" and isinstance(item, property):
                assert (item.__doc__ or "").strip(), f"{name}.{key} has no docstring"


@pytest.mark.parametrize("name", CALLABLE)
def test_units_errors_threads_and_the_kernels_counterpart(name):
    module = sys.modules[HOME.get(name) or getattr(mmc, name).__module__]
    text = module.__doc__ or ""
    missing = [head for head in HEADS if not any(line.startswith(head) and len(line) > len(head) + 3 for line in text.split("\n"))]
    assert not missing, f"the docstring of {module.__name__}, the home of {name}, has no line {missing}"
