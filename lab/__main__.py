"""Run comparisons and write reports: `python -m lab compare …`, `python -m lab report …`."""

from __future__ import annotations

import sys

from lab.cli import main

sys.exit(main())
