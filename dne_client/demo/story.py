"""Run `dne demo`: learn three tasks of handwritten digits, serve them, roll back and resume.

It uses the commands and HTTP, as anyone would. On a terminal it goes on serving until Ctrl-C;
without one it ends after the story.

The images are scikit-learn's 1,797 handwritten digits, and drawn shapes for a fourth task. Every
third image is held out and never shown to the trainer.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from PIL import Image, ImageDraw
from sklearn.datasets import load_digits

from dne_client.answers import Answer
from dne_client.clients import Client
from dne_client.conversation import Retries
from dne_client.demo import parser
from dne_client.errors import Busy, ClientError, Unreachable
from model_store.tables import percent

DIGIT_TASKS = {"digits-0-4": range(5), "digits-5-6": range(5, 7), "digits-7-9": range(7, 10)}
SHAPES = ("cross", "triangle")
_SHAPES_EACH = 180
SIDE = 8  # pixels of a digit
_DRAWN_SIDE = 64  # shapes are drawn large, then shrunk: the grey edges look like the digits' ones


@dataclass(frozen=True, slots=True)
class DemoData:
    """`train/<task>/<class>/*.png` and `test/<class>/*.png` of the digits; the shapes apart."""

    root: Path

    def train(self, task: str) -> Path:
        return self.root / "train" / task

    @property
    def test(self) -> Path:
        return self.root / "test"

    @property
    def shapes_train(self) -> Path:
        return self.root / "train" / "shapes"

    @property
    def shapes_test(self) -> Path:
        return self.root / "test-shapes"

    def test_images(self, digits: range = range(10)) -> list[Path]:
        return [image for digit in digits for image in images_in(self.test / f"digit_{digit}")]


def images_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.png"))


def write_demo_data(root: Path) -> DemoData:
    data, digits, chance = DemoData(root), load_digits(), random.Random(0)
    task_of = {digit: task for task, members in DIGIT_TASKS.items() for digit in members}
    for index, (pixels, digit) in enumerate(zip(digits.images, digits.target, strict=True)):
        folder = data.test if index % 3 == 0 else data.train(task_of[int(digit)])
        image = Image.fromarray((pixels * 15.9).astype("uint8"))  # 0 to 16 becomes 0 to 254
        _save(image, folder / f"digit_{digit}", index)
    for shape in SHAPES:
        for index in range(_SHAPES_EACH):
            folder = data.shapes_test if index % 3 == 0 else data.shapes_train
            _save(_draw(shape, chance=chance), folder / shape, index)
    return data


def _draw(shape: str, *, chance: random.Random) -> Image.Image:
    """One shape, a little different each time in place, size, ink and slant."""
    image = Image.new("L", (_DRAWN_SIDE, _DRAWN_SIDE))
    pen = ImageDraw.Draw(image)
    ink = chance.randint(180, 255)
    reach = chance.randint(20, 30)
    middle = _DRAWN_SIDE // 2
    x, y = (middle + chance.randint(-3, 3) for _ in range(2))
    if shape == "cross":
        thick = chance.randint(7, 13)
        pen.line((x - reach, y, x + reach, y), fill=ink, width=thick)
        pen.line((x, y - reach, x, y + reach), fill=ink, width=thick)
    else:
        pen.polygon((x, y - reach, x - reach, y + reach, x + reach, y + reach), fill=ink)
    slanted = image.rotate(chance.uniform(-12, 12), resample=Image.Resampling.BILINEAR)
    return slanted.resize((SIDE, SIDE), Image.Resampling.BOX)


def _save(image: Image.Image, folder: Path, index: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    image.save(folder / f"{index:04d}.png")


COMMANDS = Path(sys.executable).parent
"""The folder of the commands of this environment, whatever PATH says."""
# Server and trainer share the cores. Threads that spin while they wait take them from each other:
# on two busy cores, learning took 4 times as long in one try and 11 times in another.
_ENVIRONMENT = {"OMP_WAIT_POLICY": "passive", **os.environ}
START_S = 60
STOP_S = 20
ONCE = Retries(attempts=1)


class DemoFailed(Exception):
    """The message says which step failed, and where to look."""


def spelt(command: str) -> str:
    """Write a command as it can be pasted into a terminal in this folder."""
    path = COMMANDS / command
    on_path = shutil.which(command)
    if on_path is not None and Path(on_path).resolve() == path.resolve():
        return command
    below = path.is_relative_to(Path.cwd())
    return str(path.relative_to(Path.cwd()) if below else path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def is_alive(self) -> bool:
        if self.process.poll() is not None:
            raise DemoFailed(f"the server ended by itself:\n{tail(self.log)}")
        try:
            with Client(self.url, retries=ONCE) as client:
                client.ready()
        except Busy:
            return True  # it answers, and has no model yet
        except Unreachable:
            return False
        return True

    def version(self, image: Path) -> int | None:
        """Return the version that answers now; None while there is no model."""
        try:
            return self.predict([image]).version
        except Busy:
            return None

    def predict(self, images: Sequence[Path]) -> Answer:
        with Client(self.url, retries=ONCE) as client:
            return client.predict_batch(images)


@contextlib.contextmanager
def _running_server(store: Path, *, port: int, token: str, log: Path) -> Iterator[Server]:
    options = ["--store", str(store), "--port", str(port)]
    with log.open("w") as stream:
        process = start(
            "dne-serve", *options,
            stdout=stream, stderr=stream, env={**_ENVIRONMENT, "DNE_ADMIN_TOKEN": token},
        )  # fmt: skip
    server = Server(url=f"http://127.0.0.1:{port}", process=process, log=log)
    with stopping(process, signal.SIGTERM):
        waited = wait_for(
            server.is_alive, within_s=START_S, otherwise=f"the server does not start; see {log}"
        )
        print(f"  {server.url} is up ({waited:.1f} s) and has no model yet")
        yield server


def train(*arguments: str, store: Path, log: Path) -> dict[str, Any]:
    """Run a `dne-train` command. Show progress on a terminal, or keep it in `log`."""
    shown = sys.stderr.isatty()
    with log.open("w") as stream:
        errors = None if shown else stream
        process = start(
            "dne-train", *arguments, "--store", str(store), "--json",
            stdout=subprocess.PIPE, stderr=errors, env=_ENVIRONMENT,
        )  # fmt: skip
        with stopping(process, signal.SIGINT):
            out, _ = process.communicate()
    if process.returncode:
        reason = "" if shown else f":\n{tail(log)}"
        raise DemoFailed(f"dne-train {arguments[0]} ended with {process.returncode}{reason}")
    answer: dict[str, Any] = json.loads(out.decode().splitlines()[-1])
    return answer


def _move_channel(*arguments: str, store: Path) -> None:
    """Run `dne-store rollback`, `resume` or `promote`."""
    process = start(
        "dne-store", *arguments, "--store", str(store),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=_ENVIRONMENT,
    )  # fmt: skip
    with stopping(process, signal.SIGTERM):
        out, _ = process.communicate()
    if process.returncode:
        said = out.decode(errors="replace")
        raise DemoFailed(f"dne-store {arguments[0]} ended with {process.returncode}: {said}")


def start(command: str, *arguments: str, **streams: Any) -> subprocess.Popen[bytes]:
    """Print and start a command of this environment.

    It has a session of its own: Ctrl-C reaches the demo only, which then stops what it started.
    """
    bold, plain = ("\033[1m", "\033[0m") if sys.stdout.isatty() else ("", "")
    print(f"{bold}$ {shlex.join([spelt(command), *arguments])}{plain}", flush=True)
    return subprocess.Popen([COMMANDS / command, *arguments], start_new_session=True, **streams)


@contextlib.contextmanager
def stopping(process: subprocess.Popen[bytes], number: signal.Signals) -> Iterator[None]:
    """End the process with the block, however the block ends."""
    try:
        yield
    finally:
        if process.poll() is None:
            process.send_signal(number)
        try:
            process.wait(STOP_S)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            process.kill()
            process.wait()


def free_port(wanted: int) -> int:
    """Return the wanted port, or a free one with a note if it is taken."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server will
        try:
            probe.bind(("127.0.0.1", wanted))
        except OSError:
            probe.bind(("127.0.0.1", 0))
            print(f"Port {wanted} is taken: another one is used.")
        return int(probe.getsockname()[1])


def wait_for(happened: Callable[[], bool], *, within_s: float, otherwise: str) -> float:
    """Wait until something has happened. Return the seconds that it took."""
    began = time.monotonic()
    while not happened():
        if time.monotonic() - began > within_s:
            raise DemoFailed(otherwise)
        time.sleep(0.05)
    return time.monotonic() - began


def tail(log: Path, *, lines: int = 8) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


MARK = ".dne-demo"
LEARNING = (
    "--preset", "tiny", "--batch-size", "64", "--learning-rate", "0.002", "--augment", "light",
)  # fmt: skip
_FIRST_TASK = ("--heads", "2", "--epochs", "30")
_LATER_TASKS = ("--epochs", "20")
"""Options for a short time: a narrow network suffices for images of 8×8 pixels (ADR 75)."""
_LEAST_ACCURACY = 0.90
_IMAGES_A_REQUEST = 64
_SERVED_S = 10


def main(arguments: Sequence[str] | None = None) -> int:
    asked = parser().parse_args(arguments)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    try:
        with fresh_folder(asked.folder) as place:
            tell(place, port=asked.port)
    except (DemoFailed, ClientError) as error:
        print(f"\nThe demo failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nStopped before the end of the story.", file=sys.stderr)
        return 1
    return 0


@dataclass(frozen=True, slots=True)
class DemoFolder:
    """The demo's folder: images, store and logs."""

    folder: Path

    @property
    def data(self) -> Path:
        return self.folder / "data"

    @property
    def store(self) -> Path:
        return self.folder / "models"

    @property
    def server_log(self) -> Path:
        return self.folder / "server.log"

    def train(self, *arguments: str) -> dict[str, Any]:
        return train(*arguments, store=self.store, log=self.folder / "trainer.log")


def tell(place: DemoFolder, *, port: int) -> None:
    """Tell the story from start to end."""
    print(f"dne-serve: a classifier that grows. The demo keeps its files in {place.folder}.\n")
    data = write_demo_data(place.data)
    print(f"Handwritten digits as PNG folders: {data.root}; a third of them is held out.")
    token = secrets.token_urlsafe(12)
    with _running_server(
        place.store, port=free_port(port), token=token, log=place.server_log
    ) as server:
        for version, task in enumerate(DIGIT_TASKS, start=1):
            learn(task, place=place, server=server, data=data, version=version)
        measure(server, place=place, data=data)
        _roll_back_and_resume(server, place=place, data=data)
        print(_invitation(server.url, place=place, token=token, data=data), flush=True)
        if sys.stdout.isatty():
            _serve_until_interrupted(server)


def learn(task: str, *, place: DemoFolder, server: Server, data: DemoData, version: int) -> None:
    digits = DIGIT_TASKS[task]
    print(f"\nTask {version} of {len(DIGIT_TASKS)}: the digits {digits[0]} to {digits[-1]}")
    folder = str(data.train(task))
    options = (*LEARNING, *(_FIRST_TASK if version == 1 else _LATER_TASKS))
    learnt = place.train("add-task", "--data", folder, "--name", task, *options)
    new, all_ = (learnt[name] / 2**20 for name in ("delta_bytes", "total_bytes"))
    print(
        f"  version {learnt['version']} knows {learnt['classes']} classes; "
        f"{new:.2f} MiB of its {all_:.2f} MiB are new; learnt in {learnt['seconds']:.0f} s"
    )
    waited = wait_until_served(version, server=server, data=data)
    print(f"  the running server serves it {waited:.1f} s later")
    newest = [images_in(data.test / f"digit_{digit}")[0] for digit in digits]
    show(server.predict(newest), images=newest)


def measure(server: Server, *, place: DemoFolder, data: DemoData) -> None:
    images = data.test_images()
    print(f"\nAll {len(images)} held-out digits, asked of the server and of dne-train evaluate")
    right = 0
    for start in range(0, len(images), _IMAGES_A_REQUEST):
        some = images[start : start + _IMAGES_A_REQUEST]
        answers = server.predict(some).predictions
        right += sum(
            answer.label == image.parent.name for answer, image in zip(answers, some, strict=True)
        )
    served = right / len(images)
    evaluation = place.train("evaluate", "--data", str(data.test))
    evaluated = float(evaluation["accuracy"]["all"])
    print(
        f"  right: {percent(served)} of the server's answers, {percent(evaluated)} by "
        "dne-train evaluate"
    )
    if served < _LEAST_ACCURACY:
        raise DemoFailed(f"less than {_LEAST_ACCURACY:.0%} of the held-out digits were right")
    if abs(served - evaluated) > 1.5 / len(images):
        raise DemoFailed("the server and dne-train evaluate do not agree")


def _roll_back_and_resume(server: Server, *, place: DemoFolder, data: DemoData) -> None:
    print("\nBack to the first version, and forward again; no weights move")
    images = [images_in(data.test / f"digit_{digit}")[1] for digit in (3, 6, 9)]
    _move_channel("rollback", "--to", "1", "--reason", "showing how", store=place.store)
    wait_until_served(1, server=server, data=data)
    show(server.predict(images), images=images)
    _move_channel("resume", "--reason", "shown", store=place.store)
    wait_until_served(len(DIGIT_TASKS), server=server, data=data)
    show(server.predict(images), images=images)


def _invitation(url: str, *, place: DemoFolder, token: str, data: DemoData) -> str:
    """Write what to try next, ready to paste."""
    digit = data.test_images()[0]
    shape = images_in(data.shapes_test / SHAPES[0])[0]
    add_task = f"{spelt('dne-train')} add-task --data {data.shapes_train}"
    port = url.rpartition(":")[2]
    store = f"--store {place.store}"
    manage = spelt("dne-store")
    serve = f"DNE_ADMIN_TOKEN={token} {spelt('dne-serve')} {store} --port {port}"
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
  roll back     {manage} rollback --to 1 {store}
  come back     {manage} resume {store}
  a 4th task    {add_task} --name shapes {store}
                curl -F files=@{shape} {url}/predict
  all versions  {manage} list {store}"""


def _serve_until_interrupted(server: Server) -> None:
    with contextlib.suppress(KeyboardInterrupt):
        server.process.wait()
        raise DemoFailed(f"the server ended by itself; see {server.log}")
    print("\nStopped. The demo's files stay where they are until the next demo.")


def wait_until_served(version: int, *, server: Server, data: DemoData) -> float:
    image = data.test_images()[0]
    return wait_for(
        lambda: server.version(image) == version,
        within_s=_SERVED_S,
        otherwise=f"the server does not serve version {version} after {_SERVED_S} s",
    )


def show(answer: Answer, *, images: Sequence[Path]) -> None:
    """Print one line: the images that were sent, and their labels."""
    said = ", ".join(
        f"{image.parent.name} → {prediction.label} ({prediction.score:.2f})"
        for image, prediction in zip(images, answer.predictions, strict=True)
    )
    print(f"  POST /predict, version {answer.version}: {said}")


@contextlib.contextmanager
def fresh_folder(folder: Path) -> Iterator[DemoFolder]:
    """Empty the folder of an earlier demo, and keep other demos out of it.

    The mark tells a demo's folder from one that somebody else has filled.
    """
    place, mark = DemoFolder(folder), folder / MARK
    try:
        if folder.exists() and not mark.exists() and any(folder.iterdir()):
            raise DemoFailed(
                f"{folder} has files that no demo made; choose another with --folder DIR"
            )
        folder.mkdir(parents=True, exist_ok=True)
        lock = mark.open("w")
    except OSError as error:
        raise DemoFailed(f"{folder} cannot be the demo's folder: {error.strerror}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DemoFailed(f"another demo is running in {folder}; stop it first") from None
        for made in (place.store, place.data):
            shutil.rmtree(made, ignore_errors=True)
        yield place


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt
