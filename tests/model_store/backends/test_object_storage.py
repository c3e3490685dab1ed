from __future__ import annotations

import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from model_store.backends.base import ObjectMissing, ObjectRefused
from model_store.backends.location import objects_at
from model_store.backends.s3 import ObjectStorage
from model_store.errors import (
    OutcomeUnknown,
    StoreError,
    StoreNotFound,
    StoreUnsupported,
    WriteFailed,
    WrongUsage,
)
from model_store.layout import shard_name
from model_store.store.store import Store
from tests.model_store.drafts import prepare, publish_lineage
from tests.s3_proxy import Fault, Plan, Proxy, Request, proxy_before
from tests.s3_server import BUCKET, S3, free_ports, reach

QUICK: Any = {
    "max_retries": 2,
    "retry_timeout": timedelta(seconds=2),
    "backoff": {
        "init_backoff": timedelta(milliseconds=1),
        "max_backoff": timedelta(milliseconds=10),
        "base": 2,
    },
}
MOVE: dict[str, Any] = {"actor": "ann@host", "reason": "because"}


@pytest.fixture(params=["seaweedfs"])
def server(request: pytest.FixtureRequest) -> S3:
    """What is behind the proxy."""
    found: S3 = request.getfixturevalue(request.param)
    return found


# Moto checks no signatures: a header can be lost on the way to it.
on_moto = pytest.mark.parametrize("server", ["moto"], indirect=True)


@pytest.fixture
def proxy(server: S3, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Proxy]:
    with proxy_before(server.endpoint) as running:
        reach(S3(running.endpoint), monkeypatch, tmp_path)
        yield running


@pytest.fixture
def place(proxy: Proxy) -> str:
    return f"s3://{BUCKET}/{uuid.uuid4().hex}"


@pytest.fixture
def objects(place: str) -> ObjectStorage:
    return ObjectStorage(place, retry=QUICK)


def nth_write(number: int, fault: Fault) -> Plan:
    """`fault` for that write, counted from the moment at which the plan is made."""
    left = iter(range(1, 1000))
    return lambda request: fault if request.writes and next(left) == number else "none"


def every(fault: Fault, *, when: Callable[[Request], bool]) -> Plan:
    return lambda request: fault if when(request) else "none"


# One object


@pytest.mark.parametrize("server", ["seaweedfs", "moto"], indirect=True)
@pytest.mark.parametrize(
    "fault",
    [
        pytest.param("lose request", marks=pytest.mark.long),
        "lose reply",
        "409",
        "409 late",
        "503 late",
    ],
)
def test_a_write_with_a_lost_or_wrong_reply_is_known_as_ours(
    objects: ObjectStorage, proxy: Proxy, fault: Fault
) -> None:
    proxy.plan = nth_write(1, fault)
    assert objects.create("versions/a.json", b"ours")
    assert proxy.faults() == [fault]
    proxy.plan = nth_write(0, "none")
    assert objects.read("versions/a.json", max_bytes=9) == b"ours"


@pytest.mark.parametrize("fault", ["none", "lose request", "lose reply", "409", "503", "503 late"])
@pytest.mark.parametrize("theirs", [b"them", b"longer than ours", b""])
def test_where_somebody_else_was_first_there_is_a_conflict_whatever_the_reply(
    objects: ObjectStorage, proxy: Proxy, fault: Fault, theirs: bytes
) -> None:
    assert objects.create("versions/a.json", theirs)
    proxy.plan = nth_write(1, fault)
    assert not objects.create("versions/a.json", b"ours")
    assert objects.read("versions/a.json", max_bytes=99) == theirs


def test_a_conflict_that_is_reported_where_nothing_is_there_is_tried_again(
    objects: ObjectStorage, proxy: Proxy
) -> None:
    left: Iterator[Fault] = iter(["409", "409", "409"])
    proxy.plan = lambda request: next(left, "none") if request.writes else "none"
    assert objects.create("versions/a.json", b"ours")
    assert proxy.faults() == ["409"] * 3


def test_what_can_be_neither_written_nor_read_back_is_unknown(
    objects: ObjectStorage, proxy: Proxy
) -> None:
    proxy.plan = lambda request: (
        "lose reply" if request.writes else "none" if "store.json" in request.path else "503"
    )
    with pytest.raises(OutcomeUnknown, match=r"not known whether a\.json was written") as caught:
        objects.create("a.json", b"ours")
    assert "nothing was deleted" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert {request.method for request, _ in proxy.seen} == {"GET", "PUT"}
    proxy.plan = nth_write(0, "none")
    assert objects.read("a.json", max_bytes=9) == b"ours"


def test_a_request_that_may_still_arrive_is_unknown_and_not_failed(
    objects: ObjectStorage, proxy: Proxy
) -> None:
    proxy.plan = every("lose request", when=lambda request: request.writes)
    with pytest.raises(OutcomeUnknown):
        objects.create("a.json", b"ours")


def test_without_the_right_to_write_a_write_fails_and_says_so(
    seaweedfs: S3, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    location = reach(seaweedfs, monkeypatch, tmp_path)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(StoreError, match="403 Forbidden") as caught:
        Store.create(location)
    assert "<" not in str(caught.value)


@on_moto
def test_where_there_is_no_bucket_there_is_no_store_and_none_can_be_made(
    proxy: Proxy,
) -> None:
    with pytest.raises(StoreNotFound, match="there is no store at s3://absent/x"):
        Store.open("s3://absent/x")
    with pytest.raises(StoreError, match=r"404 Not Found \(The specified bucket does not exist\)"):
        Store.create("s3://absent/x")


def test_a_reply_that_is_cut_short_is_read_again(objects: ObjectStorage, proxy: Proxy) -> None:
    data = bytes(100_000)
    objects.create("a.json", data)
    cuts: Iterator[Fault] = iter(["cut reply"])
    proxy.plan = lambda request: next(cuts, "none")
    assert objects.read("a.json", max_bytes=len(data)) == data
    assert proxy.faults() == ["cut reply"]


def test_an_object_that_is_too_large_is_refused(objects: ObjectStorage) -> None:
    objects.create("a.json", b"12345")
    with pytest.raises(ObjectRefused, match="5 bytes instead of at most 4"):
        objects.read("a.json", max_bytes=4)


@pytest.mark.parametrize("name", ["../a", "/a", "a//b", "a/..", "A", "a\0", "a%2e", "x" * 4096])
def test_a_name_that_no_object_can_have_reaches_no_server(
    objects: ObjectStorage, proxy: Proxy, name: str
) -> None:
    for use in (
        lambda: objects.create(name, b""),
        lambda: objects.read(name, max_bytes=1),
        lambda: objects.list(name),
        lambda: objects.delete(name),
    ):
        with pytest.raises(ObjectRefused):
            use()
    assert proxy.seen == []


def test_a_listing_holds_what_is_below_the_folder_and_has_the_name_of_an_object(
    objects: ObjectStorage, place: str
) -> None:
    import obstore
    from obstore.store import from_url

    for name in ("versions/1.json", "versions/a/b.json", "versions-old/1.json", "other/1.json"):
        objects.create(name, b"12")
    beside = from_url(place, client_options={"allow_http": True})
    for name in ("versions/UPPER", "versions/.hidden", "versions/a/b/c/d/e", "versions/%2e%2e"):
        obstore.put(beside, name, b"")
    listed = objects.list("versions")
    assert {entry.name for entry in listed} == {"versions/1.json", "versions/a/b.json"}
    assert {entry.bytes for entry in listed} == {2}
    assert all(entry.modified_s > 1e9 for entry in listed)


def test_deleting_is_done_once_and_for_all(objects: ObjectStorage) -> None:
    objects.create("a.json", b"")
    objects.delete("a.json")
    objects.delete("a.json")
    with pytest.raises(ObjectMissing):
        objects.read("a.json", max_bytes=1)


def test_a_server_that_is_not_there_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in S3(f"http://127.0.0.1:{free_ports(1)[0]}").environment.items():
        monkeypatch.setenv(name, value)
    objects = ObjectStorage("s3://bucket/x", retry=QUICK)
    for use in (
        lambda: objects.read("a", max_bytes=1),
        lambda: objects.list("a"),
        lambda: objects.create("a", b""),
        lambda: objects.delete("a"),
    ):
        with pytest.raises(StoreError, match=r"127\.0\.0\.1") as caught:
            use()
        assert "\n" not in str(caught.value)


def test_the_same_failure_is_told_in_the_same_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a server that looks every second would write a line of its log each time."""
    for name, value in S3(f"http://127.0.0.1:{free_ports(1)[0]}").environment.items():
        monkeypatch.setenv(name, value)
    objects = ObjectStorage(f"s3://{BUCKET}/x", retry=QUICK)
    told = []
    for _ in range(2):
        with pytest.raises(StoreError) as failure:
            objects.read("store.json", max_bytes=1)
        told.append(str(failure.value))
    assert told[0] == told[1]
    assert told[0].endswith("/x/store.json - HTTP error: error sending request")


# A store on it


@on_moto
def test_a_gateway_that_forgets_the_condition_gets_no_store(place: str, proxy: Proxy) -> None:
    proxy.plan = every("forget condition", when=lambda request: True)
    with pytest.raises(StoreUnsupported, match="overwrites objects"):
        Store.create(place)
    written = [request.path for request, _ in proxy.seen if request.writes]
    assert all("/probe-" in path for path in written)


@on_moto
def test_a_gateway_that_forgets_the_condition_later_is_found_by_the_first_write(
    place: str, proxy: Proxy
) -> None:
    publish_lineage(Store.create(place), 2)
    proxy.plan = every("forget condition", when=lambda request: True)
    store = Store.open(place)
    with pytest.raises(StoreUnsupported, match="overwrites objects"):
        store.promote(1, channel="production", **MOVE)
    with pytest.raises(StoreUnsupported, match="overwrites objects"):
        prepare(parent=store.manifest(1), seed=5).publish(store)
    assert len(store.history("production")) == 2
    assert store.versions() == [1, 2]
    assert store.verify().ok


def test_the_condition_is_proved_once_a_process_and_not_before_a_write(
    place: str, proxy: Proxy
) -> None:
    publish_lineage(Store.create(place), 2)
    proxy.seen.clear()
    store = Store.open(place)
    store.head("production")
    assert not [request for request, _ in proxy.seen if request.writes]
    store.promote(1, channel="production", **MOVE)
    store.promote(2, channel="production", **MOVE)
    written = [request.path.split("/")[-1] for request, _ in proxy.seen if request.writes]
    assert written == ["store.json", "00000003.json", "00000004.json"]


@pytest.mark.parametrize("fault", ["lose reply", "409 late", "409", "503 late"])
def test_whatever_is_lost_in_a_publish_and_a_promotion_neither_is_done_twice(
    objects: ObjectStorage, proxy: Proxy, fault: Fault
) -> None:
    store = Store.create("models", objects=objects)
    writes = iter(range(1000))
    proxy.plan = lambda request: fault if request.writes and next(writes) % 3 == 0 else "none"
    for manifest in publish_lineage(store, 2):
        assert store.manifest(manifest.version) == manifest
    proxy.plan = nth_write(0, "none")
    assert fault in proxy.faults()
    assert store.versions() == [1, 2]
    assert [record.target for record in store.history("production")] == [1, 2]
    assert store.verify().ok


def test_an_unknown_manifest_is_told_as_unknown_and_an_unknown_shard_as_no_version(
    objects: ObjectStorage, proxy: Proxy
) -> None:
    store = Store.create("models", objects=objects)
    for part, raised, says in (
        ("/shards/", WriteFailed, "no version was published"),
        ("/versions/0", OutcomeUnknown, "not known whether versions/00000001.json"),
    ):
        proxy.plan = every("503", when=lambda request, part=part: part in request.path)  # type: ignore[misc]
        with pytest.raises(raised, match=says) as caught:
            prepare().publish(store)
        assert isinstance(caught.value, OutcomeUnknown) == (raised is OutcomeUnknown)


def test_two_records_of_the_same_move_at_the_same_moment_are_told_apart(
    place: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the transaction differs: without it the later one would take the other's for its own."""
    store = Store.create(place)
    named = publish_lineage(store, 1, channel=None)[0]
    monkeypatch.setattr("model_store.store.channel.timestamp", lambda: "2024-05-06T07:08:09Z")
    monkeypatch.setattr(Store, "record_numbers", lambda self, channel: [])
    assert store.channel("c")._append(1, named=named, mode="follow", **MOVE) is not None
    assert store.channel("c")._append(1, named=named, mode="follow", **MOVE) is None


# What is said, and what is loaded


def test_other_clouds_have_locations_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    for location in ("gs://bucket/prefix", "az://container/prefix"):
        assert isinstance(objects_at(location), ObjectStorage)


def test_what_the_location_lacks_is_wrong_usage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(WrongUsage, match="Account must be specified"):
        objects_at("az://container/prefix")


def test_without_obstore_an_address_says_what_to_install(tmp_path: Path) -> None:
    script = (
        "import sys; sys.modules['obstore'] = None\n"
        "from model_store.cli.main import main\n"
        "sys.exit(main(['list', '--store', 's3://bucket/x']))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 2
    assert "pip install 'dne-serve[s3]'" in ended.stderr


def test_a_store_in_a_directory_does_not_load_obstore(location: str) -> None:
    script = (
        "import sys; from model_store.cli.main import main\n"
        f"main(['list', '--store', {location!r}])\n"
        "sys.exit('obstore' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_a_damaged_shard_is_named_with_its_digest(place: str, proxy: Proxy) -> None:
    import obstore
    from obstore.store import from_url

    store = Store.create(place)
    (manifest,) = publish_lineage(store, 1)
    beside = from_url(place, client_options={"allow_http": True})
    obstore.put(beside, shard_name(manifest.classifier.sha256), bytes(manifest.classifier.bytes))
    assert manifest.classifier.sha256 in " ".join(store.verify().problems)
