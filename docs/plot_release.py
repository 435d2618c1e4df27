"""Plot what releasing a page costs, by folio order and by algorithm: the picture of the README.

    python docs/plot_release.py             # draws docs/_static/release.svg from docs/_static/release.json
    python docs/plot_release.py --measure   # measures first: 1 Mi pages an order, some seconds
"""
import argparse
import json
from functools import partial
from pathlib import Path

STATIC = Path(__file__).resolve().parent / "_static"
ORDERS = range(10)
LABELS = {"page": "page: one at a time (Linux to 2020)", "head": "head: by compound head (Linux since 2021)",
          "run": "run: a look a folio (mmcore)", "range": "range: contiguous pages"}


def measure(nr_pages, rounds):
    """Return {"pages", "rounds", "machine", "ns_per_page": {algorithm: [an order each]}}."""
    import mmcore as mmc
    from mmcore.bench import layouts
    from mmcore.bench.measure import Sweeper, Variant, interleave, median_mad
    from mmcore.bench.report import machine

    sweep, times = Sweeper(), {name: [] for name in LABELS}
    for order in ORDERS:
        layout = layouts.uniform(nr_pages, order)
        grab = partial(mmc.grab_pages, layout.pages)
        variants = [Variant(name, partial(mmc.unpin_user_pages, layout.pages, release=name), grab) for name in ("page", "head", "run")]
        variants.append(Variant("range", partial(mmc.unpin_user_page_range_dirty_lock, layout.first, layout.nr, False), grab))
        for name, samples in interleave(variants, rounds, sweep).items():
            times[name].append(round(median_mad(samples)[0] / layout.nr, 4))
        del variants, grab
        layout.close()
    return {"pages": nr_pages, "rounds": rounds, "machine": machine(), "ns_per_page": times}


def draw(data, path):
    import matplotlib
    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "mmcore", "svg.fonttype": "none"})
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
    for name, label in LABELS.items():
        axes.plot(ORDERS, data["ns_per_page"][name], marker="o", markersize=4, label=label)
    axes.set_yscale("log")
    axes.set_xticks(list(ORDERS), [f"{4 << order}K" if order < 8 else f"{4 << order >> 10}M" for order in ORDERS])
    axes.set(xlabel="folio size", ylabel="ns to unpin a page", title="unpin_user_pages(), a list of "
             f"{data['pages'] >> 20} Mi pages, caches swept")
    axes.grid(True, which="major", alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path, metadata={"Date": None} if str(path).endswith(".svg") else None)
    plt.close(figure)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--measure", action="store_true", help="measure first, and keep the figures")
    parser.add_argument("--pages", type=int, default=1 << 20)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, default=STATIC)
    args = parser.parse_args()
    figures = args.folder / "release.json"
    if args.measure:
        figures.write_text(json.dumps(measure(args.pages, args.rounds), indent=1) + "\n")
    draw(json.loads(figures.read_text()), args.folder / "release.svg")


if __name__ == "__main__":
    main()
