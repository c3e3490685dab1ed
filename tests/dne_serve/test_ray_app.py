"""A replica of Ray Serve without Ray: its settings, its first version and its health."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from dne_serve.access.permission import is_loopback
from dne_serve.ray_app import ANY_HOST, OF_THE_PROXY, NoModel, Replica, app, read_settings
from dne_serve.settings import Settings
from model_store.errors import WrongUsage
from model_store.records.manifest import Manifest
from model_store.store.store import Store
from tests.dne_serve.conftest import publish_letters
from tests.live_server import wait_for

SOON_S = 0.2


def replica_of(store: Path | str, *, start_s: float = 20.0, **others: Any) -> Replica:
    given = {"store": str(store), "backend": "torch", "allow_open": True, "poll_seconds": 0.02}
    return Replica({**given, **others}, start_s)


def while_running(replica: Replica, check: Callable[[], Awaitable[None]]) -> None:
    """Run a check during the lifespan of the application, as Ray does."""

    async def run() -> None:
        application = replica.__serve_build_asgi_app__()
        async with application.router.lifespan_context(application):
            await check()

    asyncio.run(run())


def test_a_replica_is_healthy_once_it_serves_a_version(store: Store, letters: Manifest) -> None:
    replica = replica_of(store.location)
    serving = replica.__serve_build_asgi_app__().state.models.only

    async def check() -> None:
        await replica.check_health()
        assert serving.loaded.served.version == letters.version
        await replica.check_health()

    while_running(replica, check)


def test_a_replica_waits_for_the_first_version(store: Store) -> None:
    replica = replica_of(store.location)

    async def check() -> None:
        waiting = asyncio.ensure_future(replica.check_health())
        await asyncio.sleep(SOON_S)
        assert not waiting.done()
        await asyncio.to_thread(publish_letters, store)
        await waiting

    while_running(replica, check)


@pytest.mark.parametrize(
    ("make", "reason"),
    [(True, "channel production names no version yet"), (False, "there is no store yet")],
)
def test_a_replica_without_a_version_says_so_and_ends_its_start(
    tmp_path: Path, make: bool, reason: str
) -> None:
    if make:
        Store.create(str(tmp_path / "models"))
    replica = replica_of(tmp_path / "models", start_s=SOON_S)

    async def check() -> None:
        with pytest.raises(NoModel, match=f"after 0.2 s: {reason}; learn a task"):
            await replica.check_health()

    while_running(replica, check)


def test_a_replica_whose_engine_hangs_is_not_healthy(store: Store, letters: Manifest) -> None:
    replica = replica_of(store.location)
    serving = replica.__serve_build_asgi_app__().state.models.only

    async def check() -> None:
        await replica.check_health()
        gate = asyncio.Event()
        loop = asyncio.get_running_loop()
        hangs = serving.batcher.call(
            lambda: asyncio.run_coroutine_threadsafe(gate.wait(), loop).result()
        )
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(replica.check_health(), SOON_S)
        gate.set()
        await asyncio.wrap_future(hangs)
        await replica.check_health()

    while_running(replica, check)


def test_a_store_that_vanishes_leaves_a_replica_healthy(store: Store, letters: Manifest) -> None:
    replica = replica_of(store.location)
    serving = replica.__serve_build_asgi_app__().state.models.only

    async def check() -> None:
        await replica.check_health()
        Path(store.location).rename(f"{store.location}-gone")
        await asyncio.to_thread(wait_for, lambda: serving.error is not None)
        await replica.check_health()

    while_running(replica, check)


def test_a_replica_has_as_many_threads_as_ray_gives_it_cores(
    store: Store, letters: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, given, expected in (("1", {}, 1), ("2", {"threads": 1}, 1), ("", {}, None)):
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
        application = replica_of(store.location, **given).__serve_build_asgi_app__()
        assert application.state.models.only.settings.threads == expected


def test_a_replica_does_not_start_open_unless_it_is_meant(store: Store) -> None:
    assert not is_loopback(ANY_HOST)
    with pytest.raises(WrongUsage, match="make a token"):
        replica_of(store.location, allow_open=False)


@pytest.mark.parametrize("name", sorted(OF_THE_PROXY))
def test_a_setting_of_the_listener_is_refused(name: str) -> None:
    assert name in Settings.model_fields
    with pytest.raises(WrongUsage, match="Ray's proxy listens"):
        read_settings({"tls_cert": "c", "tls_key": "k"} if "tls" in name else {name: "1"})


def test_a_certificate_in_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DNE_TLS_CERT", "cert.pem")
    monkeypatch.setenv("DNE_TLS_KEY", "key.pem")
    with pytest.raises(WrongUsage, match="tls_cert has no effect here"):
        read_settings({})


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"stroe": "x"}, "unknown setting stroe"),
        ({"admin_token": "x" * 20}, "give DNE_ADMIN_TOKEN to its nodes"),
        ({"webhook_secret": "x" * 40}, "give DNE_WEBHOOK_SECRET to its nodes"),
        ({"poll_seconds": "often"}, "poll_seconds"),
    ],
)
def test_a_wrong_argument_is_named(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(WrongUsage, match=sentence):
        read_settings(given)


def test_without_ray_the_application_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(WrongUsage, match=r"pip install 'dne-serve\[ray\]'"):
        app({"store": "models"})
