"""Run `dne-train worker`: a worker with the options of the command line."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from functools import partial
from pathlib import Path
from types import FrameType
from typing import NoReturn

from model_store.cli.command import current_actor
from model_store.records.signing import load_signer
from trainer.inbox.from_inbox import NAME, AddsTask, learn_from_inbox
from trainer.inbox.worker import Worker
from trainer.progress import show_progress
from trainer.request import AddTask, Work
from trainer.tokens.cache import default_folder

log = logging.getLogger("dne_train")
LOG_FORMAT = "%(asctime)s %(levelname)s %(message)s"


def run_worker(work: Work, *, add_task: AddsTask, checkpoint: Path) -> int:
    """Run jobs, and return their number. A signal ends the worker; another one takes its job."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format=LOG_FORMAT)
    signal.signal(signal.SIGTERM, _interrupt)
    if work.until_stdin_closes:
        threading.Thread(target=_end_with_stdin, daemon=True).start()
    request = AddTask(
        data=Path(NAME),
        store=work.store,
        channel=work.channel,
        device=work.device,
        memory=work.memory,
        limits=work.limits,
        signer=load_signer(work.sign) if work.sign else None,
        checkpoint=checkpoint,
        tokens=default_folder(),
        reason="labels of the inbox",
        skip_bad=True,
        actor=current_actor(),
        command="dne-train worker",
    )
    learn = partial(learn_from_inbox, add_task=add_task)
    worker = Worker(request, progress=show_progress(), learn=learn)
    try:
        worker.run(once=work.once, poll_s=work.poll_seconds, stop=threading.Event())
    except KeyboardInterrupt:
        log.info("ended while no job was under way")
    return worker.done


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def _end_with_stdin() -> None:
    """Interrupt this process when the other end of its standard input is gone."""
    while os.read(sys.stdin.fileno(), 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
