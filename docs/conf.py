"""Sphinx: the site is MyST pages, and an API reference that is made from the built package."""
import ast
import enum
import importlib
import inspect
import os
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

# What goes where in the reference: a page a group, its modules in reading order.
GROUPS = {
    "memory": ("Memory, pages, folios", ["core.memory", "core.boot", "core.page", "core.errors", "core.buddy", "core.look",
                                         "core.folio", "core.lock", "core.content", "core.dump"]),
    "lists": ("Page lists and releasing", ["core.pagelist", "core.unpin"]),
    "spaces": ("Address spaces and files", ["core.mm", "core.space", "core.file", "core.remap"]),
    "acquiring": ("Acquiring pages", ["core.gup", "core.output", "core.migrate", "core.memfd", "core.hmm"]),
    "scatterlists": ("Scatterlists and DMA", ["core.scatterlist", "core.sgalloc", "core.sgiter", "core.sgcopy", "core.sgsplit",
                                              "core.sgdraw", "core.dma", "core.iommu"]),
    "drivers": ("Drivers", ["drivers.umem", "drivers.umem_blocks", "drivers.ibaccess", "drivers.mr", "drivers.iouring",
                            "drivers.iobuffer", "drivers.iov", "drivers.bio"]),
    "vfio": ("VFIO", ["drivers.vfio", "drivers.vfio_external", "drivers.vfio_dma", "drivers.vfio_uapi"]),
    "ledger": ("The ledger, and the pytest plugin", ["ledger"]),
}
# Reports on captures: modules of mmcore.live, with what is for callers in them.
REPORTS = {
    "diff": ["diff", "Diff", "Change"],
    "frag": ["frag", "Frag", "ZoneFrag", "free_runs", "unusable_free"],
    "picture": ["grid", "Grid", "strips", "Strip", "Box"],
    "pins": ["pins", "Pins", "ProcessPins"],
    "plot": ["draw"],
    "types": ["frames_of", "pages_of", "select", "parse_addresses", "parse_bits", "summarise", "Pages", "Bits", "Summary"],
}
HOME = {"FOLIO_DTYPE": "core.page", "PAGE_DTYPE": "core.page", "SG_DTYPE": "core.scatterlist", "Zone": "core.memory",
        "VMA": "core.mm", "CoalesceData": "drivers.iobuffer", "DeviceRegion": "core.boot", "get_include": "core.memory",
        "VFIOMapping": "drivers.vfio_dma", "VFIOPin": "drivers.vfio_dma"}


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


def reports(name, what):
    module = importlib.import_module(f"mmcore.live.{name}")
    title = " ".join((module.__doc__ or name).strip().split("\n\n")[0].split())
    lines = [f".. rubric:: live.{name}: {plain(title)}", ""]
    for key in what:
        lines += entry(f"mmcore.live.{name}.", key, getattr(module, key))
    return lines


def fixtures():
    """The fixtures and the mark of the pytest plugin; read from its text, since pytest wraps them."""
    import mmcore.pytest_plugin as plugin

    lines = [".. rubric:: Fixtures and mark of the pytest plugin (entry point ``mmcore``)", ""]
    for item in ast.parse(inspect.getsource(plugin)).body:
        marks = [ast.unparse(mark) for mark in item.decorator_list] if isinstance(item, ast.FunctionDef) else []
        if "pytest.fixture" in marks and item.name[0] != "_":
            text = ast.get_docstring(item) or ""
            lines += [f".. py:data:: {item.name}", ""] + [f"   {plain(line)}" for line in text.split("\n")] + [""]
    mark, what = plugin.MARK.split(": ", 1)
    return [*lines, f".. py:decorator:: pytest.mark.{mark}", "", f"   {plain(what)}", ""]


def write_verbs():
    """What `mmcore VERB --help` says, verb by verb."""
    import argparse

    from mmcore.cli import _parser

    os.environ["COLUMNS"] = "110"
    parser = _parser()
    verbs = next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    text = ["# The command line", "", "`mmcore VERB`; `python -m mmcore.cli` is the same. Every verb has `--json`, and prints plain "
            "text when piped.", "The exit status is 0 done, 1 error, 2 usage, 77 not possible on this machine (and why).", ""]
    text += ["| verb | what it tells |", "|---|---|"]
    text += [f"| [{choice.dest}](#{choice.dest}) | {choice.help} |" for choice in verbs._choices_actions]
    for name, verb in verbs.choices.items():
        text += ["", f"## {name}", "", "```text", verb.format_help().rstrip(), "```"]
    (HERE / "api" / "verbs.md").write_text("\n".join(text) + "\n")


def write_reference():
    """A page a group under api/, from __all__; names of modules that no group lists go to the last one."""
    left = {name: getattr(mmcore, name) for name in mmcore.__all__}
    (HERE / "api" / "others.md").unlink(missing_ok=True)     # of an earlier build
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
        if page == "ledger":
            lines += fixtures()
        write(page, title, lines)
        pages.append(page)
    others = [line for name, value in left.items() if callable(value) for line in entry("mmcore.", name, value)]
    if others:
        write("others", "Others", others)
        pages.append("others")
    live = importlib.import_module("mmcore.live")
    lines = [line for name in live.__all__ if callable(getattr(live, name))
             for line in entry("mmcore.live.", name, getattr(live, name))]
    for report, what in REPORTS.items():
        lines += reports(report, what)
    write("live", "Live Linux: mmcore.live", lines)
    write_verbs()
    index = ["# API reference", "", "Everything is importable from `mmcore`, but for `mmcore.live` and `mmcore.bench`. Types are in the",
             "stubs that the package ships (`.pyi`); constants (`FOLL_WRITE`, `PROT_READ`, ...) are members of the flag types under",
             "the names that the kernel gives them.", "", "```{toctree}", *pages, "live", "verbs", "```", ""]
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
