"""Servers under test: how each is installed, started, asked and stopped."""

from __future__ import annotations

import base64
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.serving.load import Request
from benchmarks.serving.peers.model import MAX_BATCH

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = ROOT / "benchmarks" / ".peers"
THREADS = 2
START_S = 600.0
STOP_S = 20.0
MODEL_NEEDS = (
    "numpy",
    "safetensors",
    "pydantic",
    "pillow",
    "python-multipart",
    "onnxruntime",
)
BOUNDARY = "an-image-follows"


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    name: str
    software: str = ""
    """What it is, where its name says more than that."""
    command: tuple[str, ...]
    """After the interpreter's folder was put in front of the first word."""
    packages: tuple[str, ...] = ()
    """What its environment holds besides the model's needs; empty: it runs in ours."""
    files: Mapping[str, str] = field(default_factory=dict)
    """What it wants to find in its working folder."""
    variables: Mapping[str, str] = field(default_factory=dict)
    path: str = ""
    """Where it is asked, if that is not the usual place of its software."""

    @property
    def is_ours(self) -> bool:
        return not self.packages

    def request(self, image: bytes) -> Request:
        made = REQUESTS.get(self.software or self.name, _multipart)(image)
        return replace(made, path=self.path) if self.path else made


def _multipart(image: bytes, *, field_name: str = "files") -> Request:
    head = (
        f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{field_name}"; '
        'filename="image.png"\r\nContent-Type: image/png\r\n\r\n'
    )
    body = head.encode() + image + f"\r\n--{BOUNDARY}--\r\n".encode()
    return Request(path="/predict", kind=f"multipart/form-data; boundary={BOUNDARY}", body=body)


def _as_json(image: bytes) -> Request:
    body = json.dumps({"image": base64.b64encode(image).decode()}).encode()
    return Request(path="/predict", kind="application/json", body=body)


def _raw(image: bytes) -> Request:
    return Request(path="/", kind="image/png", body=image)


def _protocol_v2(image: bytes) -> Request:
    data = [base64.b64encode(image).decode()]
    tensor = {"name": "image", "shape": [1, 1], "datatype": "BYTES", "data": data}
    body = json.dumps({"inputs": [tensor]}).encode()
    return Request(path="/v2/models/classifier/infer", kind="application/json", body=body)


REQUESTS = {
    "LitServe": _as_json,
    "BentoML": lambda image: _multipart(image, field_name="images"),
    "MLServer": _protocol_v2,
    "Ray Serve": _raw,
}
PLAIN = Server(
    name="plain FastAPI",
    command=("python", "-m", "benchmarks.serving.peers.fastapi_app"),
    packages=("fastapi", "uvicorn[standard]"),
)
MLSERVER = Server(
    name="MLServer",
    command=("mlserver", "start", "."),
    packages=("mlserver",),
    files={
        "settings.json": json.dumps({"parallel_workers": 0, "debug": False}),
        "model-settings.json": json.dumps(
            {
                "name": "classifier",
                "implementation": "benchmarks.serving.peers.mlserver_app.Runtime",
                "max_batch_size": MAX_BATCH,
                "max_batch_time": 0.002,
            }
        ),
    },
    variables={
        "MLSERVER_HTTP_PORT": "{port}",
        "MLSERVER_GRPC_PORT": "{port+1}",
        "MLSERVER_METRICS_PORT": "{port+2}",
        "MLSERVER_HOST": "127.0.0.1",
    },
)
WITH_OUR_FORWARD_PASS = replace(
    MLSERVER,
    name="MLServer with our forward pass",
    software="MLServer",
    variables={**MLSERVER.variables, "BENCH_FORM": "folded"},
)
PEERS = (
    Server(
        name="LitServe",
        command=("python", "-m", "benchmarks.serving.peers.litserve_app"),
        packages=("litserve",),
    ),
    Server(
        name="BentoML",
        command=(
            *("bentoml", "serve", "benchmarks.serving.peers.bentoml_app:Service"),
            *("--port", "{port}", "--host", "127.0.0.1"),
        ),
        packages=("bentoml",),
        variables={"BENTOML_DO_NOT_TRACK": "True"},
    ),
    MLSERVER,
    Server(
        name="Ray Serve",
        command=("python", "-m", "benchmarks.serving.peers.ray_app"),
        packages=("ray[serve]",),
        variables={"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"},
    ),
)


def ours(name: str, *options: str) -> Server:
    return Server(
        name=name,
        command=(
            *("dne-serve", "--store", "{store}", "--port", "{port}"),
            *("--threads", str(THREADS), *options),
        ),
    )


def environment_of(server: Server) -> Path:
    """The folder of its programs, made if it is not there."""
    if server.is_ours:
        return Path(sys.executable).parent
    folder = ENVIRONMENTS / (server.software or server.name).lower().replace(" ", "-")
    ready = folder / "ready"
    wanted = "\n".join((*MODEL_NEEDS, *server.packages))
    if not ready.exists() or ready.read_text() != wanted:
        print(f"installing {server.name} …", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        pip = [str(folder / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, _pinned("torch")], check=True)
        subprocess.run([*pip, _pinned("torch"), *MODEL_NEEDS, *server.packages], check=True)
        ready.write_text(wanted)
    return folder / "bin"


def _pinned(package: str) -> str:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return next(line for line in lines if line.startswith(f"{package}=="))


@contextmanager
def running(server: Server, *, store: Path, folder: Path, image: bytes) -> Iterator[Running]:
    """In a process group of its own, which is gone afterwards."""
    programs, port = environment_of(server), free_ports()
    place = folder / server.name.replace(" ", "-")
    place.mkdir(exist_ok=True)
    for name, text in server.files.items():
        (place / name).write_text(text)
    fill = {"{port}": str(port), "{port+1}": str(port + 1), "{port+2}": str(port + 2)}
    fill["{store}"] = str(store)
    program, *arguments = (_filled(part, fill) for part in server.command)
    variables = {
        **os.environ,
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": str(THREADS),
        "BENCH_STORE": str(store),
        "BENCH_PORT": str(port),
        "BENCH_THREADS": str(THREADS),
        **{name: _filled(value, fill) for name, value in server.variables.items()},
    }
    with (place / "log").open("ab") as log:
        process = subprocess.Popen(
            [str(programs / program), *arguments],
            cwd=place,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        found = Running(server=server, port=port, process=process, request=server.request(image))
        found.wait_until_it_answers(place / "log")
        yield found
    finally:
        _stop(process)


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    server: Server
    port: int
    process: subprocess.Popen[bytes]
    request: Request

    def ask(self) -> bytes:
        asked = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{self.request.path}",
            data=self.request.body,
            headers={"Content-Type": self.request.kind},
        )
        with urllib.request.urlopen(asked, timeout=30) as answer:
            data: bytes = answer.read()
        return data

    def version(self) -> int:
        """What our own server says that it serves."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/readyz", timeout=30) as answer:
            return int(json.load(answer)["version"])

    def wait_until_it_answers(self, log: Path) -> None:
        deadline_s = time.monotonic() + START_S
        trouble, has_answered = "it has not answered", False
        while time.monotonic() < deadline_s and self.process.poll() is None:
            try:
                has_answered = has_answered or bool(self.ask())
            except urllib.error.HTTPError as error:
                trouble = f"it answers {error.code}: {error.read(300)!r}"
            except OSError as error:
                trouble = str(error)
            else:
                if not self.server.is_ours or self._has_measured():
                    return
                trouble = "it still measures engines"
            time.sleep(0.2)
        told = log.read_text(errors="replace")[-3000:]
        raise RuntimeError(f"{self.server.name} does not serve: {trouble}\n{told}")

    def _has_measured(self) -> bool:
        """Return whether our own server has chosen its engine."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/readyz", timeout=30) as answer:
            ready = json.load(answer)
        return not ready["measuring"] and "until engines are measured" not in ready["engine"]

    def processor_s(self) -> float:
        """Count the processor time of the server and of all its processes."""
        parents, spent_s = {}, {}
        for path in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):
                fields = path.read_text().rpartition(")")[2].split()
                parents[int(path.parent.name)] = int(fields[1])
                ticks = sum(map(int, fields[11:15]))  # with those of children that have ended
                spent_s[int(path.parent.name)] = ticks / os.sysconf("SC_CLK_TCK")
        own = {self.process.pid}
        while more := {pid for pid, parent in parents.items() if parent in own} - own:
            own |= more
        return sum(spent_s.get(pid, 0.0) for pid in own)

    @property
    def resident_bytes(self) -> int:
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return 1024 * int(line.split()[1])
        raise RuntimeError(f"{self.server.name} has ended")


def free_ports(count: int = 3) -> int:
    """The first of some that follow each other and nobody listens on."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            first: int = probe.getsockname()[1]
        if first + count < 65536 and all(_is_free(first + place) for place in range(count)):
            return first


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _filled(text: str, values: Mapping[str, str]) -> str:
    for name, value in values.items():
        text = text.replace(name, value)
    return text


def _stop(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_S)
    with suppress(ProcessLookupError):  # what it has started and left behind
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
