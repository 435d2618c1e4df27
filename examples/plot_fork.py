"""What a fork costs with more and more of its pages pinned: each is copied at once, for the child.

    python examples/plot_fork.py [FILE.png]     # needs matplotlib: pip install mmcore[plot]
"""
import sys
import time

import mmcore as mmc

SIZE = 64 << 20


def fork(pinned, size=SIZE):
    """Fork a process of 4 KiB pages of which the first `pinned` are pinned: (milliseconds, pages copied)."""
    with mmc.Memory(4 * size, thp="never") as mem:
        mm = mmc.MM(mem)
        addr = mm.mmap(size)
        mm.write(addr, b"x" * size)
        pages = mmc.pin_user_pages_fast(mm, addr, pinned, mmc.FOLL_WRITE) if pinned else mmc.PageList(mem)
        free = mem.vmstat()["nr_free_pages"]
        start = time.perf_counter()
        child = mm.fork()
        took = (time.perf_counter() - start) * 1e3
        copied = free - mem.vmstat()["nr_free_pages"] - child.nr_tables
        child.exit()
        mmc.unpin_user_pages(pages)
        mm.exit()
        mem.check()
        return took, copied


def main(path="fork.png"):
    try:
        import matplotlib
    except ImportError:
        sys.exit("matplotlib is missing: pip install 'mmcore[plot]'")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    nr = SIZE // 4096
    points = [nr * k // 8 for k in range(9)]
    rows = [(pinned, *min(fork(pinned) for _ in range(3))) for pinned in points]
    for pinned, took, copied in rows:
        print(f"{pinned:6} of {nr} pages pinned: {copied:6} copied, {took:7.2f} ms")
        assert copied == pinned
    figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
    axes.plot([100 * pinned / nr for pinned, _, _ in rows], [took for _, took, _ in rows], marker="o")
    axes.set(xlabel="pages pinned, %", ylabel="fork, ms", ylim=(0, None), title=f"fork of {SIZE >> 20} MiB in 4 KiB pages")
    figure.savefig(path, dpi=100)
    print(f"{path} is written")


if __name__ == "__main__":
    main(*sys.argv[1:])
