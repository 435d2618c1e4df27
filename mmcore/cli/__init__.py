"""The command line: `mmcore VERB`.

Exit status: 0 done, 1 error, 2 usage, 77 not possible on this machine (and why).
"""

import argparse
import importlib
import os
import sys

# One module of this package each: mr-test is mr_test.py.
VERBS = ("register", "gup-test", "mr-test", "vfio-dma-map", "capture", "backing", "types", "map", "frag", "diff", "pins",
         "preflight", "why-not-longterm", "stress", "bench")

EXIT_ERROR = 1
EXIT_USAGE = 2
EXIT_NOT_POSSIBLE = 77


def main(argv=None):
    """Run the command line; return the exit status. argv: words after the program's name."""
    from mmcore.live.errors import NotPossible

    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:      # closed by whoever started this
            setattr(sys, name, open(os.devnull, "w"))
    args = _parser().parse_args(argv)
    try:
        status = args.run(args) or 0
        sys.stdout.flush()
    except NotPossible as error:
        _say(args, f"not possible here: {error.reason}; remedy: {error.remedy}")
        return EXIT_NOT_POSSIBLE
    except BrokenPipeError:
        # The reader (head, less) has seen enough; keep the interpreter's exit from writing more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_ERROR
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        _say(args, where + (error.strerror or str(error)))
        return EXIT_ERROR
    except (ValueError, RuntimeError, MemoryError) as error:
        _say(args, str(error) or type(error).__name__)
        return EXIT_ERROR
    return status


def _say(args, text):
    print(f"mmcore {args.verb}: {' '.join(str(text).split())}", file=sys.stderr)


def _parser():
    parser = argparse.ArgumentParser(
        prog="mmcore",
        description="What does pinning memory cost on Linux, and why? For real buffers of this "
                    "machine and in a model of the kernel's page pinning.",
        epilog="exit status: 0 done, 1 error, 2 usage, 77 not possible on this machine (and why)",
    )
    parser.add_argument("--version", action="version", version=f"mmcore {_version()}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True, title="verbs")
    for name in VERBS:
        module = importlib.import_module(f"{__name__}.{name.replace('-', '_')}")
        verb = verbs.add_parser(name, help=module.HELP, description=module.__doc__.strip())
        verb.add_argument("--json", action="store_true", help="print JSON")
        module.add_arguments(verb)
        # parse.error belongs to the verb: usage errors found late show its own usage line.
        verb.set_defaults(run=module.run, usage_error=verb.error)
    return parser


def _version():
    from importlib import metadata

    try:
        return metadata.version("mmcore")
    except metadata.PackageNotFoundError:
        import mmcore

        return getattr(mmcore, "__version__", "(not installed)")
