"""Sphinx: the site is MyST pages, and an API reference that is made from the built package."""
import enum
import importlib
import re
import sys
from pathlib import Path

import mmcore

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

project = "mmcore"
author = "the mmcore authors"
release = version = mmcore.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = f"mmcore {release}"
html_static_path = ["_static"]
exclude_patterns = ["_build", "api/_*"]
autodoc_member_order = "bysource"
# Signatures come from the compiled modules, which have no annotations; the stubs have the types.
suppress_warnings = ["myst.xref_missing"]

# What goes where in the reference: a page a group, its modules in reading order.
GROUPS = {
    "memory": ("Memory, pages, folios", ["core.memory", "core.boot", "core.page", "core.errors", "core.buddy", "core.look",
                                         "core.folio", "core.lock", "core.content"]),
    "lists": ("Page lists and releasing", ["core.pagelist", "core.unpin", "ledger"]),
    "spaces": ("Address spaces and files", ["core.mm", "core.space", "core.file", "core.remap"]),
    "acquiring": ("Acquiring pages", ["core.gup", "core.output", "core.migrate", "core.memfd", "core.hmm"]),
    "scatterlists": ("Scatterlists and DMA", ["core.scatterlist", "core.sgalloc", "core.sgiter", "core.sgcopy", "core.sgsplit",
                                              "core.sgdraw", "core.dma", "core.iommu"]),
    "drivers": ("Drivers", ["drivers.umem", "drivers.umem_blocks", "drivers.ibaccess", "drivers.mr", "drivers.iouring",
                            "drivers.iobuffer", "drivers.iov", "drivers.bio"]),
}
HOME = {"FOLIO_DTYPE": "core.page", "PAGE_DTYPE": "core.page", "SG_DTYPE": "core.scatterlist", "Zone": "core.memory",
        "VMA": "core.mm", "CoalesceData": "drivers.iobuffer", "DeviceRegion": "core.boot", "get_include": "core.memory"}


def home(name):
    """The module, without the package, that a public name is documented under."""
    value = getattr(mmcore, name)
    module = HOME.get(name) or getattr(value, "__module__", "").removeprefix("mmcore.")
    return module if module in {m for _, modules in GROUPS.values() for m in modules} else None


def entry(prefix, name, value):
    if isinstance(value, type) and issubclass(value, enum.Enum):
        members = ", ".join(f"``{member}`` = {item.value:#x}" for member, item in value.__members__.items())
        return [f".. autoclass:: {prefix}{name}", "   :no-members:", "", f"   {members}", ""]
    if isinstance(value, type):
        return [f".. autoclass:: {prefix}{name}", "   :members:", "   :undoc-members:" if hasattr(value, "_fields") else "", ""]
    return [f".. autofunction:: {prefix}{name}", ""]


def about(module):
    """What a module says of all its names: units, errors, threads, the kernel's counterpart."""
    text = importlib.import_module(f"mmcore.{module}").__doc__ or ""
    lines, title = [], text.strip().split("\n")[0]
    for line in text.split("\n"):
        if re.match(r"(Units|Raises|Threads|Kernel): ", line):
            lines.append("| " + plain(line))
        elif lines and line.startswith("    "):
            lines[-1] += " " + plain(line.strip())
        else:
            lines += [""] if lines else []
    return [f".. rubric:: {plain(title)}", "", *lines, ""]


def write(name, title, lines):
    path = HERE / "api" / f"{name}.md"
    text = "\n".join([f"# {title}", "", "```{eval-rst}", *lines, "```", ""])
    path.parent.mkdir(exist_ok=True)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def write_reference():
    """A page a group under api/, from __all__; names of modules that no group lists go to the last one."""
    left = {name: getattr(mmcore, name) for name in mmcore.__all__}
    of = {name: home(name) for name in left}
    pages = []
    for page, (title, modules) in GROUPS.items():
        lines = []
        for module in modules:
            lines += about(module)
            for name in [name for name in left if of[name] == module]:
                value = left.pop(name)
                if callable(value):
                    lines += entry("mmcore.", name, value)
        write(page, title, lines)
        pages.append(page)
    others = [line for name, value in left.items() if callable(value) for line in entry("mmcore.", name, value)]
    if others:
        write("others", "Others", others)
        pages.append("others")
    live = importlib.import_module("mmcore.live")
    lines = [line for name in live.__all__ if callable(getattr(live, name))
             for line in entry("mmcore.live.", name, getattr(live, name))]
    write("live", "Live Linux: mmcore.live", lines)
    index = ["# API reference", "", "Everything is importable from `mmcore`, but for `mmcore.live` and `mmcore.bench`. Types are in the",
             "stubs that the package ships (`.pyi`); constants (`FOLL_WRITE`, `PROT_READ`, ...) are members of the flag types under",
             "the names that the kernel gives them.", "", "```{toctree}", *pages, "live", "```", ""]
    (HERE / "api" / "index.md").write_text("\n".join(index))


def plain(line):
    """Escape what reStructuredText would make of plain text with code in backticks."""
    parts = re.split(r"(``?[^`]+``?)", line)
    return "".join("``" + part.strip("`") + "``" if part.startswith("`")
                   else re.sub(r"(\w)_(?=\W|$)", r"\1\\_", re.sub(r"([\\*|])", r"\\\1", part)) for part in parts)


def as_text(app, what, name, obj, options, lines):
    """Docstrings are plain text with `code` in them: escape what reStructuredText would make of the rest."""
    out, indented = [], False
    for line in lines:
        deep = line.startswith(" ")
        if deep and not indented:
            out += ["", "::", ""]
        elif indented and not deep and line:
            out.append("")
        if line:
            indented = deep
        out.append(line if deep else plain(line))
    lines[:] = out


def setup(app):
    write_reference()
    app.connect("autodoc-process-docstring", as_text)
