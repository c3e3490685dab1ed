"""Where dne-store starts. People and scripts wait for it, so it starts quickly."""

from __future__ import annotations

import gc
import os
import sys


def main() -> int:
    # pydantic looks through every installed distribution for plugins: a sixth of the whole time.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    gc.disable()  # what imports make stays, so that looking for garbage among it is in vain
    from model_store.cli.main import main as command

    gc.freeze()
    gc.enable()
    return command()


if __name__ == "__main__":
    sys.exit(main())
