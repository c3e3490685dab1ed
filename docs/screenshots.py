"""Take pictures of every page in every state, wide in light and narrow in dark.

python -m docs.screenshots [--photos ZIP --pretrained FILE] [--folder DIR]

The store is made by the real commands: three tasks, a version that the gate refused, and a branch
after a rollback. It stays in the folder, and the next run takes it. `ZIP` holds CIFAR-100 as
`train/<class>/*.png` and `test/<class>/*.png`; without it the images are made up.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
from PIL import Image
from playwright.sync_api import Browser

from dne_serve.access.permission import new_token
from tests.chromium import chromium
from tests.e2e.scenes import MANY, SCENES, Scene, Stage
from tests.live_server import TOKEN, wait_for
from tests.trainer.folders import write_classes

FOLDER = Path("screenshots")
TASKS = {
    "animals": ("fox", "lion", "elephant", "rabbit"),
    "vehicles": ("bus", "bicycle", "tractor"),
    "fruit": ("apple", "orange", "pear"),
}
BRANCH = {"flowers": ("sunflower", "rose")}
MIXED_UP = ("day", "night")
"""Two classes of one kind of image, which nobody can tell apart."""
STRANGE = ("crab", "clock", "skyscraper", "keyboard")
IMAGES, SIDE = 60, 224
EARLIER, SERVED, REFUSED = 2, 3, 4
NOT_PROMOTED = 3
SERVE = "import sys; from dne_serve.cli import main; sys.exit(main())"
WINDOWS: dict[str, dict[str, Any]] = {
    "1440-light": {"viewport": {"width": 1440, "height": 900}, "color_scheme": "light"},
    "390-dark": {
        "viewport": {"width": 390, "height": 844},
        "color_scheme": "dark",
        "has_touch": True,
        "is_mobile": True,
    },
}


def main() -> None:
    options = _options()
    folder: Path = options.folder
    if not (folder / "models").exists():
        if options.photos is None:
            _make_up(folder / "data")
        else:
            _unzip(options.photos, folder / "data")
        _learn(folder, pretrained=options.pretrained)
    pictures = folder / "pictures"
    pictures.mkdir(parents=True, exist_ok=True)
    wanted = [one for one in SCENES if not options.only or one.name in options.only]
    with _stage(folder) as stage, chromium() as browser:
        for scene in wanted:
            for name, window in WINDOWS.items():
                _picture(browser, stage, scene, window, pictures / f"{scene.name}-{name}.png")
                print(pictures / f"{scene.name}-{name}.png", flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--photos", type=Path, help="zip with the photos of CIFAR-100")
    parser.add_argument(
        "--pretrained", type=Path, help="vision transformer that learning starts from"
    )
    parser.add_argument("--folder", type=Path, default=FOLDER, help="folder for store and pictures")
    parser.add_argument("--only", action="append", help="name of a scene; may be given again")
    return parser.parse_args()


def _unzip(archive: Path, folder: Path) -> None:
    """Write the photos that are learnt, those that are asked, and strange ones."""
    with zipfile.ZipFile(archive) as files:

        def put(target: Path, source: str, first: int, count: int) -> None:
            names = [name for name in files.namelist() if name.startswith(f"{source}/")]
            pngs = [name for name in names if name.endswith(".png")]
            target.mkdir(parents=True)
            for place, name in enumerate(pngs[first : first + count]):
                photo = Image.open(io.BytesIO(files.read(name))).convert("RGB")
                larger = photo.resize((SIDE, SIDE), Image.Resampling.BICUBIC)
                larger.save(target / f"{place:03}.jpg", quality=88)

        for task, classes in {**TASKS, **BRANCH}.items():
            for name in classes:
                put(folder / task / name, f"train/{name}", 0, IMAGES)
        for place, name in enumerate(MIXED_UP):
            put(folder / "mixed up" / name, "train/cloud", 40 * place, 40)
        for name in [name for classes in TASKS.values() for name in classes]:
            put(folder / "ask" / name, f"test/{name}", 0, 5)
        for name in STRANGE:
            put(folder / "strange" / name, f"test/{name}", 0, 3)


def _make_up(folder: Path) -> None:
    """Write small images of one colour and some noise for each class."""
    for task, classes in {**TASKS, **BRANCH}.items():
        write_classes(folder / task, classes, size=16)
    write_classes(folder, ["one kind"], size=16, images=80)
    for place, name in enumerate(MIXED_UP):
        (folder / "mixed up" / name).mkdir(parents=True)
        for file in sorted((folder / "one kind").iterdir())[40 * place : 40 * place + 40]:
            file.rename(folder / "mixed up" / name / file.name)
    known = [name for classes in TASKS.values() for name in classes]
    write_classes(folder / "ask", known, size=16, images=5, seed=1)
    write_classes(folder / "strange", STRANGE, size=16, images=3)


def _learn(folder: Path, *, pretrained: Path | None) -> None:
    data = folder / "data"

    def run(module: str, *arguments: str, ends: int = 0) -> None:
        command = [sys.executable, "-m", module, *arguments, "--store", str(folder / "models")]
        print(" ".join(command[2:]), flush=True)
        done = subprocess.run(command).returncode
        if done != ends:
            raise SystemExit(f"{module} {arguments[0]} ended with {done} instead of {ends}")

    start = ["--preset", "tiny"] if pretrained is None else ["--pretrained", str(pretrained)]
    for task in TASKS:
        run("trainer", "add-task", "--data", str(data / task), *start)
        start = []
    mixed_up = ("add-task", "--data", str(data / "mixed up"), "--min-new", "90%")
    run("trainer", *mixed_up, ends=NOT_PROMOTED)
    run("model_store", "rollback", "--to", str(EARLIER), "--reason", "apples were taken for pears")
    run("trainer", "add-task", "--data", str(data / "flowers"), ends=NOT_PROMOTED)
    run("model_store", "resume", "--reason", "the labels are mended")


@contextmanager
def _stage(folder: Path) -> Iterator[Stage]:
    made, tokens = new_token("page=read,predict"), folder / "tokens"
    tokens.write_text(f"{made.line}\n")
    tokens.chmod(0o600)
    store = str(folder / "models")
    ask = sorted((folder / "data/ask").rglob("*.*"), key=lambda file: (file.name, file.parent.name))
    images = [(f"{file.parent.name}-{file.name}", file.read_bytes()) for file in ask]
    with ExitStack() as servers:
        url = servers.enter_context(_serving("--store", store, "--collect", "unknown,score<0.9"))
        empty = servers.enter_context(_serving("--store", str(folder / "none"), ready=False))
        locked = servers.enter_context(_serving("--store", store, "--token-file", str(tokens)))
        strange = _strange(url, sorted((folder / "data/strange").rglob("*.*")))
        yield Stage(
            url=url,
            empty_url=empty,
            locked_url=locked,
            images=images[:MANY],
            strange=strange,
            served=SERVED,
            earlier=EARLIER,
            refused=REFUSED,
        )


def _strange(url: str, files: Sequence[Path]) -> tuple[str, bytes]:
    """Ask about all strange images, so that the inbox has some, and choose one that is unknown."""
    found = None
    for file in files:
        answer = httpx.post(f"{url}/predict", content=file.read_bytes(), timeout=60).json()
        if answer["predictions"][0]["unknown"]:
            found = found or (f"{file.parent.name}.jpg", file.read_bytes())
    if found is None:
        raise SystemExit("the served version finds no strange image unknown")
    return found


@contextmanager
def _serving(*options: str, ready: bool = True) -> Iterator[str]:
    command = [sys.executable, "-c", SERVE, "--port", "0", "--json", *options]
    environment = {**os.environ, "DNE_ADMIN_TOKEN": TOKEN, "DNE_BACKEND": "torch"}
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert server.stdout is not None
        url: str = json.loads(server.stdout.readline())["url"]
        if ready:
            wait_for(lambda: httpx.get(f"{url}/readyz").status_code == 200, seconds=120)
        yield url
    finally:
        server.terminate()
        server.wait(60)


def _picture(
    browser: Browser, stage: Stage, scene: Scene, window: dict[str, Any], file: Path
) -> None:
    context = browser.new_context(**window)
    page = context.new_page()
    page.set_default_timeout(60_000)
    scene.open(page, stage)
    page.wait_for_timeout(300)  # pictures are decoded after they are loaded
    page.screenshot(path=file, full_page=scene.is_whole)
    context.close()


if __name__ == "__main__":
    main()
