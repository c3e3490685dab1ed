"""Keep the direction of a token in a few hundred bytes: a signed byte a channel, in base64.

Directions are all that groups are made of. The cosine of two tokens changes by less than a
hundredth.
"""

from __future__ import annotations

import base64

import numpy as np
from numpy.typing import NDArray

MOST = 127
MAX_CHANNELS = 4096
"""A wider slice is kept by its first channels: the record of an item has a limit."""


def packed(token: NDArray[np.floating]) -> str | None:
    """Write the direction of a token, or None where it has none."""
    kept = np.asarray(token[:MAX_CHANNELS], dtype=np.float64)
    largest = float(np.abs(kept).max(initial=0.0))
    if not 0 < largest < np.inf:
        return None
    whole = np.rint(kept * (MOST / largest)).astype(np.int8)
    return base64.b64encode(whole.tobytes()).decode()


def unpacked(text: str) -> NDArray[np.float32]:
    """Read a direction. Records are checked for base64 when they are read."""
    return np.frombuffer(base64.b64decode(text), dtype=np.int8).astype(np.float32)
