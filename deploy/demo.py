"""The whole story with real handwritten digits: three tasks learnt one after the other, served
while they appear, rolled back and resumed. It uses the commands and HTTP, as anyone would.

On a terminal it goes on serving until Ctrl-C; without one it ends after the story.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import secrets
import shutil
import signal
import sys
import urllib.error
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from demo_data import DIGIT_TASKS, SHAPES, DemoData, images_in, write_demo_data
from demo_processes import (
    COMMANDS,
    PROJECT,
    DemoFailed,
    Server,
    free_port,
    move_channel,
    running_server,
    train,
    wait_for,
)

from model_store.tables import percent

FOLDER = Path("demo")
STORE = FOLDER / "models"
SERVER_LOG = FOLDER / "server.log"
TRAINER_LOG = FOLDER / "trainer.log"

LEAST_ACCURACY = 0.90
IMAGES_A_REQUEST = 64
SERVED_S = 10


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Learn and serve handwritten digits, task by task."
    )
    parser.add_argument("--port", type=int, default=8000, help="where to serve (default: 8000)")
    port = parser.parse_args().port
    os.chdir(PROJECT)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    try:
        with fresh_folder():
            tell(port)
    except (DemoFailed, urllib.error.URLError) as error:
        print(f"\nThe demo failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nStopped before the end of the story.", file=sys.stderr)
        return 1
    return 0


def tell(port: int) -> None:
    """The story, start to end."""
    print("dne-serve: a classifier that grows. What this demo makes is in ./demo.\n")
    data = write_demo_data(FOLDER / "data")
    print(f"Handwritten digits as PNG folders: {data.root}; a third of them is held out.")
    token = secrets.token_urlsafe(12)
    with running_server(STORE, port=free_port(port), token=token, log=SERVER_LOG) as server:
        for version, task in enumerate(DIGIT_TASKS, start=1):
            learn(task, server=server, data=data, version=version)
        measure(server, data=data)
        roll_back_and_resume(server, data=data)
        print(invitation(server.url, token=token, data=data), flush=True)
        if sys.stdout.isatty():
            serve_until_interrupted(server)


def learn(task: str, *, server: Server, data: DemoData, version: int) -> None:
    digits = DIGIT_TASKS[task]
    print(f"\nTask {version} of {len(DIGIT_TASKS)}: the digits {digits[0]} to {digits[-1]}")
    folder = str(data.train(task))
    options = ("--data", folder, "--name", task, "--preset", "tiny")
    learnt = train("add-task", *options, store=STORE, log=TRAINER_LOG)
    new, all_ = (learnt[name] / 2**20 for name in ("delta_bytes", "total_bytes"))
    print(
        f"  version {learnt['version']} knows {learnt['classes']} classes; "
        f"{new:.2f} MiB of its {all_:.2f} MiB are new; learnt in {learnt['seconds']:.0f} s"
    )
    waited = wait_until_served(version, server=server, data=data)
    print(f"  the running server serves it {waited:.1f} s later")
    newest = [images_in(data.test / f"digit_{digit}")[0] for digit in digits]
    show(server.predict(newest), images=newest)


def measure(server: Server, *, data: DemoData) -> None:
    images = data.test_images()
    print(f"\nAll {len(images)} held-out digits, asked of the server and of dne-train evaluate")
    right = 0
    for start in range(0, len(images), IMAGES_A_REQUEST):
        some = images[start : start + IMAGES_A_REQUEST]
        answers = server.predict(some)["predictions"]
        right += sum(
            answer["label"] == image.parent.name
            for answer, image in zip(answers, some, strict=True)
        )
    served = right / len(images)
    evaluation = train("evaluate", "--data", str(data.test), store=STORE, log=TRAINER_LOG)
    evaluated = float(evaluation["accuracy"]["all"])
    print(
        f"  right: {percent(served)} of the server's answers, {percent(evaluated)} by "
        "dne-train evaluate"
    )
    if served < LEAST_ACCURACY:
        raise DemoFailed(f"less than {LEAST_ACCURACY:.0%} of the held-out digits were right")
    if abs(served - evaluated) > 1.5 / len(images):
        raise DemoFailed("the server and dne-train evaluate do not agree")


def roll_back_and_resume(server: Server, *, data: DemoData) -> None:
    print("\nBack to the first version, and forward again; no weights move")
    images = [images_in(data.test / f"digit_{digit}")[1] for digit in (3, 6, 9)]
    move_channel("rollback", "--to", "1", "--reason", "showing how", store=STORE)
    wait_until_served(1, server=server, data=data)
    show(server.predict(images), images=images)
    move_channel("resume", "--reason", "shown", store=STORE)
    wait_until_served(len(DIGIT_TASKS), server=server, data=data)
    show(server.predict(images), images=images)


def invitation(url: str, *, token: str, data: DemoData) -> str:
    """What to try next, ready to paste."""
    digit = data.test_images()[0]
    shape = images_in(data.shapes_test / SHAPES[0])[0]
    add_task = f"{COMMANDS}/dne-train add-task --data {data.shapes_train}"
    port = url.rpartition(":")[2]
    serve = f"DNE_ADMIN_TOKEN={token} {COMMANDS}/dne-serve --store {STORE} --port {port}"
    opening = (
        "Try it from another terminal; Ctrl-C ends this server."
        if sys.stdout.isatty()
        else f"The server ends here. To go on, start it again:\n  {serve}"
    )
    return f"""
{opening}
  the page      {url}/
                its roll-back button asks for the admin token: {token}
  predict       curl -F files=@{digit} {url}/predict
  roll back     {COMMANDS}/dne-store rollback --to 1 --store {STORE}
  come back     {COMMANDS}/dne-store resume --store {STORE}
  a 4th task    {add_task} --name shapes --store {STORE}
                curl -F files=@{shape} {url}/predict
  all versions  {COMMANDS}/dne-store list --store {STORE}"""


def serve_until_interrupted(server: Server) -> None:
    with contextlib.suppress(KeyboardInterrupt):
        server.process.wait()
        raise DemoFailed(f"the server ended by itself; see {SERVER_LOG}")
    print("\nStopped. What the demo made stays in ./demo until the next one.")


def wait_until_served(version: int, *, server: Server, data: DemoData) -> float:
    image = data.test_images()[0]
    return wait_for(
        lambda: server.version(image) == version,
        within_s=SERVED_S,
        otherwise=f"the server does not serve version {version} after {SERVED_S} s",
    )


def show(answer: dict[str, Any], *, images: Sequence[Path]) -> None:
    """One line: what was sent, and what the version said it is."""
    said = ", ".join(
        f"{image.parent.name} → {prediction['label']} ({prediction['score']:.2f})"
        for image, prediction in zip(images, answer["predictions"], strict=True)
    )
    print(f"  POST /predict, version {answer['version']}: {said}")


@contextlib.contextmanager
def fresh_folder() -> Iterator[None]:
    """./demo without what an earlier demo made, and with no other demo in it."""
    FOLDER.mkdir(exist_ok=True)
    with (FOLDER / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DemoFailed("another demo is running in this folder; stop it first") from None
        for made in (STORE, FOLDER / "data"):
            shutil.rmtree(made, ignore_errors=True)
        yield


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
