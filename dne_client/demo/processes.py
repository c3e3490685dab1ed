"""Start the demo's processes (a server, a trainer, the store's command), and ask the server.

Every process has ended when its `with` block has. The standard library speaks HTTP, so that the
demo needs no extra of the client.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COMMANDS = Path(sys.executable).parent
"""The folder of the commands of this environment, whatever PATH says."""
# Server and trainer share the cores. Threads that spin while they wait take them from each other:
# on two busy cores, learning took 4 times as long in one try and 11 times in another.
ENVIRONMENT = {"OMP_WAIT_POLICY": "passive", **os.environ}
START_S = 60
STOP_S = 20


class DemoFailed(Exception):
    """The message says which step failed, and where to look."""


def spelt(command: str) -> str:
    """Write a command as it can be pasted into a terminal in this folder."""
    path = COMMANDS / command
    found = shutil.which(command)
    if found is not None and Path(found).resolve() == path.resolve():
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
            with urllib.request.urlopen(self.url + "/healthz", timeout=5):
                return True
        except OSError:
            return False

    def version(self, image: Path) -> int | None:
        """The version that answers now; none while there is no model."""
        try:
            return int(self.predict([image])["version"])
        except urllib.error.HTTPError as error:
            if error.code == 503:
                return None
            raise

    def predict(self, images: Sequence[Path]) -> dict[str, Any]:
        boundary = uuid.uuid4().hex
        request = urllib.request.Request(
            self.url + "/predict",
            data=multipart(images, boundary=boundary),
            headers={"Content-Type": f"multipart/form-data; boundary={boundary}"},
        )
        with urllib.request.urlopen(request, timeout=30) as response:
            answer: dict[str, Any] = json.load(response)
        return answer


@contextlib.contextmanager
def running_server(store: Path, *, port: int, token: str, log: Path) -> Iterator[Server]:
    options = ["--store", str(store), "--port", str(port)]
    with log.open("w") as stream:
        process = start(
            "dne-serve", *options,
            stdout=stream, stderr=stream, env={**ENVIRONMENT, "DNE_ADMIN_TOKEN": token},
        )  # fmt: skip
    server = Server(url=f"http://127.0.0.1:{port}", process=process, log=log)
    with stopping(process, signal.SIGTERM):
        waited = wait_for(
            server.is_alive, within_s=START_S, otherwise=f"the server does not start; see {log}"
        )
        print(f"  {server.url} is up ({waited:.1f} s) and has no model yet")
        yield server


def train(*arguments: str, store: Path, log: Path) -> dict[str, Any]:
    """The JSON of a `dne-train` command. Progress is shown on a terminal, else kept in `log`."""
    shown = sys.stderr.isatty()
    with log.open("w") as stream:
        errors = None if shown else stream
        process = start(
            "dne-train", *arguments, "--store", str(store), "--json",
            stdout=subprocess.PIPE, stderr=errors, env=ENVIRONMENT,
        )  # fmt: skip
        with stopping(process, signal.SIGINT):
            out, _ = process.communicate()
    if process.returncode:
        reason = "" if shown else f":\n{tail(log)}"
        raise DemoFailed(f"dne-train {arguments[0]} ended with {process.returncode}{reason}")
    answer: dict[str, Any] = json.loads(out.decode().splitlines()[-1])
    return answer


def move_channel(*arguments: str, store: Path) -> None:
    """`dne-store rollback`, `resume` or `promote`."""
    process = start(
        "dne-store", *arguments, "--store", str(store),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=ENVIRONMENT,
    )  # fmt: skip
    with stopping(process, signal.SIGTERM):
        out, _ = process.communicate()
    if process.returncode:
        said = out.decode(errors="replace")
        raise DemoFailed(f"dne-store {arguments[0]} ended with {process.returncode}: {said}")


def start(command: str, *arguments: str, **streams: Any) -> subprocess.Popen[bytes]:
    """Say and start a command of this environment.

    It has a session of its own: Ctrl-C reaches the demo only, which then stops what it started.
    """
    say_command([spelt(command), *arguments])
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


def multipart(images: Sequence[Path], *, boundary: str) -> bytes:
    """Encode images as `curl -F files=@… -F files=@…` sends."""
    parts = [
        f'--{boundary}\r\nContent-Disposition: form-data; name="files"; filename="{image.name}"\r\n'
        "Content-Type: image/png\r\n\r\n".encode()
        + image.read_bytes()
        + b"\r\n"
        for image in images
    ]
    return b"".join((*parts, f"--{boundary}--\r\n".encode()))


def free_port(wanted: int) -> int:
    """`wanted`, or another one, with a note, where it is taken."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server will
        try:
            probe.bind(("127.0.0.1", wanted))
        except OSError:
            probe.bind(("127.0.0.1", 0))
            print(f"Port {wanted} is taken: another one is used.")
        return int(probe.getsockname()[1])


def wait_for(happened: Callable[[], bool], *, within_s: float, otherwise: str) -> float:
    """The seconds it took."""
    began = time.monotonic()
    while not happened():
        if time.monotonic() - began > within_s:
            raise DemoFailed(otherwise)
        time.sleep(0.05)
    return time.monotonic() - began


def say_command(command: Sequence[str]) -> None:
    bold, plain = ("\033[1m", "\033[0m") if sys.stdout.isatty() else ("", "")
    print(f"{bold}$ {shlex.join(command)}{plain}", flush=True)


def tail(log: Path, *, lines: int = 8) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
