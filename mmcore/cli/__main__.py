"""Run the command line as `python -m mmcore.cli`."""

import sys

from . import main

sys.exit(main())
