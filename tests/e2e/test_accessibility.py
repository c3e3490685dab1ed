"""Every page, in every state, is judged by axe-core: it finds nothing, wide and narrow, in both
themes. `make test SUITE=pages` runs this."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from dne_serve.access.permission import new_token
from tests.e2e.axe import SCRIPT, VERSION, violations
from tests.e2e.browsing import NEEDS_CHROMIUM, playwright
from tests.e2e.scenes import MANY, SCENES, Scene, Stage
from tests.live_server import TOKEN, Live, live_server, png, wait_for
from tests.trained_store import TrainedStore

pytestmark = [
    *NEEDS_CHROMIUM,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not SCRIPT.exists(),
        reason=f"ACCESSIBILITY WAS NOT JUDGED: there is no axe-core {VERSION}; "
        "`make test SUITE=pages` fetches it",
    ),
]
WIDTHS = (1440, 390)
THEMES = ("light", "dark")
INBOX = 12


@pytest.fixture(scope="module")
def stage(trained_store: TrainedStore, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    folder = tmp_path_factory.mktemp("stage")
    store = folder / "models"
    shutil.copytree(trained_store.location, store)
    made, tokens = new_token("page=read,predict"), folder / "tokens"
    tokens.write_text(f"{made.line}\n")
    tokens.chmod(0o600)
    with ExitStack() as servers:
        live = servers.enter_context(live_server(store, collect="sample=100%"))
        empty = servers.enter_context(live_server(folder / "none"))
        locked = servers.enter_context(live_server(store, token_file=tokens))
        live.wait_until_ready()
        locked.wait_until_ready()
        live.predict(*(png(seed, size=24) for seed in range(INBOX))).raise_for_status()
        wait_for(lambda: _waiting(live) == INBOX)
        yield Stage(
            url=live.url,
            empty_url=empty.url,
            locked_url=locked.url,
            images=_images(trained_store)[:MANY],
            strange=("noise.png", _strange(live)),
            served=trained_store.served,
            earlier=trained_store.second,
            refused=trained_store.refused,
        )


def _waiting(live: Live) -> int:
    answer = live.http.get("/inbox", headers={"Authorization": f"Bearer {TOKEN}"})
    return int(answer.json()["counts"]["unlabelled"])


def _images(trained: TrainedStore) -> list[tuple[str, bytes]]:
    tasks = [trained.data(task) for task in ("letters", "digits", "signs")]
    files = sorted(file for task in tasks for file in task.rglob("*.png"))
    return [(f"{place:02}-{file.name}", file.read_bytes()) for place, file in enumerate(files)]


def _strange(live: Live) -> bytes:
    """Find an image that the served version does not know."""
    candidates = [png(seed, size=8 << seed % 4) for seed in range(64)]
    answers = live.predict(*candidates).json()["predictions"]
    return next(one for one, said in zip(candidates, answers, strict=True) if said["unknown"])


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.name)
def test_axe_finds_nothing(browser: playwright.Browser, stage: Stage, scene: Scene) -> None:
    context = browser.new_context(viewport={"width": WIDTHS[0], "height": 900})
    try:
        page = context.new_page()
        page.set_default_timeout(120_000)
        scene.open(page, stage)
        found = []
        for width in WIDTHS:
            for theme in THEMES:
                page.set_viewport_size({"width": width, "height": 900})
                page.emulate_media(color_scheme=theme)
                found += [f"{width} {theme}: {one}" for one in violations(page)]
    finally:
        context.close()
    assert found == [], "\n".join(found)
