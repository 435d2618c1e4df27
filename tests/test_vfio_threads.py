"""One container, and several, under threads: nothing is lost, nothing is charged over a limit."""
import errno
import random
import sys

import pytest

from mmcore import *
from support import released, run
from vfio_support import *

ROUNDS = 150


@pytest.mark.parametrize("options", GENERATIONS[::5], ids=lambda o: "-".join(map(str, o.values())))
def test_map_unmap_and_pin_at_once(options):
    """Two threads map and unmap places of their own, one pins what is there, one attaches and detaches, one faults."""
    mem, mm = machine("128M")
    c = container(mem, 1, **options)
    addr = mapped(mm, 2 * HUGE, thp=True)
    c.register_device(lambda iova, size: unpin_all(iova))
    held = {}

    def unpin_all(iova):
        for _ in range(held.pop(iova, 0)):
            c.unpin_pages(iova, 1)

    def maps(place):
        def work():
            rng = random.Random(place)
            for _ in range(ROUNDS):
                iova, nr = place * HUGE * 8 + rng.randrange(4) * HUGE, rng.randrange(1, 512)
                try:
                    c.map_dma(mm, addr + rng.randrange(512) * PAGE, iova, nr * PAGE)
                except MMError as error:
                    assert error.errno == errno.EEXIST
                if rng.random() < .6:
                    try:
                        c.unmap_dma(place * HUGE * 8, 8 * HUGE)
                    except MMError as error:
                        assert error.errno == errno.EBUSY       # pinned between the notice and the next look
        return work

    def pinner():
        rng = random.Random(7)
        for _ in range(ROUNDS * 4):
            iova = rng.choice((0, 8 * HUGE)) + rng.randrange(4) * HUGE
            try:
                c.pin_pages(iova, 1, IOMMU_READ)
            except MMError as error:
                assert error.errno == errno.EINVAL
            else:
                held[iova] = held.get(iova, 0) + 1
                if rng.random() < .7:
                    held[iova] = held.get(iova, 1) - 1
                    try:
                        c.unpin_pages(iova, 1)
                    except MMError as error:
                        assert error.errno == errno.EINVAL

    def domains():
        for _ in range(ROUNDS // 3):
            domain = IOMMUDomain(mem)
            c.attach(domain)
            c.detach(domain)

    def faults():
        for _ in range(ROUNDS):
            mm.touch(addr, 2 * HUGE)

    run(maps(0), maps(1), pinner, domains, faults)
    for m in c.mappings:
        assert translations(c, m.iova, PAGE) == [mm.page_at(m.vaddr).pfn]
    assert sum(m.locked_vm for m in c.mappings) == mm.locked_vm
    over(c, mm)


def test_containers_that_share_a_limit_never_pass_it():
    mem = Memory("64M", debug=True)
    mm = MM(mem, rlimit_memlock=600 * PAGE)
    addr = mapped(mm, 512 * PAGE)
    done = []

    def worker(acquire):
        def work():
            c = container(mem, acquire=acquire)
            for i in range(ROUNDS):
                try:
                    c.map_dma(mm, addr, 0, (100 + i) * PAGE)
                except MMError as error:
                    assert error.errno == errno.ENOMEM
                    continue
                assert mm.locked_vm <= 600
                done.append(acquire)
                c.unmap_dma(0, 0, ALL)
            c.close()
        return work

    run(*[worker(acquire) for acquire in (*ACQUIRES, "sink")])
    assert done and mm.locked_vm == pins(mem) == 0
    mem.check()


def test_exit_of_the_process_under_way():
    """A process goes while its memory is mapped: what is pinned stays until it is unmapped."""
    for seed in range(10):
        mem, mm = machine()
        c = container(mem)
        addr = mapped(mm, 512 * PAGE)

        def maps():
            for i in range(20):
                try:
                    c.map_dma(mm, addr, i * HUGE, 512 * PAGE)
                except MMError as error:
                    assert error.errno in (errno.ESRCH, errno.EFAULT, errno.ENODEV)

        def leaves():
            for _ in range(seed * 30):
                mm.mem.vmstat()
            mm.exit()

        run(maps, leaves)
        c.close()
        assert pins(mem) == 0
        mem.check()


def test_a_domain_is_attached_by_one_of_two():
    """Attaching takes a while; whoever claims the domain first has it, and who fails gives it free."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(ROUNDS):
            mem, mm = machine("16M")
            addr = mapped(mm, PAGE)
            domain, containers = IOMMUDomain(mem), [VFIOContainer(mem) for _ in range(2)]
            for c in containers:
                c.map_dma(mm, addr, 0, PAGE)
            refusals = []

            def attach(c):
                try:
                    c.attach(domain)
                except InvalidArgument as error:
                    refusals.append(error)
            run(*[lambda c=c: attach(c) for c in containers])
            assert len(refusals) == 1 and sorted(len(c.domains) for c in containers) == [0, 1] and pins(mem) == 1
            for c in containers:
                c.close()
            released(mem)
    finally:
        sys.setswitchinterval(interval)


def test_an_attach_that_fails_leaves_the_domain_free():
    mem, mm = machine("16M")
    domain, c, other = IOMMUDomain(mem), VFIOContainer(mem), VFIOContainer(mem)
    c.map_dma(mm, mm.mmap(PAGE, prot=PROT_READ), 0, PAGE)
    with pytest.raises(MMError, match="FOLL_WRITE"):
        c.attach(domain)
    other.attach(domain)
    assert other.domains == [domain]
    other.close()
