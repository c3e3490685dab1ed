"""A request to end that Python has dropped is heeded at the next exchange."""

from __future__ import annotations

import signal

import pytest

from trainer.ranks.group import Group, Interrupts


class Destroyed:
    """Python drops what is raised here, and says so on stderr."""

    def __init__(self, interrupts: Interrupts) -> None:
        self._interrupts = interrupts

    def __del__(self) -> None:
        self._interrupts.ask(signal.SIGTERM, None)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_request_that_was_dropped_ends_the_next_exchange() -> None:
    interrupts = Interrupts()
    group = Group(None, interrupts, rank=0, count=1)
    with group.watched():
        Destroyed(interrupts)
    with pytest.raises(KeyboardInterrupt), group.watched():
        pytest.fail("the exchange took place")


def test_a_request_interrupts_at_once() -> None:
    with pytest.raises(KeyboardInterrupt):
        Interrupts().ask(signal.SIGTERM, None)
