"""`dne-store forget` while jobs run, workers are killed, classes are renamed and servers collect.

Afterwards every byte of the store, the caches, the temporary folder, the checkpoints and the logs
is searched for planted pictures and names.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from model_store.loop.jobs import Jobs
from model_store.preprocess import encode_png, read_pixels
from model_store.records.manifest import Preprocessing
from model_store.store.store import Store
from tests.campaigns import AddRow
from tests.dne_serve.loop.photos import encoded, photo
from tests.docs.reader import free_port
from tests.live_server import TOKEN, wait_for
from tests.scale.fleet import Fleet, running, url_of
from tests.trained_store import ROOT, TrainedStore
from trainer.data.pictures import StoredImage, pixels_digest

pytestmark = [pytest.mark.faults, pytest.mark.slow]
ADMIN = {"Authorization": f"Bearer {TOKEN}"}
ROUNDS = 3
"""Times that each of the stories below is told."""
PICTURES = 14
NAMES_MAY_STAY = ("versions/", "channels/", "forgotten/", "deleted/", "logs/")
"""The places of a name that the command says it cannot reach."""


@dataclass
class Planted:
    """A class that is to be forgotten: its names, and every form of its pictures."""

    name: str
    new_name: str
    ids: list[tuple[int, str]] = field(default_factory=list)
    forms: set[bytes] = field(default_factory=set)
    known_by: set[int] | None = None
    """The versions at the end of `forget` if none of them had the class; None if it was served."""

    def add(self, picture: bytes, preprocessing: Preprocessing) -> None:
        """Note the bytes, the pixels and the file that a version keeps, with their digests."""
        pixels = read_pixels(picture, preprocessing)
        stored = encode_png(pixels)
        self.forms |= {picture, stored, pixels.tobytes()}
        self.forms |= {pixels_digest(pixels), StoredImage(stored, preprocessing).digest}
        for one in (picture, stored):
            self.forms.add(hashlib.sha256(one).digest())
            self.forms.add(hashlib.sha256(one).hexdigest().encode())


@dataclass
class Battle:
    """One store, two servers, and the folder in which everything is that they write."""

    folder: Path
    fleet: Fleet
    chance: random.Random
    planted: list[Planted] = field(default_factory=list)

    @property
    def store(self) -> Store:
        return Store.open(str(self.folder / "models"))

    @property
    def environment(self) -> dict[str, str]:
        own = {name: str(self.folder / name.lower()) for name in ("TMPDIR", "DNE_CACHE")}
        return {**os.environ, **own, "DNE_STATE": str(self.folder / "state")}

    def command(self, module: str, *arguments: str) -> subprocess.Popen[str]:
        program = f"import sys; from {module} import main; sys.exit(main())"
        with (self.folder / "logs" / "commands.log").open("a") as log:
            return subprocess.Popen(
                [sys.executable, "-c", program, *arguments, "--store", str(self.folder / "models")],
                cwd=ROOT,
                env={**self.environment, "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def run(self, *arguments: str, ends: int = 0) -> str:
        process = self.command("model_store.cli.main", *arguments)
        out, _ = process.communicate(timeout=120)
        assert process.returncode == ends, out
        return out

    def plant(self) -> Planted:
        """Send pictures to both servers, have them kept, and label them."""
        number = len(self.planted)
        planted = Planted(f"alice-{number}-qzx", f"renamed-{number}-qzx")
        self.planted.append(planted)
        head = self.store.head("production")
        assert head is not None
        preprocessing = self.store.resolve(head).preprocessing
        for place in range(PICTURES):
            port = self.fleet.ports[place % 2]
            sent = encoded(photo(1000 * (number + 1) + place), "PNG")
            answer = self.ask(port, "POST", "/predict?keep=true", content=sent)
            item = answer.json()["predictions"][0]["id"]
            wait_for(lambda: self.label(port, item, planted.name), seconds=60)  # noqa: B023
            kept = self.ask(port, "GET", f"/inbox/{item}/image").content
            planted.ids.append((port, item))
            planted.add(sent, preprocessing)
            planted.add(kept, preprocessing)
        return planted

    def ask(self, port: int, method: str, path: str, **more: object) -> httpx.Response:
        headers = {**ADMIN, "Content-Type": "image/png"} if "content" in more else ADMIN
        return httpx.request(
            method,
            url_of(port) + path,
            headers=headers,
            timeout=60,
            **more,  # type: ignore[arg-type]
        )

    def label(self, port: int, item: str, name: str) -> bool:
        return self.ask(port, "POST", f"/inbox/{item}/label", json={"label": name}).is_success

    def begin_job(self) -> subprocess.Popen[str]:
        """Ask for a job, and start a worker that has taken it."""
        jobs = Jobs(self.store.objects)
        job = self.ask(self.fleet.ports[0], "POST", "/jobs", json={}).json()["id"]
        worker = self.command("trainer.cli", "worker", "--once", "--threads", "1")
        wait_for(lambda: jobs.state(job).claim > 0 or worker.poll() is not None, seconds=120)
        return worker

    def end_job(self) -> None:
        """Let workers end the job that a killed one has left."""
        worker = self.command("trainer.cli", "worker", "--once", "--threads", "1")
        worker.communicate(timeout=300)

    def wait_for_jobs(self) -> None:
        """End all jobs: the lease of a killed worker lasts for 20 seconds."""

        def have_ended() -> bool:
            self.end_job()
            return all(one.has_ended for one in Jobs(self.store.objects).states().values())

        wait_for(have_ended, seconds=200)

    def forget(self, name: str) -> list[str]:
        told = json.loads(self.run("forget", "--class", name, "--json"))
        unreached: list[str] = told["not_undone"]
        assert told["not_deleted"] == []
        head = self.store.head("production")
        assert head is not None
        if name not in self.store.resolve(head).classes:
            self.planted[-1].known_by = set(self.store.versions())
        return unreached

    def nothing_comes_back(self, planted: Planted) -> None:
        for port, item in planted.ids:
            for other in self.fleet.ports:
                answer = self.ask(other, "POST", "/feedback", json={"id": item, "label": "x"})
                assert answer.status_code == 404, (port, other, answer.text)

    def learnt_afterwards(self) -> list[str]:
        """Find versions with a class that was forgotten before it was served."""
        return [
            f"{planted.name} in version {version}"
            for planted in self.planted
            if planted.known_by is not None
            for version in self.store.versions()
            if version not in planted.known_by
            and planted.name in self.store.manifest(version).spec.classes
        ]

    def search(self) -> list[str]:
        """Find what is left of everything that was planted, in the names of files too."""
        left = []
        for path in sorted(self.folder.rglob("*")):
            where = str(path.relative_to(self.folder))
            content = path.read_bytes() if path.is_file() else b""
            for planted in self.planted:
                if any(form in content for form in planted.forms):
                    left.append(f"a picture of {planted.name} in {where}")
                for name in (planted.name, planted.new_name):
                    known = any(where.removeprefix("models/").startswith(p) for p in NAMES_MAY_STAY)
                    if name.encode() in content + where.encode() and not known:
                        left.append(f"the name {name} in {where}")
        return left


@pytest.fixture
def battle(trained_copy: TrainedStore, memory_path: Path) -> Iterator[Battle]:
    shutil.copytree(trained_copy.pretrained, memory_path / "models")
    for name in ("logs", "tmpdir"):
        (memory_path / name).mkdir()
    settings = {
        "DNE_COLLECT": "sample=0%",
        "DNE_ADMIN_TOKEN": TOKEN,
        "DNE_POLL_SECONDS": "0.5",
        "DNE_AUDIT_LOG": str(memory_path / "logs" / "audit.log"),
        "TMPDIR": str(memory_path / "tmpdir"),
    }
    fleet = Fleet(
        str(memory_path / "models"), [free_port(), free_port()], memory_path / "logs", settings
    )
    with running(fleet):
        yield Battle(memory_path, fleet, random.Random(28))


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate()


def forget_while_it_learns(battle: Battle) -> str:
    """A job runs, and its class is forgotten at a random moment."""
    planted = battle.plant()
    worker = battle.begin_job()
    time.sleep(battle.chance.uniform(0, 4))
    battle.forget(planted.name)
    worker.communicate(timeout=300)
    battle.nothing_comes_back(planted)
    return planted.name


def forget_after_a_kill(battle: Battle) -> str:
    """The worker is killed in the midst of a job; then the class is forgotten."""
    planted = battle.plant()
    worker = battle.begin_job()
    time.sleep(battle.chance.uniform(0, 4))
    kill(worker)
    battle.forget(planted.name)
    battle.nothing_comes_back(planted)
    battle.wait_for_jobs()
    return planted.name


def kill_after_forgetting(battle: Battle) -> str:
    """The class is forgotten while a worker learns it, and the worker is killed after that."""
    planted = battle.plant()
    worker = battle.begin_job()
    time.sleep(battle.chance.uniform(0, 2))
    battle.forget(planted.name)
    time.sleep(battle.chance.uniform(0, 1))
    kill(worker)
    battle.wait_for_jobs()
    return planted.name


def forget_by_its_new_name(battle: Battle) -> str:
    """A class is learnt and promoted, and renamed. It is forgotten by its new name."""
    planted = battle.plant()
    battle.begin_job().communicate(timeout=300)
    head = battle.store.head("production")
    assert head is not None
    if planted.name not in battle.store.resolve(head).classes:
        battle.forget(planted.name)  # the gate did not let it pass
        return planted.name
    battle.run("rename-class", planted.name, planted.new_name)
    battle.run("list", "--all")
    unreached = battle.forget(planted.new_name)
    assert any("the name of the class" in one for one in unreached)
    battle.nothing_comes_back(planted)
    return planted.new_name


STORIES = (
    forget_while_it_learns,
    forget_after_a_kill,
    kill_after_forgetting,
    forget_by_its_new_name,
)


@pytest.mark.timeout(1800)
def test_nothing_is_left_of_what_was_forgotten(battle: Battle, fault_row: AddRow) -> None:
    for _ in range(ROUNDS):
        for story in STORIES:
            story(battle)
            assert battle.search() == [], story.__name__
    forms = sum(len(one.forms) for one in battle.planted)
    assert battle.learnt_afterwards() == []
    assert battle.store.verify().problems == ()
    fault_row(
        "forget under fire",
        f"{len(battle.planted)} classes on 2 servers: jobs, kills, renames, feedback",
        f"0 of {forms} forms of pictures left, names only where the command says",
    )
