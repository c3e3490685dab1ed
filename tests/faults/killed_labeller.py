"""Add and label items until somebody kills this process; say each one that is done.

python -m tests.faults.killed_labeller FOLDER
"""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from itertools import count
from pathlib import Path

from model_store.backends.local import LocalDirectory
from model_store.loop.inbox import Inbox, Judgement
from tests.model_store.loop.items import add_item


def main() -> None:
    inbox = Inbox(LocalDirectory(Path(sys.argv[1])))
    for number in count():
        item = add_item(inbox, str(number), since=datetime.now(UTC))
        for label in ("mug", "cup"):
            record = inbox.judge(item, Judgement.of_class(label), actor="labeller")
            print(item, record.number, label, flush=True)
        if number % 3 == 2:
            inbox.delete(item)
            print(item, 0, "deleted", flush=True)


if __name__ == "__main__":
    main()
