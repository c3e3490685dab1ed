"""Run `dne-train` as `python -m trainer`, and with `torchrun … -m trainer`."""

from __future__ import annotations

import sys

from trainer.cli import main

if __name__ == "__main__":
    sys.exit(main())
