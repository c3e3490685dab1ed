"""Take part in a run as one of its processes, and leave no process behind when the run ends."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from model_store.errors import DneError, WrongUsage
from trainer.ranks.group import joined
from trainer.ranks.interrupts import Interrupts
from trainer.ranks.launch import EXIT_LOST, GRACE_S
from trainer.ranks.place import Place
from trainer.ranks.ranks import RankLost, Ranks

STDIN = 0


@contextmanager
def taking_part(place: Place, *, on_gpu: bool) -> Iterator[Ranks]:
    """Join the other ranks. SIGTERM acts as Ctrl-C does; errors name the rank."""
    interrupts = Interrupts()
    signal.signal(signal.SIGTERM, interrupts.ask)
    if place.meeting is not None:
        threading.Thread(target=_end_with_stdin, name="ends with the run", daemon=True).start()
    try:
        with joined(place, interrupts, on_gpu=on_gpu) as ranks:
            yield ranks
    except RankLost as error:
        print(f"error: {_by(place)}{error}", file=sys.stderr)
        raise SystemExit(EXIT_LOST) from error
    except WrongUsage as error:
        raise WrongUsage(f"{_by(place)}{error}") from error
    except DneError as error:
        raise DneError(f"{_by(place)}{error}") from error


def _by(place: Place) -> str:
    """Name the rank under torchrun; a command that starts the ranks itself does so."""
    return f"rank {place.rank}: " if place.rank and place.meeting is None else ""


def _end_with_stdin() -> None:
    """End this process when the command that has started it is gone, however that came about."""
    while os.read(STDIN, 1):  # nothing is ever written
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os._exit(1)  # it waits for a rank, where no signal reaches it
