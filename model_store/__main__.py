"""Start dne-store quickly: people and scripts wait for it."""

from __future__ import annotations

import gc
import os
import sys


def main() -> int:
    # pydantic looks through every installed distribution for plugins: a sixth of the whole time.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    gc.disable()  # imports make no garbage, so collecting it would only take time
    from model_store.cli.main import main as command

    gc.freeze()
    gc.enable()
    return command()


if __name__ == "__main__":
    sys.exit(main())
