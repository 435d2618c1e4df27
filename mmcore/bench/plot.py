"""The ratios of `mmcore bench` as a picture: one line a scenario, measured beside published, on a logarithmic scale."""

COLOURS = {"win": "#1b7837", "even": "#888888", "loss": "#b2182b", "too few rounds": "#888888"}


def plot_ratios(report, path):
    """Draw the ratios of a report of tables.measure() into a .png or .svg file. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    # Text as text: a fifth of the size, and found by a search. The same report gives the same file.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "mmcore"})
    from matplotlib.lines import Line2D
    import matplotlib.pyplot as plt

    tables = list(dict.fromkeys(entry["table"] for entry in report["entries"]))
    counts = [sum(entry["table"] == table for entry in report["entries"]) for table in tables]
    figure, axes = plt.subplots(len(tables), 1, figsize=(11, 1.2 + 0.32 * sum(counts) + 0.75 * len(tables)),
                                sharex=True, squeeze=False,
                                height_ratios=[count + 0.6 for count in counts], layout="constrained")
    for axis, table in zip(axes[:, 0], tables):
        entries = [entry for entry in report["entries"] if entry["table"] == table]
        for at, entry in enumerate(entries):
            ratio, low, high = entry["ratio"], entry["low"], entry["high"]
            axis.barh(at, ratio - 1, left=1, height=0.55, color=COLOURS[entry["verdict"]], alpha=0.85)
            axis.plot([low, high], [at, at], color="black", linewidth=1.2, solid_capstyle="butt")
            if entry["published_ratio"]:
                axis.plot(entry["published_ratio"], at, marker="D", color="#f1a340", markeredgecolor="black",
                          markersize=7, linestyle="none")
            axis.annotate(f"{ratio:.2f}x", (max(high, ratio, 1), at), xytext=(6, 0), textcoords="offset points",
                          va="center", fontsize=8)
        axis.set_yticks(range(len(entries)), [f"{entry['scenario']}: {entry['before']} → {entry['after']}"
                                              for entry in entries], fontsize=8.5)
        axis.set_ylim(len(entries) - 0.4, -0.6)
        axis.set_title(table, loc="left", fontsize=10, fontweight="bold")
        axis.axvline(1, color="black", linewidth=0.8)
        axis.grid(axis="x", which="both", alpha=0.25)
        axis.set_axisbelow(True)
    last = axes[-1, 0]
    last.set_xscale("log")
    highest = max((entry["high"] for entry in report["entries"]), default=10)
    lowest = min((entry["low"] for entry in report["entries"]), default=1)
    last.set_xlim(min(lowest * 0.85, 0.7), highest * 2.2)
    ticks = [tick for tick in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)
             if min(lowest * 0.85, 0.7) <= tick <= highest * 2.2]
    last.set_xticks(ticks, [f"{tick:g}x" for tick in ticks])
    last.minorticks_off()
    last.set_xlabel("times faster than before (right of 1 is faster); line: spread of the rounds")
    marks = [Line2D([], [], color=COLOURS["win"], linewidth=7, label="faster"),
             Line2D([], [], color=COLOURS["even"], linewidth=7, label="even"),
             Line2D([], [], color=COLOURS["loss"], linewidth=7, label="slower"),
             Line2D([], [], marker="D", color="#f1a340", markeredgecolor="black", linestyle="none", label="published")]
    figure.legend(handles=marks, loc="outside upper right", ncols=4, fontsize=8.5)
    figure.suptitle(report["machine"], fontsize=8, x=0.01, ha="left")
    figure.savefig(path, dpi=130, metadata={"Date": None} if path.endswith(".svg") else None)
    plt.close(figure)
