"""Every example of the documentation runs, and prints what the page says."""
import doctest
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(path for path in [*DOCS.glob("*.md"), *DOCS.glob("howto/*.md")] if "```pycon" in path.read_text())
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE

pytestmark = pytest.mark.skipif(not DOCS.exists(), reason="needs the source tree")


def blocks(path, language):
    return [(text.group(1), path.read_text()[:text.start()].count("\n"))
            for text in re.finditer(rf"^```{language}\n(.*?)^```$", path.read_text(), re.MULTILINE | re.DOTALL)]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_the_examples_of_a_page(path):
    live = pytest.importorskip("mmcore.live")
    names, runner = {}, doctest.DocTestRunner(optionflags=FLAGS)
    said = []
    for source, line in blocks(path, "pycon"):
        test = doctest.DocTestParser().get_doctest(source, names, path.stem, str(path), line)
        runner.run(test, out=said.append, clear_globs=False)
        names = test.globs
        if any("NotPossible" in text for text in said):
            pytest.skip("not possible on this machine: " + "".join(said).strip().splitlines()[-1])
    assert live and not runner.failures, "".join(said)


def test_the_examples_of_the_readme():
    """Its python blocks, one after the other; what a comment after a call says is for the eye."""
    names = {}
    for source, line in blocks(ROOT / "README.md", "python"):
        for statement in source.split("\n\n"):
            try:
                exec(compile("\n" * line + statement, "README.md", "exec"), names)
            except Exception as error:
                # The README says which calls are refused, and with what.
                assert f"# {type(error).__name__}" in statement, f"{statement}\n{error!r}"


def test_the_drawings_are_what_the_script_draws():
    before = {path.name: path.read_text() for path in (DOCS / "_static").glob("*.svg")}
    sys.path.insert(0, str(DOCS))
    try:
        import draw
    finally:
        sys.path.remove(str(DOCS))
    assert {f"{name}.svg": make().source() for name, make in draw.DRAWINGS.items()}.items() <= before.items()


def test_the_map_of_the_design_page_names_every_module():
    text = (DOCS / "design.md").read_text()
    modules = {f"{path.parent.name}/{path.stem}" for folder in ("core", "drivers") for path in (ROOT / "mmcore" / folder).iterdir()
               if path.suffix in (".pyx", ".py") and path.stem != "__init__"}
    assert not sorted(name for name in modules if f"`{name}`" not in text)


def test_every_page_of_the_site_is_in_a_table_of_contents():
    listed = set()
    for path in (DOCS / "index.md", DOCS / "howto" / "index.md"):
        for tree in re.findall(r"^```\{toctree\}\n(.*?)^```$", path.read_text(), re.MULTILINE | re.DOTALL):
            listed |= {(path.parent / name).relative_to(DOCS).as_posix() for name in tree.split("\n") if name and name[0] != ":"}
    pages = {path.relative_to(DOCS).with_suffix("").as_posix() for path in [*DOCS.glob("*.md"), *DOCS.glob("howto/*.md")]}
    assert pages - {"index"} == listed - {"api/index"}


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("sphinx")
    pytest.importorskip("myst_parser")
    pytest.importorskip("furo")
    done = subprocess.run([sys.executable, "-m", "sphinx", "-W", "-q", "-b", "html", str(DOCS), str(tmp_path)], capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "tutorial.html").exists()
