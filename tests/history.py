"""One history of calls on several machines that were built alike, and on the plain engine of reference/frames.py.

After every call all machines have the same bytes in mem_map and the same statistics, and both are what the reference
says; a call that is refused is refused by all, for the same page, and changes nothing.
"""
import random

import mmcore as mmc
from mmcore import BadPage, DevicePages, FOLL_GET, FOLL_PIN, Memory, MMError, PageList, PageRanges
from reference import Refused, frames

POOLS = {"2M": 1, "64K": 3}
MACHINE = dict(movable="2M", cma="2M", hugetlb=POOLS,
               devices=[DevicePages("8K", type="generic"), DevicePages("64K", type="generic", align="32K"),
                        DevicePages("4K", type="fsdax"), DevicePages("4K", type="pci_p2pdma")])


class History:
    """`machines`: a name for each Memory. The name is the generation, or how else it gets its lists (see release)."""

    def __init__(self, machines, huge_zero=True):
        self.mems = {name: Memory("16M", **MACHINE) for name in machines}
        self.first = self.mems[machines[0]]
        self.reference = frames.Engine(self.first.vmstat()["nr_free_pages"], {9: 1, 4: 3})
        self.reference.adopt(1, 0, "zero")
        self.pinned, self.taken, self.seen = [], [], set()
        for device in self.first.devices:
            for pfn in range(device.start_pfn, device.start_pfn + device.nr_pages, device.align // 4096):
                self.reference.adopt(pfn, self.first.folio(pfn).order, device.type, int(device.type == "generic"))
        if huge_zero:
            pfn, = {mem.huge_zero_folio.pfn for mem in self.mems.values()}
            self.reference.adopt(pfn, 9, "huge_zero")
        self.calls = [getattr(self, name) for name in sorted(dir(type(self))) if name.startswith("do_")]

    # -- lists --------------------------------------------------------------------------------------------------------
    def a_head(self, rng):
        return rng.choice(sorted(self.reference.folios))

    def a_piece(self, rng):
        """Pages of one folio in some order, or what is no folio's."""
        what = rng.random()
        if what < 0.05:
            return [0] * rng.randint(1, 3)
        if what < 0.10:
            return [1] * rng.randint(1, 3)
        folio = self.reference.folios[self.a_head(rng)]
        pages = list(range(folio.pfn, folio.pfn + folio.nr))
        shape = rng.randrange(7)
        if shape == 0:
            return pages
        if shape == 1:
            return pages[::-1]
        if shape == 2:
            return pages[::rng.randint(1, 5)]
        if shape == 3:
            return pages[-rng.randint(1, 40):] + pages[:1]          # tails first
        if shape == 4:
            return [rng.choice(pages) for _ in range(rng.randint(1, 70))]
        if shape == 5:
            rng.shuffle(pages)
            return pages[:rng.randint(1, 100)]
        return pages[rng.randrange(len(pages)):][:rng.randint(1, 70)]

    def a_list(self, rng):
        return sum([self.a_piece(rng) for _ in range(rng.randint(1, 6))], [])

    def held(self, rng, held):
        """Some of what is held, in an order of its own; now and then with an entry too many."""
        if not held:
            return self.a_list(rng)
        pfns = sorted(held) if rng.random() < 0.5 else list(held)
        if rng.random() < 0.5:
            start = rng.randrange(len(pfns))
            pfns = pfns[start:start + rng.randint(1, len(pfns))]
        order = rng.randrange(4)
        if order == 0:
            pfns.reverse()
        elif order == 1:
            rng.shuffle(pfns)
        for at in 0, 1:
            if rng.random() < 0.15:
                pfns.insert(rng.randint(0, len(pfns)), at)
        if rng.random() < 0.15:
            pfns.insert(rng.randint(0, len(pfns)), rng.choice([pfns[0], rng.randint(2, 4000), self.a_head(rng)]))
        return pfns

    @staticmethod
    def forget(held, pfns):
        for pfn in pfns:
            if pfn in held:
                held.remove(pfn)

    # -- one call on all ----------------------------------------------------------------------------------------------
    def step(self, seed):
        rng = random.Random(seed)
        call = rng.choice(self.calls)
        call(rng)

    def on_all(self, what, should, do):
        """should() on the reference and do(name, mem) on every machine; returns whether it was done."""
        before, expected = self.first.pages.tobytes(), None
        try:
            should()
        except frames.BadPage:
            expected = BadPage
        except Refused as e:
            expected = e.errno
        outcomes = {}
        for name, mem in self.mems.items():
            try:
                do(name, mem)
                outcomes[name] = None, None
            except BadPage as e:
                outcomes[name] = BadPage, e.pfn
            except MMError as e:
                outcomes[name] = e.errno, e.pfn
        assert len(set(outcomes.values())) == 1, f"{what}: {outcomes}"
        assert outcomes[next(iter(outcomes))][0] == expected, f"{what}: {outcomes}, the reference says {expected}"
        self.compare(what)
        if expected is not None:
            assert self.first.pages.tobytes() == before, f"{what} was refused and changed mem_map"
        return expected is None

    def compare(self, what):
        mem_map, says = self.first.pages.tobytes(), self.reference.statistics()
        for name, mem in self.mems.items():
            assert mem.pages.tobytes() == mem_map, f"{what}: another mem_map on {name}"
            stat = mem.vmstat()
            assert {key: stat[key] for key in says} == says, f"{what}: statistics on {name}"
        found = self.reference.differences(self.first.pages, self.seen)
        assert found == [], f"{what}: {found}"
        for order, (nr, free) in self.reference.pools.items():
            assert self.first.hugetlb_pools()[4096 << order] == (nr, free), what

    def check(self):
        for mem in self.mems.values():
            mem.check()
        stat = self.first.vmstat()
        assert stat["nr_foll_pin_acquired"] - stat["nr_foll_pin_released"] == self.reference.live_pins()

    @staticmethod
    def as_input(name, mem, pfns):
        pages = PageList(mem, pfns)
        return PageRanges.from_pagelist(pages) if name == "ranges" else pages

    @staticmethod
    def generation(name):
        return {} if name == "ranges" else {"release": name}

    # -- the calls: what the reference does, and what a machine does ----------------------------------------------------
    def do_alloc(self, rng):
        kind = rng.choice(["Normal", "Normal", "Normal", "Movable", "CMA", "hugetlb"])
        order = rng.choice([9, 4, 4]) if kind == "hugetlb" else rng.choice([0, 0, 0, 1, 2, 3, 5, 8, 9, 10])
        got = set()
        for mem in self.mems.values():
            try:
                if kind == "hugetlb":
                    got.add(mmc.folio_alloc(mem, order, hugetlb=True).pfn)
                else:
                    got.add(mmc.folio_alloc(mem, order, zone=kind).pfn)
            except MMError as e:
                assert e.errno == 12
                got.add(None)
        pfn, = got
        if kind == "hugetlb":
            assert (pfn is None) == (self.reference.pools[order][1] == 0)
        if pfn is not None:
            self.reference.adopt(pfn, order, "hugetlb" if kind == "hugetlb" else "normal", from_pool=kind == "hugetlb")
            self.seen.update(range(pfn, pfn + (1 << order)))
            self.taken.append(pfn)
        self.compare(f"alloc {kind} {order}")

    do_alloc_again = do_alloc_and_again = do_alloc

    def do_pin(self, rng):
        pfns = self.a_list(rng)
        if self.on_all(f"pin {pfns}", lambda: self.reference.pin(pfns),
                       lambda name, mem: mmc.grab_pages(self.as_input(name, mem, pfns))):
            self.pinned += [pfn for pfn in pfns if pfn > 1]

    do_pin_again = do_pin_and_again = do_pin

    def do_get(self, rng):
        pfns = self.a_list(rng)
        if self.on_all(f"get {pfns}", lambda: self.reference.get(pfns),
                       lambda name, mem: mmc.grab_pages(self.as_input(name, mem, pfns), FOLL_GET)):
            self.taken += [pfn for pfn in pfns if pfn]

    def do_unpin_user_pages(self, rng):
        pfns = self.held(rng, self.pinned)
        nr = rng.choice([None, None, len(pfns), rng.randint(0, len(pfns))])
        if self.on_all(f"unpin {pfns} {nr}", lambda: self.reference.unpin(pfns[:nr]),
                       lambda name, mem: mmc.unpin_user_pages(self.as_input(name, mem, pfns), nr,
                                                              **self.generation(name))):
            self.forget(self.pinned, pfns[:nr])

    do_unpin_user_pages_again = do_unpin_user_pages

    def do_unpin_user_pages_dirty_lock(self, rng):
        pfns, dirty = self.held(rng, self.pinned), rng.random() < 0.8
        nr = rng.choice([len(pfns), rng.randint(0, len(pfns))])
        if self.on_all(f"unpin_dirty {pfns} {nr} {dirty}", lambda: self.reference.unpin(pfns[:nr], dirty),
                       lambda name, mem: mmc.unpin_user_pages_dirty_lock(self.as_input(name, mem, pfns), nr, dirty,
                                                                         **self.generation(name))):
            self.forget(self.pinned, pfns[:nr])

    do_unpin_user_pages_dirty_lock_again = do_unpin_user_pages_dirty_lock

    def do_unpin_range(self, rng):
        # A range on some machines, the list of the same pages on the others.
        start = rng.choice(self.pinned) if self.pinned and rng.random() < 0.8 else self.a_head(rng)
        n, dirty = 1, rng.random() < 0.5
        while start + n in self.pinned and rng.random() < 0.98:
            n += 1
        n += rng.random() < 0.1
        for end in [4096] + [device.start_pfn + device.nr_pages for device in self.first.devices]:
            if start < end:
                n = min(n, end - start)         # a range does not leave its memory
        pfns = range(start, start + n)

        def do(name, mem):
            if name == "page":
                mmc.unpin_user_pages_dirty_lock(PageList(mem, pfns), n, dirty, release="page")
            else:
                mmc.unpin_user_page_range_dirty_lock(mem.page(start), n, dirty)

        if self.on_all(f"unpin_range {start} {n} {dirty}", lambda: self.reference.unpin(pfns, dirty), do):
            self.forget(self.pinned, pfns)

    def do_one_folio(self, rng):
        head = self.reference.head_of.get(rng.choice(self.pinned)) if self.pinned else None
        head = head or self.a_head(rng)
        mine = [pfn for pfn in self.pinned if self.reference.head_of.get(pfn) == head]
        n, dirty = rng.choice([1, len(mine), rng.randint(0, len(mine) + 1)]), rng.random() < 0.5
        call = rng.choice([
            lambda f: mmc.unpin_user_folio(f, n), lambda f: mmc.put_compound_head(f, n, FOLL_PIN),
            lambda f: mmc.unpin_user_folio_dirty_locked(f, n, False), lambda f: [mmc.unpin_folio(f)] if n == 1 else
            mmc.unpin_user_folio(f, n),
        ]) if not dirty else lambda f: mmc.unpin_user_folio_dirty_locked(f, n, True)
        if self.on_all(f"unpin folio {head} {n} {dirty}", lambda: self.reference.unpin_folio(head, n, dirty),
                       lambda name, mem: call(mem.folio(head))):
            self.forget(self.pinned, mine[:n])

    def do_unpin_user_page(self, rng):
        pfn = rng.choice(self.pinned) if self.pinned and rng.random() < 0.9 else self.a_head(rng)
        if self.on_all(f"unpin_user_page {pfn}", lambda: self.reference.unpin([pfn]),
                       lambda name, mem: mmc.unpin_user_page(mem.page(pfn))):
            self.forget(self.pinned, [pfn])

    def do_unpin_folios(self, rng):
        # One pin of each folio: of the heads of what is pinned, with neighbours that are equal and None.
        heads = [self.reference.head_of[pfn] for pfn in self.held(rng, self.pinned)[:40] if pfn in self.reference.head_of]
        if rng.random() < 0.3:
            heads.insert(rng.randint(0, len(heads)), 0)
        left, mine = list(self.pinned), []
        for head in heads:
            mine += [pfn for pfn in left if self.reference.head_of.get(pfn) == head][:1]
            self.forget(left, mine[-1:])
        if self.on_all(f"unpin_folios {heads}", lambda: self.reference.unpin(heads),
                       lambda name, mem: mmc.unpin_folios([mem.folio(pfn) if pfn else None for pfn in heads])):
            self.pinned = left

    def do_release_pages(self, rng):
        pfns = self.held(rng, self.taken)
        if self.on_all(f"release_pages {pfns}", lambda: self.reference.release(pfns),
                       lambda name, mem: mmc.release_pages(self.as_input(name, mem, pfns), **self.generation(name))):
            self.forget(self.taken, pfns)

    def do_put(self, rng):
        pfn = rng.choice(self.taken) if self.taken and rng.random() < 0.6 else self.a_head(rng)
        n = rng.choice([1, 1, 1, 2, 40])
        head = self.reference.head_of.get(pfn, pfn)
        call = rng.choice([lambda mem: mmc.folio_put_refs(mem.folio(head), n),
                           lambda mem: mmc.put_compound_head(mem.folio(head), n, FOLL_GET)])
        if n == 1:
            call = rng.choice([lambda mem: mmc.put_page(mem.page(pfn)), lambda mem: mmc.folio_put(mem.folio(head)), call])
        if self.on_all(f"put {pfn} {n}", lambda: self.reference.put([head] * n), lambda name, mem: call(mem)):
            self.forget(self.taken, [pfn])

    def do_folios_put(self, rng):
        heads = [self.reference.head_of[pfn] for pfn in self.held(rng, self.taken)[:40] if pfn in self.reference.head_of]
        if self.on_all(f"folios_put {heads}", lambda: self.reference.release(heads),
                       lambda name, mem: mmc.folios_put([mem.folio(pfn) for pfn in heads])):
            self.forget(self.taken, heads)

    def do_dirty(self, rng):
        head = self.a_head(rng)
        folio = self.reference.folios[head]
        if folio.refcount <= 0 or folio.kind == "zero":
            return
        if rng.random() < 0.6:
            self.on_all(f"mark_dirty {head}", lambda: self.reference.mark_dirty(head),
                        lambda name, mem: mmc.folio_mark_dirty_lock(mem.folio(head)))
        else:
            self.on_all(f"clear_dirty {head}", lambda: self.reference.clear_dirty(head),
                        lambda name, mem: mmc.folio_clear_dirty_for_io(mem.folio(head)))

    def do_split(self, rng):
        large = [pfn for pfn, folio in sorted(self.reference.folios.items()) if folio.large and folio.refcount > 0]
        if large:
            head = rng.choice(large)
            order = rng.randint(0, self.reference.folios[head].order)
            self.on_all(f"split {head} {order}", lambda: self.reference.split(head, order),
                        lambda name, mem: mmc.folio_split(mem.folio(head), order))

    def release_all(self):
        """Every holder lets go: in one call each, in the order in which they took."""
        self.on_all("unpin all", lambda: self.reference.unpin(self.pinned),
                    lambda name, mem: mmc.unpin_user_pages(self.as_input(name, mem, self.pinned), **self.generation(name)))
        assert self.reference.acquired == self.reference.released and self.reference.live_pins() == 0
