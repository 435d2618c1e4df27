"""Releases of many steps, which go on whatever one of them finds."""


def all_of(steps):
    """Take every step of a release; then raise what the first one that failed raised."""
    failed = None
    for step in steps:
        try:
            step()
        except BaseException as error:
            failed = failed or error
    if failed is not None:
        raise failed
