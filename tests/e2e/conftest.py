from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.chromium import chromium


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """One Chromium for all tests of a file. Playwright leaves an event loop running meanwhile, in
    which no other file could run one of its own."""
    with chromium() as browser:
        yield browser
