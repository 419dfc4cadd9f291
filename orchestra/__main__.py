"""`python -m orchestra VERB …`: the command, also from a bare checkout."""

from __future__ import annotations

import sys

from orchestra.cli import main

if __name__ == "__main__":
    sys.exit(main())
