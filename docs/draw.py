"""Draw the pictures of the concepts page: `python docs/draw.py` writes docs/_static/*.svg, which are checked in."""
from pathlib import Path

HERE = Path(__file__).resolve().parent / "_static"
INK, SOFT, PAGE, HEAD, PIN, NEW = "#222", "#777", "#e8eef7", "#9db8dd", "#f2a65a", "#b7ddb0"


class Drawing:
    """Boxes, text and arrows on a white sheet."""

    def __init__(self, width, height, title):
        self.parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
                      f'font-family="sans-serif" font-size="13" role="img"><title>{title}</title>',
                      f'<rect width="{width}" height="{height}" fill="white"/>',
                      '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
                      f'<path d="M0,0 L8,4 L0,8 z" fill="{INK}"/></marker></defs>']

    def box(self, x, y, width, height, fill=PAGE, text="", bold=False):
        self.parts.append(f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="{fill}" stroke="{INK}"/>')
        if text:
            self.text(x + width / 2, y + height / 2 + 4, text, "middle", bold=bold)

    def text(self, x, y, text, anchor="start", colour=INK, bold=False, mono=False):
        style = (' font-weight="bold"' if bold else "") + (' font-family="monospace"' if mono else "")
        text = text.replace("&", "&amp;").replace("<", "&lt;")
        self.parts.append(f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="{colour}"{style}>{text}</text>')

    def arrow(self, x1, y1, x2, y2, dashed=False):
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        self.parts.append(f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{INK}"{dash} marker-end="url(#tip)"/>')

    def source(self):
        return "\n".join([*self.parts, "</svg>", ""])


def counters():
    d = Drawing(720, 220, "Where pins are counted")
    d.text(20, 24, "small folio: one counter for both", bold=True)
    d.box(20, 40, 420, 34, PIN, "pins x 1024")
    d.box(440, 40, 200, 34, HEAD, "plain references")
    d.text(20, 92, "_refcount, 32 bits: bits 31..10 are pins, 9..0 references. 1 reference + 3 pins = 3073", colour=SOFT)
    d.text(20, 136, "large folio: two counters, both in the first pages of the folio", bold=True)
    d.box(20, 152, 300, 34, HEAD, "_refcount: references + pins")
    d.box(340, 152, 300, 34, PIN, "_pincount: pins")
    d.text(20, 206, "1 reference + 512 pins = _refcount 513, _pincount 512: two atomic adds for all 512", colour=SOFT)
    return d


def folios():
    d = Drawing(720, 190, "Pages, folios, and the leaves that map them")
    d.text(20, 24, "mem_map: a struct page of 64 bytes for each 4 KiB", bold=True)
    for i in range(16):
        d.box(20 + 42 * i, 40, 42, 34, PAGE if i < 8 else HEAD if i == 8 else "#cfdcf0",
              "page" if i < 8 else "head" if i == 8 else "tail")
    d.text(188, 94, "8 small folios", "middle", SOFT)
    d.text(524, 94, "one folio of order 3, aligned to 8, counted in its head", "middle", SOFT)
    d.box(20, 140, 336, 30, "white", "8 PTEs")
    d.box(356, 140, 336, 30, "white", "8 PTEs of one folio (a PMD leaf maps 512)")
    d.arrow(188, 138, 188, 104)
    d.arrow(524, 138, 524, 104)
    d.text(20, 186, "page table", colour=SOFT)
    return d


def batching():
    d = Drawing(860, 290, "What releasing 512 pages of one folio costs")
    d.text(20, 24, "unpin_user_pages() of 512 entries that are one 2 MiB folio", bold=True)
    rows = (("page", "one entry, one update", 16, 16, "512 looks at struct pages, 1024 atomic updates"),
            ("head", "neighbours with the same head, one update", 16, 1, "512 looks, 2 updates"),
            ("run", "the first entry says how far the folio goes", 1, 1, "1 look (the list is compared, not the pages), 2 updates"))
    for k, (name, how, looks, updates, cost) in enumerate(rows):
        y = 50 + 80 * k
        d.text(20, y + 20, name, bold=True, mono=True)
        for i in range(16):
            d.box(80 + 24 * i, y, 24, 28, HEAD if i < looks else PAGE)
        for i in range(updates):
            width = 384 / updates
            d.box(80 + width * i + 1, y + 32, width - 2, 10, PIN)
        d.text(480, y + 12, how, colour=INK)
        d.text(480, y + 30, cost, colour=SOFT)
    d.text(80, 282, "blue: struct pages that are read; orange: counter updates (16 entries drawn of 512)", colour=SOFT)
    return d


def fork():
    d = Drawing(800, 250, "A fork with a pinned page")
    d.text(20, 24, "fork: what is not pinned is shared, what is pinned is copied", bold=True)
    d.box(20, 50, 110, 80, "white", "parent")
    d.box(20, 150, 110, 80, "white", "child")
    d.box(330, 50, 150, 40, HEAD, "page A")
    d.box(330, 110, 150, 40, PIN, "page B, pinned")
    d.box(330, 190, 150, 40, NEW, "copy of B")
    d.box(580, 110, 120, 40, "white", "device")
    d.arrow(130, 70, 326, 70)
    d.arrow(130, 110, 326, 126)
    d.arrow(130, 170, 326, 84, dashed=True)
    d.arrow(130, 210, 326, 210)
    d.arrow(578, 130, 484, 130)
    d.text(500, 74, "both map it read-only; who writes gets a copy", colour=SOFT)
    d.text(500, 215, "made at once, so that the parent", colour=SOFT)
    d.text(500, 231, "keeps the page the device writes to", colour=SOFT)
    return d


DRAWINGS = {"counters": counters, "folios": folios, "batching": batching, "fork": fork}

if __name__ == "__main__":
    HERE.mkdir(exist_ok=True)
    for name, draw in DRAWINGS.items():
        (HERE / f"{name}.svg").write_text(draw().source())
