#!/usr/bin/env python3
"""Fuzz the public API, saved files and the command line for a while: fuzz_run.py [--seconds N] [--corpus DIR] [--only PART].

Three parts share the time. api: random calls from new seeds (fuzz.py). files: saved memories and captures with bytes, arrays
and JSON changed; each is refused with a documented error, or loads and is lawful. cli: random command lines; each ends with
a documented exit status and no traceback. What gave an outcome that was not seen before is kept in the corpus, and mutated
from there next time; what broke something is written to DIR/broken-*, and the exit status is 1.
"""
import argparse
import contextlib
import io
import json
import random
import sys
import time
import traceback
import warnings
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import mmcore as mmc  # noqa: E402
from fuzz import SHAPES, Fuzz  # noqa: E402
from mmcore import BadPage, Memory, MMError  # noqa: E402

REFUSALS = (MMError, BadPage, ValueError, OSError, MemoryError)
WORDS = ["register", "mr-test", "--json", "--size", "--backing", "4k", "thp", "hugetlb", "shmem", "1M", "64K", "0", "-1", "4097", "1e9",
         "--help", "--version", "--rounds", "1", "nonsense", "", "--", "-n", "\\udc80", "--size=64K", "--backing=4k", "2M", "x" * 300]


def api(rng, corpus, state):
    """One seed of random calls."""
    shape, seed = rng.choice(sorted(SHAPES)), rng.randrange(1 << 40)
    fuzz = Fuzz(shape, seed)
    try:
        for i in range(600):
            fuzz.step()
        fuzz.mem.check()
        fuzz.other.check()
        fuzz.mem.close()
        fuzz.other.close()
    except Exception:
        return ("api", f"{shape} {seed}".encode(), traceback.format_exc())
    return None


def seeds(corpus):
    """A saved Memory and a capture, to begin with."""
    made = corpus / "seed-memory.npz"
    if not made.exists():
        with Memory("4M", movable="1M", hugetlb={"64K": 2}, devices=[mmc.DevicePages("64K")]) as mem:
            folio, pages = mmc.folio_alloc(mem, 3), mmc.alloc_pages_bulk(mem, 5)
            mmc.grab_pages(pages)
            mmc.page_address(folio.page)[:4] = b"seed"
            mem.save(made)
    capture = corpus / "seed-capture.npz"
    if not capture.exists() and sys.platform.startswith("linux"):
        with contextlib.suppress(Exception):
            from mmcore import live
            with live.buffer("64K") as area:
                live.capture(area).save(capture)
    return [path for path in (made, capture) if path.exists()]


def mutate(rng, data):
    """Bytes, arrays or JSON of an .npz, changed."""
    if rng.random() < 0.3 or not data:
        data = bytearray(data)
        for _ in range(rng.choice([1, 1, 3, 30])):
            if not data:
                data += rng.randbytes(4)    # all of it was cut away
            where = rng.randrange(len(data))
            what = rng.randrange(4)
            if what == 0:
                data[where] = rng.randrange(256)
            elif what == 1:
                del data[where:where + rng.randrange(1, 64)]
            elif what == 2:
                data[where:where] = rng.randbytes(rng.randrange(1, 16))
            else:
                data[where:] = b""
            if not data:
                data = bytearray(b"PK")
        return bytes(data)
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as file:
            arrays = {name: file[name].copy() for name in file.files}
    except Exception:
        return data[:rng.randrange(len(data) + 1)]
    name = rng.choice(sorted(arrays))
    array = arrays[name]
    words = [name for name in arrays if arrays[name].dtype == np.uint8 and arrays[name].ndim == 1]
    what = rng.randrange(6)
    if what == 0:
        del arrays[name]
    elif what == 1 and words:
        name = rng.choice(sorted(words))
        text = bytes(arrays[name])
        try:
            tree = json.loads(text)
            key = rng.choice(sorted(tree))
            tree[key] = rng.choice([None, -1, 0, 1 << 70, "x", [], {}, [1, 2], True, 1.5, 4096, 3])
            text = json.dumps(tree).encode()
        except Exception:
            text = text[:rng.randrange(len(text) + 1)]
        arrays[name] = np.frombuffer(text, np.uint8)
    elif what == 2:
        arrays[name] = array[:rng.randrange(len(array) + 1)] if array.ndim and len(array) else np.zeros(3, array.dtype)
    elif what == 3:
        arrays[name] = array.astype(rng.choice(["u1", "i8", "f4", "u2", "U3"])) if array.dtype.fields is None else array.ravel()
    elif array.size:
        flat = array.reshape(-1).view("u1") if array.flags.c_contiguous else array.ravel().view("u1")
        for _ in range(rng.choice([1, 1, 4, 40])):
            flat[rng.randrange(len(flat))] = rng.choice([0, 1, 255, 128, rng.randrange(256)])
    out = io.BytesIO()
    with contextlib.suppress(Exception):
        np.savez(out, **arrays)
    return out.getvalue() or data


def load(path):
    """What both loaders make of a file, as words."""
    from mmcore.live import Capture
    outcome = []
    for loader in (Memory.load, Capture.load):
        try:
            got = loader(path)
            if isinstance(got, Memory):
                got.check()
                got.close()
            else:
                got.backing()
            outcome.append("loads")
        except REFUSALS as error:
            outcome.append(f"{type(error).__name__} {''.join(c for c in str(error).split(':')[-1] if c.isalpha() or c == ' ')[:60]}")
    return " / ".join(outcome)


def files(rng, corpus, state):
    known = state.setdefault("files", seeds(corpus) + sorted(corpus.glob("file-*")))
    data = mutate(rng, rng.choice(known).read_bytes())
    trial = corpus / "trial.npz"
    trial.write_bytes(data)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            outcome = load(trial)
    except Exception:
        return ("files", data, traceback.format_exc())
    if outcome not in state.setdefault("outcomes", set()):
        state["outcomes"].add(outcome)
        if len(known) < 200 and len(data) < 1 << 20:
            kept = corpus / f"file-{len(known):03}.npz"
            kept.write_bytes(data)
            known.append(kept)
    return None


def cli(rng, corpus, state):
    from mmcore.cli import main
    words = [rng.choice(WORDS) for _ in range(rng.randrange(6))]
    if rng.random() < 0.8:
        words.insert(0, rng.choice(["register", "mr-test"]))
        words += ["--size", rng.choice(["64K", "1M", "0", "x", "-4K", "4097"])]
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            status = main(words)
    except SystemExit as end:
        status = end.code or 0
    except Exception:
        return ("cli", repr(words).encode(), traceback.format_exc())
    if status not in (0, 1, 2, 77) or (status and "Traceback" in err.getvalue()) or (status and not err.getvalue().strip()):
        return ("cli", repr(words).encode(), f"exit status {status}\n{err.getvalue()}")
    return None


PARTS = {"api": api, "files": files, "cli": cli}


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--corpus", type=Path, default=HERE.parent / "build" / "fuzz")
    parser.add_argument("--only", choices=PARTS)
    parser.add_argument("--seed", type=int, default=None, help="draw the same inputs again")
    args = parser.parse_args(argv)
    args.corpus.mkdir(parents=True, exist_ok=True)
    seed = random.SystemRandom().randrange(1 << 32) if args.seed is None else args.seed
    rng, state, counts, broken = random.Random(seed), {}, dict.fromkeys(PARTS, 0), 0
    end, parts = time.monotonic() + args.seconds, [args.only] if args.only else list(PARTS)
    spent = dict.fromkeys(parts, 0.0)
    while time.monotonic() < end and broken < 10:
        part = min(parts, key=spent.get)
        start = time.monotonic()
        fault = PARTS[part](rng, args.corpus, state)
        spent[part] += time.monotonic() - start
        counts[part] += 1
        if fault:
            broken += 1
            where = args.corpus / f"broken-{fault[0]}-{seed}-{counts[part]}"
            where.write_bytes(fault[1])
            print(f"{where}:\n{fault[2]}")
    print(f"seed {seed}: {', '.join(f'{n} {part}' for part, n in counts.items() if n)}; "
          f"{len(state.get('outcomes', ()))} outcomes of files; {broken} broken")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
