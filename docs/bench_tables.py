#!/usr/bin/env python3
"""Write one run of `mmcore bench --save` into docs/benchmarks.md: its tables, and where others are faster.

    mmcore bench --save benchmarks/data/bench.json --csv benchmarks/data/bench.csv --plot docs/bench.svg
    python docs/bench_tables.py

What stands between the marks of benchmarks.md is replaced; everything else there is written by hand.
"""
import json
from pathlib import Path

from mmcore.bench.report import number
from mmcore.bench.tables import cost_model_words
from mmcore.core.size import format_size

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "benchmarks.md"
DATA = ROOT / "benchmarks" / "data" / "bench.json"
FASTER = 1.1            # from here on another one's lead is told


def tables(report):
    """Yield the lines of a run: what ran, and a table each."""
    floor = ", ".join(f"{what} {value:.2f}" for what, value in report["floor_ns_per_page"].items())
    yield (f"{report['machine']}; the machine was shared with other work. {report['rounds']} interleaved rounds; buffers of "
           f"{format_size(report['size'])}, regions of {format_size(report['region'])}. Memory itself, ns a page: {floor}. Data: "
           "`benchmarks/data/bench.json`, `bench.csv`.")
    yield ""
    yield "![Ratios of the run, beside the published ones](bench.svg)"
    for table in dict.fromkeys(entry["table"] for entry in report["entries"]):
        yield f"\n### {table[0].upper()}{table[1:]}\n"
        yield "| scenario | before | ns | after | ns | ratio | spread | verdict | published | kernel, ns | C, ns |"
        yield "|---|---|--:|---|--:|--:|--:|---|--:|--:|--:|"
        for entry in (entry for entry in report["entries"] if entry["table"] == table):
            published = f"{entry['published_ratio']:.2f}x" if entry["published_ratio"] else ""
            kernel, peer = entry["kernel"].get("ns_per_page"), entry["peer"].get("ns_per_page")
            yield (f"| {entry['scenario']} | {entry['before']} | {number(entry['before_ns_per_page'])} | {entry['after']} | "
                   f"{number(entry['after_ns_per_page'])} | {entry['ratio']:.2f}x | {entry['low']:.2f}-{entry['high']:.2f} | "
                   f"{entry['verdict']} | {published} | {number(kernel) if kernel else '-'} | {number(peer) if peer else '-'} |")
    model = report.get("cost_model")
    if model:
        words = cost_model_words(model)
        yield f"\n{words[0].upper()}{words[1:]}."


def others(report):
    """Yield a line for each entry where somebody else is faster, or nothing is gained."""
    for entry in report["entries"]:
        name, after = f"{entry['scenario']}, {entry['before']} -> {entry['after']}", entry["after_ns_per_page"]
        kernel, peer = entry["kernel"].get("ns_per_page"), entry["peer"].get("ns_per_page")
        if kernel and kernel * FASTER < after:
            yield f"- {name}: the running kernel takes {number(kernel)} ns a page, the engine {number(after)}."
        if peer and peer * FASTER < after:
            yield f"- {name}: plain C takes {number(peer)} ns a page, the engine {number(after)}."
        if entry["verdict"] != "win":
            word = "slower" if entry["verdict"] == "loss" else "no difference that can be told"
            yield f"- {name}: {entry['ratio']:.2f}x ({entry['low']:.2f}-{entry['high']:.2f}), {word}."


def between(text, mark, lines):
    """Return the text with what stands between two marks replaced."""
    start, end = f"<!-- {mark} -->\n", f"<!-- end of {mark} -->\n"
    head, rest = text.split(start)
    return head + start + "\n".join(lines) + "\n" + end + rest.split(end)[1]


def main():
    """Read the data, write the page."""
    report = json.loads(DATA.read_text())
    text = between(PAGE.read_text(), "run", tables(report))
    PAGE.write_text(between(text, "others", others(report)))


if __name__ == "__main__":
    main()
