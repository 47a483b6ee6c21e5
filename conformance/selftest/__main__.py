"""Serve as the sound agent or as a mutant: `python -m conformance.selftest [MUTANT] [FLAG…]`.

`--list` prints the mutants. `--auth` asks for a login, `--fork` offers the draft of forking.
"""

from __future__ import annotations

import os
import sys

if not __package__:  # started by its path, wherever that is: the import of site is not needed
    sys.path[0] = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))

from conformance.selftest.build import run

if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
