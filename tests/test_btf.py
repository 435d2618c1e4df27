"""Compare mmcore's layouts and constants with those of the kernel that runs here, out of its own BTF.

A difference is either in one of the tables below, with its reason, or it fails. A row of a table that is no difference
any more, on a kernel of the versions that it names, fails too: then the row is to be removed or narrowed.
"""
import os
import re
import struct
from collections import namedtuple

import pytest

import btf
import mmcore
from mmcore import FOLIO_DTYPE, PAGE_DTYPE, PageFlags, PageType
from mmcore.core.page import ZONE_NAMES

VMLINUX = "/sys/kernel/btf/vmlinux"
OLDEST = (6, 18)        # the layout that mmcore models
FOREVER = (99, 0)

# Names of ours that are spelled differently: kernel's path, first and last version that spells it so, and why.
Spelling = namedtuple("Spelling", "what ours kernel since until why")
SPELLINGS = [
    Spelling("page", "compound_info", "compound_head", OLDEST, (7, 0), "renamed in 7.1, when it became a mask"),
    Spelling("page", "index", "__folio_index", OLDEST, FOREVER, "renamed to keep drivers off it; folios call it index"),
    Spelling("page", "pgmap", "_unused_pgmap_compound_head", OLDEST, (7, 0), "pages only pad it; folios call it pgmap"),
    Spelling("page", "pgmap", "_unused_pgmap_compound_info", (7, 1), FOREVER, "renamed with compound_info"),
    Spelling("page", "lru_next", "lru.next", OLDEST, FOREVER, "one word a field: a PFN link, no pointer"),
    Spelling("page", "lru_prev", "lru.prev", OLDEST, FOREVER, "one word a field: a PFN link, no pointer"),
    Spelling("folio", "lru_next", "lru.next", OLDEST, FOREVER, "one word a field: a PFN link, no pointer"),
    Spelling("folio", "lru_prev", "lru.prev", OLDEST, FOREVER, "one word a field: a PFN link, no pointer"),
    Spelling("folio", "compound_info", "page.compound_head", OLDEST, (7, 0), "a word of tails, not of folios"),
    Spelling("folio", "compound_info", "page.compound_info", (7, 1), FOREVER, "a word of tails, not of folios"),
    Spelling("folio", "page_type", "page.page_type", OLDEST, FOREVER, "the type belongs to the page"),
]

# Members on one side only. `config`: whether the kernel has it depends on how it was built.
OneSide = namedtuple("OneSide", "what name side since until config why")
ONE_SIDED = [
    # the kernel's, which mmcore does not model
    OneSide("page", "lru", "kernel", OLDEST, FOREVER, False, "lru_next and lru_prev"),
    OneSide("page", "buddy_list", "kernel", OLDEST, FOREVER, False, "free blocks are in bitmaps"),
    OneSide("page", "pcp_list", "kernel", OLDEST, FOREVER, False, "no per-CPU lists"),
    OneSide("page", "pcp_llist", "kernel", OLDEST, FOREVER, True, "no per-CPU lists"),
    OneSide("page", "share", "kernel", OLDEST, FOREVER, False, "fsdax's name of index"),
    OneSide("page", "buddy_since", "kernel", OLDEST, FOREVER, True, "a vendor patch: when the block became free"),
    OneSide("page", "pp_magic", "kernel", OLDEST, FOREVER, False, "network page pools are not modelled"),
    OneSide("page", "pp", "kernel", OLDEST, FOREVER, False, "network page pools are not modelled"),
    OneSide("page", "_pp_mapping_pad", "kernel", OLDEST, FOREVER, False, "network page pools are not modelled"),
    OneSide("page", "dma_addr", "kernel", OLDEST, FOREVER, False, "network page pools are not modelled"),
    OneSide("page", "pp_ref_count", "kernel", OLDEST, FOREVER, False, "network page pools are not modelled"),
    OneSide("page", "zone_device_data", "kernel", OLDEST, FOREVER, False, "lru_prev's word; drivers keep theirs outside"),
    OneSide("page", "callback_head", "kernel", OLDEST, FOREVER, False, "rcu_head: nothing is freed by RCU"),
    OneSide("page", "virtual", "kernel", OLDEST, FOREVER, True, "WANT_PAGE_VIRTUAL: 32-bit machines"),
    OneSide("page", "_last_cpupid", "kernel", OLDEST, FOREVER, True, "only when it does not fit into flags"),
    OneSide("page", "kmsan_shadow", "kernel", OLDEST, FOREVER, True, "KMSAN kernels have larger pages"),
    OneSide("page", "kmsan_origin", "kernel", OLDEST, FOREVER, True, "KMSAN kernels have larger pages"),
    OneSide("page", "_unused_slab_obj_exts", "kernel", OLDEST, FOREVER, True, "memcg_data's word without MEMCG"),
    OneSide("folio", "lru", "kernel", OLDEST, FOREVER, False, "lru_next and lru_prev"),
    OneSide("folio", "__filler", "kernel", OLDEST, FOREVER, False, "pads in front of mlock_count"),
    OneSide("folio", "mlock_count", "kernel", OLDEST, FOREVER, False, "lru_prev's word: mlock is not modelled"),
    OneSide("folio", "share", "kernel", OLDEST, FOREVER, False, "fsdax's name of index"),
    OneSide("folio", "swap", "kernel", OLDEST, FOREVER, False, "private's word, typed"),
    OneSide("folio", "page", "kernel", OLDEST, FOREVER, False, "the whole head; PAGE_DTYPE is the same bytes"),
    OneSide("folio", "__page_1", "kernel", OLDEST, FOREVER, False, "the whole tail"),
    OneSide("folio", "__page_2", "kernel", OLDEST, FOREVER, False, "the whole tail"),
    OneSide("folio", "__page_3", "kernel", OLDEST, FOREVER, False, "the whole tail"),
    OneSide("folio", "_mm_ids", "kernel", OLDEST, FOREVER, True, "_mm_id as one word, for its lock bit"),
    OneSide("folio", "_usable_1", "kernel", OLDEST, FOREVER, True, "pads the union of tail 1"),
    OneSide("folio", "_unused_slab_obj_exts", "kernel", OLDEST, FOREVER, True, "memcg_data's word without MEMCG"),
    # ours, which not every kernel has
    OneSide("page", "memcg_data", "ours", OLDEST, FOREVER, True, "needs MEMCG"),
    OneSide("folio", "memcg_data", "ours", OLDEST, FOREVER, True, "needs MEMCG"),
    OneSide("folio", "_nr_pages", "ours", OLDEST, FOREVER, True, "needs NR_PAGES_IN_LARGE_FOLIO"),
    OneSide("folio", "_mm_id", "ours", OLDEST, FOREVER, True, "needs MM_ID"),
    OneSide("folio", "_mm_id_mapcount", "ours", OLDEST, FOREVER, True, "needs MM_ID"),
]

# From mlocked on a flag exists only with its option, and those behind move down when it does not. mmcore has them all.
OPTIONAL_FLAGS = {"mlocked": "MMU", "hwpoison": "MEMORY_FAILURE", "young": "PAGE_IDLE_FLAG", "idle": "PAGE_IDLE_FLAG",
                  "arch_2": "ARCH_USES_PG_ARCH_2", "arch_3": "ARCH_USES_PG_ARCH_3"}

# Second names of bits in the kernel's enum pageflags: the bit they stand for, and whether they depend on the build.
FLAG_ALIASES = {
    "readahead": ("reclaim", False), "swapcache": ("owner_priv_1", False), "checked": ("owner_priv_1", False),
    "anon_exclusive": ("anon_exclusive", False), "mappedtodisk": ("anon_exclusive", False),
    "fscache": ("private_2", False), "pinned": ("owner_priv_1", False), "savepinned": ("dirty", False),
    "foreign": ("owner_priv_1", False), "xen_remapped": ("owner_priv_1", False),
    "movable_ops_isolated": ("reclaim", True), "movable_ops": ("uptodate", True), "reported": ("uptodate", True),
    "vmemmap_self_hosted": ("owner_priv_1", True), "has_hwpoisoned": ("active", False),
    "large_rmappable": ("workingset", False), "partially_mapped": ("reclaim", False),
    "slob_free": ("private", True), "isolated": ("reclaim", True),
}
OUR_FLAGS = {"mm_written", "mm_many_refs", "mm_pool", "mm_retired", "mm_isolated"}       # mmcore's own, in bits that Linux leaves free
FLAG_NAMES = {"owner_2": "anon_exclusive"}                  # kernel's name -> ours

# Enumerators on one side only: (name, side, first and last version, depends on the build, why).
ENUMERATORS = {
    "FOLL_": [],
    "PGTY_": [("PGTY_netpp", "ours", OLDEST, (7, 0), False, "page pools became a type in 7.1"),
              ("PGTY_mapcount_underflow", "kernel", OLDEST, FOREVER, False, "no type: what an underflow looks like"),
              ("PGTY_zeroed", "kernel", OLDEST, FOREVER, True, "not merged everywhere")],
}

SCATTERLIST = {"page_link": (0, 8), "offset": (8, 4), "length": (12, 4), "dma_address": (16, 8), "dma_length": (24, 4),
               "dma_flags": (28, 4)}
SCATTERLIST_OPTIONAL = {"dma_length": "NEED_SG_DMA_LENGTH", "dma_flags": "NEED_SG_DMA_FLAGS"}


def kernel_version():
    numbers = re.match(r"(\d+)\.(\d+)", os.uname().release)
    return tuple(map(int, numbers.groups())) if numbers else (0, 0)


@pytest.fixture(scope="module")
def kernel():
    if not os.path.exists(VMLINUX):
        pytest.skip(f"no {VMLINUX}: the kernel was built without DEBUG_INFO_BTF, or this is not Linux")
    if kernel_version() < OLDEST:
        pytest.skip(f"Linux {os.uname().release} is older than the layout that mmcore models (6.18)")
    if struct.calcsize("P") != 8:
        pytest.skip("mmcore models a 64-bit kernel")
    return btf.Btf.of_running_kernel(VMLINUX)


def in_force(row):
    return row.since <= kernel_version() <= row.until


def dtype_fields(dtype):
    return {name: (field[1], field[0].itemsize) for name, field in dtype.fields.items()}


def layout_differences(kernel, what, dtype):
    """Return (differences without a row in the tables, rows that are no difference here)."""
    members = kernel.members(what)
    named = {name: (m.offset, m.size) for name, m in members.items() if "." not in name}
    ours = dtype_fields(dtype)
    rows = [row for row in ONE_SIDED if row.what == what and in_force(row)]
    spelled = [row for row in SPELLINGS if row.what == what and in_force(row)]
    kernels_own = {row.name for row in rows if row.side == "kernel"}
    ours_own = {row.name for row in rows if row.side == "ours"}
    unknown, stale = [], []

    paths = {name: name for name in ours}
    for row in spelled:
        if row.ours in named:
            stale.append(f"SPELLINGS: struct {what} has a member {row.ours} by that name")
        paths[row.ours] = row.kernel
    for name, place in ours.items():
        member = members.get(paths[name])
        if member is None:
            if name not in ours_own:
                unknown.append(f"struct {what} has no {paths[name]} (our {name})")
        elif (member.offset, member.size) != place:
            unknown.append(f"struct {what}.{paths[name]} is at {member.offset} with {member.size} bytes; ours at {place[0]} "
                           f"with {place[1]}")
    for name in named.keys() - set(paths.values()) - kernels_own:
        unknown.append(f"struct {what}.{name} at {named[name][0]} with {named[name][1]} bytes: not ours, not in the table")
    for row in rows:
        if row.config:
            continue
        if row.side == "kernel" and (row.name not in named or row.name in ours):
            stale.append(f"ONE_SIDED: struct {what}.{row.name} ({row.why})")
        if row.side == "ours" and row.name in named:
            stale.append(f"ONE_SIDED: struct {what}.{row.name} ({row.why})")
    return unknown, stale


@pytest.mark.parametrize("what, dtype, nr_pages", [("page", PAGE_DTYPE, 1), ("folio", FOLIO_DTYPE, 4)])
def test_layout_is_the_kernels(kernel, what, dtype, nr_pages):
    size = kernel.struct_size("page")
    if size != 64:
        # WANT_PAGE_VIRTUAL, LAST_CPUPID_NOT_IN_PAGE_FLAGS or KMSAN make it grow: then offsets past page 0 move too.
        grown = {"virtual", "_last_cpupid", "kmsan_shadow", "kmsan_origin"} & kernel.members("page").keys()
        assert grown, f"struct page has {size} bytes and none of the members that make it grow"
        pytest.skip(f"this kernel's struct page has {size} bytes because of {sorted(grown)}")
    assert dtype.itemsize == nr_pages * 64
    # The kernel's struct folio has a page more where tails carry more than mmcore models.
    assert kernel.struct_size(what) == dtype.itemsize
    unknown, stale = layout_differences(kernel, what, dtype)
    assert not unknown
    assert not stale, "rows that are no difference on this kernel"


def test_a_wrong_layout_would_be_seen(kernel):
    """The comparison can fail: a field moved, a field of another size, a field that no kernel has."""
    import numpy as np
    if kernel.struct_size("page") != 64:
        pytest.skip("not the layout that is compared")
    fields = {name: [field[0], field[1]] for name, field in PAGE_DTYPE.fields.items()}
    fields["_refcount"] = [np.dtype("<i4"), 56]
    fields["private"] = [np.dtype("<u4"), 40]
    fields["made_up"] = [np.dtype("<u8"), 0]
    wrong = np.dtype({"names": list(fields), "formats": [f[0] for f in fields.values()],
                      "offsets": [f[1] for f in fields.values()], "itemsize": 64})
    unknown, _ = layout_differences(kernel, "page", wrong)
    assert len(unknown) == 3
    assert all(any(name in text for text in unknown) for name in ("_refcount", "private", "made_up"))


def test_scatterlist_is_the_kernels(kernel):
    members = {name: (m.offset, m.size) for name, m in kernel.members("scatterlist").items()}
    missing = [name for name in SCATTERLIST if name not in members and name in SCATTERLIST_OPTIONAL]
    if missing:
        pytest.skip(f"this kernel was built without {[SCATTERLIST_OPTIONAL[name] for name in missing]}")
    assert members == SCATTERLIST
    assert kernel.struct_size("scatterlist") == 32


def test_page_flags_are_the_kernels(kernel):
    bits = {name[len("PG_"):]: bit for name, bit in kernel.enum("pageflags").items() if name.startswith("PG_")}
    ours = {flag.name: flag.value.bit_length() - 1 for flag in PageFlags}
    primary = {FLAG_NAMES.get(name, name): bit for name, bit in bits.items() if name not in FLAG_ALIASES}
    optional = [name for name in OPTIONAL_FLAGS if name in primary]

    assert primary.keys() - ours.keys() == set(), "flags of this kernel that PageFlags does not have"
    assert ours.keys() - primary.keys() - OPTIONAL_FLAGS.keys() == OUR_FLAGS
    for name, bit in primary.items():
        if name in OPTIONAL_FLAGS:
            assert bit == ours["mlocked"] + optional.index(name), f"PG_{name}"
        else:
            assert bit == ours[name], f"PG_{name}"
    for name, (stands_for, depends_on_build) in FLAG_ALIASES.items():
        if name in bits:
            assert bits[name] == primary[stands_for], f"PG_{name} is no other name of PG_{stands_for}"
        else:
            assert depends_on_build, f"FLAG_ALIASES: this kernel has no PG_{name}"
    if optional == list(OPTIONAL_FLAGS):
        assert {name: ours[name] for name in primary} == primary
    # mmcore's own bits are behind the kernel's and in front of the zone's.
    assert all(kernel.enum("pageflags")["__NR_PAGEFLAGS"] <= ours[name] < 51 for name in OUR_FLAGS)


def enumerator_differences(kernel, prefix, ours):
    theirs = kernel.enumerators(prefix)
    rows = [row for row in ENUMERATORS[prefix] if row[2] <= kernel_version() <= row[3]]
    known = {(name, side) for name, side, *_ in rows}
    unknown = [f"{name}: ours {ours[name]:#x}, the kernel's {theirs[name]:#x}" for name in ours.keys() & theirs.keys()
               if ours[name] != theirs[name]]
    unknown += [f"{name}: only ours" for name in ours.keys() - theirs.keys() if (name, "ours") not in known]
    unknown += [f"{name}: only the kernel's" for name in theirs.keys() - ours.keys() if (name, "kernel") not in known]
    stale = [name for name, side, _, _, depends_on_build, _ in rows
             if not depends_on_build and ((name in theirs) == (name in ours))]
    return unknown, stale


def our_foll_flags():
    return {name: int(getattr(mmcore, name)) for name in dir(mmcore) if name.startswith("FOLL_")}


def test_gup_flags_are_the_kernels(kernel):
    assert enumerator_differences(kernel, "FOLL_", our_foll_flags()) == ([], [])


def test_page_types_are_the_kernels(kernel):
    ours = {"PGTY_" + kind.name: kind.value for kind in PageType}
    assert enumerator_differences(kernel, "PGTY_", ours) == ([], [])


def test_a_wrong_enumerator_would_be_seen(kernel):
    ours = {"PGTY_" + kind.name: kind.value for kind in PageType}
    ours["PGTY_buddy"] += 1
    del ours["PGTY_table"]
    ours["PGTY_made_up"] = 7
    unknown, _ = enumerator_differences(kernel, "PGTY_", ours)
    assert len(unknown) == 3


def test_zone_ids_are_the_kernels(kernel):
    zones = kernel.enum("zone_type")
    if not {"ZONE_DMA", "ZONE_DMA32", "ZONE_DEVICE"} <= zones.keys() or "ZONE_HIGHMEM" in zones:
        pytest.skip(f"mmcore has the zone ids of a kernel with DMA, DMA32 and DEVICE; this one has {sorted(zones)}")
    assert {number: zones["ZONE_" + name.upper()] for number, name in ZONE_NAMES.items()} == {n: n for n in ZONE_NAMES}


# ---- without a kernel: our own constants against the published numbers ----------------------------------------------
def test_gup_flags_have_the_published_values():
    public = ["WRITE", "GET", "DUMP", "FORCE", "NOWAIT", "NOFAULT", "HWPOISON", "ANON", "LONGTERM", "SPLIT_PMD",
              "PCI_P2PDMA", "INTERRUPTIBLE", "HONOR_NUMA_FAULT"]
    internal = ["TOUCH", "TRIED", "REMOTE", "PIN", "FAST_ONLY", "UNLOCKABLE", "MADV_POPULATE"]
    expected = {"FOLL_" + name: 1 << bit for bit, name in enumerate(public)}
    expected.update({"FOLL_" + name: 1 << (16 + bit) for bit, name in enumerate(internal)})
    assert our_foll_flags() == expected


# ---- the reader itself ----------------------------------------------------------------------------------------------
class Builder:
    """Write a blob of BTF, to read it back."""

    def __init__(self, order="<"):
        self.order, self.types, self.strings, self.nr = order, b"", b"\0", 0

    def name(self, text):
        if not text:
            return 0
        at = len(self.strings)
        self.strings += text.encode() + b"\0"
        return at

    def add(self, kind, name, size, entries=(), vlen=None, flag=0, formats="III"):
        vlen = len(entries) if vlen is None else vlen
        self.types += struct.pack(self.order + "III", self.name(name), kind << 24 | vlen | flag << 31, size)
        for entry in entries:
            self.types += struct.pack(self.order + formats, *entry)
        self.nr += 1
        return self.nr

    def blob(self):
        return struct.pack(self.order + "HBBIIIII", btf.MAGIC, 1, 0, 24, 0, len(self.types), len(self.types),
                           len(self.strings)) + self.types + self.strings


@pytest.mark.parametrize("order", ["<", ">"])
def test_reader_reads_every_kind(order):
    #   struct box { u32 head; union { u64 word; struct { u32 low; u32 high; }; }; struct inner in; u32 rows[3]; u32 a:3, b:5; }
    b = Builder(order)
    u32 = b.add(btf.INT, "u32", 4, [(32,)], vlen=0, formats="I")
    u64 = b.add(btf.INT, "u64", 8, [(64,)], vlen=0, formats="I")
    counter = b.add(btf.TYPEDEF, "counter", b.add(btf.CONST, "", u32))
    pair = b.add(btf.STRUCT, "", 8, [(b.name("low"), u32, 0), (b.name("high"), counter, 32)])
    words = b.add(btf.UNION, "", 8, [(b.name("word"), u64, 0), (0, pair, 0)])
    pointer = b.add(btf.PTR, "", u64)
    inner = b.add(btf.STRUCT, "inner", 16, [(b.name("next"), pointer, 0), (b.name("value"), u64, 64)])
    rows = b.add(btf.ARRAY, "", 0, [(u32, u32, 3)], vlen=0)
    b.add(btf.FWD, "box", 0)
    b.add(btf.FUNC_PROTO, "", 0, [(0, u32), (0, u64)], formats="II")
    b.add(btf.STRUCT, "box", 48, [(b.name("head"), u32, 0), (0, words, 64), (b.name("in"), inner, 128),
                                  (b.name("rows"), rows, 256), (b.name("a"), u32, 3 << 24 | 352),
                                  (b.name("b"), u32, 5 << 24 | 355)], flag=1)
    b.add(btf.DATASEC, "data", 4, [(u32, 0, 4)])
    b.add(btf.ENUM, "", 4, [(b.name("X_MINUS"), 0xFFFFFFFF)], flag=1, formats="II")
    b.add(btf.ENUM, "xs", 4, [(b.name("X_ONE"), 1)], formats="II")
    b.add(btf.ENUM64, "big", 8, [(b.name("X_BIG"), 5, 1), (b.name("Y_BIG"), 0, 2)])
    types = btf.Btf(b.blob())

    assert types.struct_size("box") == 48
    found = {name: (m.offset, m.size) for name, m in types.members("box").items()}
    assert found == {"head": (0, 4), "word": (8, 8), "low": (8, 4), "high": (12, 4), "in": (16, 16), "in.next": (16, 8),
                     "in.value": (24, 8), "rows": (32, 12), "a": (44, 4), "b": (44, 4)}
    assert (types.members("box")["a"].bits, types.members("box")["b"].bits) == (3, 5)
    assert "in.next" not in types.members("box", depth=0)
    assert types.enumerators("X_") == {"X_MINUS": -1, "X_ONE": 1, "X_BIG": 5 + (1 << 32)}
    assert types.enum("xs") == {"X_ONE": 1} and types.enum("big")["Y_BIG"] == 2 << 32
    for missing in types.struct_size, types.members, types.enum:
        with pytest.raises(KeyError):
            missing("nowhere")


@pytest.mark.parametrize("spoil, text", [
    (lambda blob: blob[:10], "header"),
    (lambda blob: b"\0\0" + blob[2:], "magic"),
    (lambda blob: blob[:2] + b"\2" + blob[3:], "version"),
    (lambda blob: blob[:-1], "section"),
    (lambda blob: blob[:28] + struct.pack("<I", 30 << 24) + blob[32:], "kind"),
])
def test_reader_refuses_what_is_no_btf(spoil, text):
    b = Builder()
    b.add(btf.INT, "u32", 4, [(32,)], vlen=0, formats="I")
    with pytest.raises(btf.Error, match=text):
        btf.Btf(spoil(b.blob()))
