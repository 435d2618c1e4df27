"""A progress bar on the terminal, for what takes longer than a second."""

import contextlib
import sys
import time

DELAY = 1.0          # seconds before a bar appears


@contextlib.contextmanager
def progress(delay=DELAY):
    """Give a call (done, total, what) that draws on stderr, or None where that is no terminal or rich is missing."""
    if not sys.stderr.isatty():
        yield None
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:
        yield None
        return
    bar = Progress(TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"),
                   TimeRemainingColumn(), console=Console(stderr=True), transient=True)
    started, tasks = time.monotonic(), {}

    def show(done, total, what):
        if not tasks:
            if time.monotonic() - started < delay:
                return
            bar.start()
            tasks["one"] = bar.add_task(what)
        bar.update(tasks["one"], description=what, completed=done, total=total)

    try:
        yield show
    finally:
        bar.stop()
