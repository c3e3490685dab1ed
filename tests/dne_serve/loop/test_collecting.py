"""Collecting, labelling and feedback over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from model_store.loop.inbox import Inbox
from model_store.records.manifest import Manifest
from model_store.store.store import Store
from tests.dne_serve.loop.photos import PLACE, encoded, photo, with_metadata
from tests.live_server import TOKEN, Live, assert_problem, live_server, wait_for
from tests.trained_store import TrainedStore

ADMIN = {"Authorization": f"Bearer {TOKEN}"}


def pictures(*seeds: int) -> list[bytes]:
    return [encoded(photo(seed), "PNG") for seed in seeds]


def listed(live: Live, query: str = "") -> dict[str, Any]:
    answer = live.http.get(f"/inbox{query}", headers=ADMIN)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def say(live: Live, item: str, **body: Any) -> httpx.Response:
    return live.http.post(f"/inbox/{item}/label", json=body, headers=ADMIN)


def feed(live: Live, **body: Any) -> httpx.Response:
    return live.http.post("/feedback", json=body, headers=ADMIN)


def ids_of(answer: httpx.Response) -> list[str]:
    assert answer.status_code == 200, answer.text
    return [one["id"] for one in answer.json()["predictions"]]


@pytest.fixture
def everything(store: Store, digits: Manifest) -> Iterator[Live]:
    """Keeps every picture that does not look like one that waits."""
    with live_server(Path(store.location), collect="sample=100%") as live:
        live.wait_until_ready()
        yield live


@pytest.fixture
def only_asked(store: Store, digits: Manifest) -> Iterator[Live]:
    """Keeps what clients ask for, and nothing else."""
    with live_server(Path(store.location), collect="sample=0%") as live:
        live.wait_until_ready()
        yield live


def test_pictures_are_kept_listed_shown_and_labelled(everything: Live) -> None:
    sent = [*pictures(1, 2), with_metadata(photo(3, width=900, height=600))]
    answer = everything.predict(*sent)
    ids = ids_of(answer)
    wait_for(lambda: listed(everything)["total"] == 3)
    page = listed(everything, "?limit=2")
    rest = listed(everything, f"?limit=2&cursor={page['next_cursor']}")
    found = {one["id"]: one for one in [*page["items"], *rest["items"]]}
    assert sorted(found) == sorted(ids)
    assert rest["next_cursor"] is None
    assert page["collecting"] is True
    for item, said in zip(ids, answer.json()["predictions"], strict=True):
        kept = found[item]
        assert (kept["label"], kept["version"]) == (said["label"], 2)
        assert kept["score"] == pytest.approx(said["score"])
        assert kept["top"] == said["top"]
        assert kept["rules"] == ["sample=100%"]
    picture = everything.http.get(f"/inbox/{ids[2]}/image", headers=ADMIN)
    assert picture.headers["content-type"] == "image/jpeg"
    assert picture.headers["x-content-type-options"] == "nosniff"
    assert "sandbox" in picture.headers["content-security-policy"]
    assert PLACE.encode() not in picture.content
    assert (found[ids[2]]["width"], found[ids[2]]["height"]) == (512, 341)
    said = say(everything, ids[0], label="<script>", after=0)
    assert said.json()["number"] == 1
    unlabelled = listed(everything, "?state=unlabelled&order=uncertain")
    assert {one["id"] for one in unlabelled["items"]} == set(ids[1:])
    assert unlabelled["counts"] == {"unlabelled": 2, "labelled": 1, "wrong": 0, "discarded": 0}
    shown = everything.http.get(f"/inbox/{ids[0]}", headers=ADMIN).json()
    assert shown["judgement"]["label"] == "<script>"
    assert shown["history"][0]["actor"].startswith("http:")
    assert everything.metric("dne_collected_images_total") == 3


def test_nothing_is_kept_and_no_id_given_unless_asked_for(live: Live) -> None:
    assert "id" not in live.predict(*pictures(1)).json()["predictions"][0]
    assert_problem(live.predict(*pictures(1), query="?keep=true"), 400, says="--collect")
    assert listed(live) == {
        "items": [],
        "counts": {"unlabelled": 0, "labelled": 0, "wrong": 0, "discarded": 0},
        "total": 0,
        "next_cursor": None,
        "collecting": False,
    }


def test_a_client_can_ask_to_keep_a_picture(only_asked: Live) -> None:
    only_asked.predict(*pictures(1))
    (item,) = ids_of(only_asked.predict(*pictures(2), query="?keep=true"))
    wait_for(lambda: listed(only_asked)["total"] == 1)
    (kept,) = listed(only_asked)["items"]
    assert (kept["id"], kept["rules"]) == (item, ["keep"])


def test_feedback_keeps_a_picture_that_no_rule_kept(only_asked: Live) -> None:
    first, second = ids_of(only_asked.predict(*pictures(1, 2)))
    said = feed(only_asked, id=first, label="mug")
    assert said.status_code == 200, said.text
    assert (said.json()["kind"], said.json()["label"]) == ("label", "mug")
    (kept,) = listed(only_asked)["items"]
    assert (kept["id"], kept["rules"], kept["state"]) == (first, ["feedback"], "labelled")
    assert feed(only_asked, id=second, wrong=True).status_code == 200
    assert feed(only_asked, id=first, wrong=True).json()["number"] == 2
    assert only_asked.metric("dne_collected_images_total") == 2


def test_two_people_do_not_overwrite_each_other(everything: Live) -> None:
    (item,) = ids_of(everything.predict(*pictures(1), query="?keep=true"))
    wait_for(lambda: listed(everything)["total"] == 1)
    assert say(everything, item, label="mug", after=0).status_code == 200
    overtaken = say(everything, item, label="cup", after=0)
    assert_problem(overtaken, 409, says="'mug'")
    assert (overtaken.json()["number"], overtaken.json()["said"]) == (1, "mug")
    assert say(everything, item, label="cup", after=1).json()["number"] == 2
    assert say(everything, item, clear=True).json()["kind"] == "clear"
    assert listed(everything, "?state=unlabelled")["items"][0]["number"] == 3


def test_bad_requests_are_told_why(everything: Live) -> None:
    (item,) = ids_of(everything.predict(*pictures(1)))
    wait_for(lambda: listed(everything)["total"] == 1)
    assert_problem(say(everything, item, label="a/b"), 422, says="cannot name a folder")
    assert_problem(say(everything, item, label=" "), 422, says="printable")
    assert_problem(feed(everything, id=item, label="x" * 201), 422, says="longer than 200")
    for body in ({}, {"label": "a", "discard": True}, {"label": "a", "more": 1}, {"after": -1}):
        assert_problem(say(everything, item, **body), 400)
    assert_problem(feed(everything, id=item), 400, says="either label or wrong")
    absent = "20261117t120000000-000000000000"
    for path in (absent, "..%2f..%2fstore", "x"):
        assert_problem(say(everything, path, label="a"), 404)
    assert_problem(feed(everything, id=absent, wrong=True), 404, says="not kept")
    assert_problem(everything.http.get(f"/inbox/{absent}/image", headers=ADMIN), 404)
    assert_problem(everything.http.get("/inbox?cursor=x", headers=ADMIN), 400, says="cursor")
    assert_problem(everything.http.get("/inbox?limit=0", headers=ADMIN), 400)


@pytest.mark.parametrize("refreshed", [False, True])
def test_feedback_does_not_bring_back_what_another_has_deleted(
    everything: Live, refreshed: bool
) -> None:
    (item,) = ids_of(everything.predict(*pictures(1)))
    wait_for(lambda: listed(everything)["total"] == 1)
    Inbox(Store.open(everything.serving.open_store().location).objects).delete(item)
    if refreshed:
        everything.serving.inbox_handle.index.refresh(whole=True)
    assert_problem(feed(everything, id=item, label="mug"), 404)
    left = everything.serving.open_store().objects.list_names("inbox")
    assert [name for name in left if "/removed/" not in name] == []
    assert ids_of(everything.predict(*pictures(2)))  # the store is not held to refuse


def test_an_item_that_is_deleted_while_it_is_labelled_is_gone(everything: Live) -> None:
    (item,) = ids_of(everything.predict(*pictures(1)))
    wait_for(lambda: listed(everything)["total"] == 1)
    deleted = everything.http.delete(f"/inbox/{item}", headers=ADMIN)
    assert deleted.json() == {"id": item, "deleted": True}
    assert_problem(say(everything, item, label="mug", after=0), 404)
    assert_problem(feed(everything, id=item, label="mug"), 404)
    assert listed(everything)["total"] == 0
    left = everything.serving.open_store().objects.list("inbox")
    assert [(one.name.rpartition("/")[2], one.bytes) for one in left] == [(item, 0)]  # its mark


def test_a_shadow_that_disagrees_has_the_picture_kept(store: Store, digits: Manifest) -> None:
    sent = pictures(*range(12))
    with live_server(Path(store.location), collect="disagrees", canary="shadow=1") as live:
        wait_for(lambda: live.http.get("/readyz").json().get("shadow") == 1)
        own = live.predict(*sent).json()["predictions"]
        other = live.predict(*sent, query="?version=1").json()["predictions"]
        differing = {
            one["id"]: theirs["label"]
            for one, theirs in zip(own, other, strict=True)
            if one["label"] != theirs["label"]
        }
        assert len(differing) > 0
        wait_for(lambda: listed(live)["total"] == len(differing))
        found = listed(live, "?order=disagreeing")["items"]
    assert {one["id"]: one["other_label"] for one in found} == differing
    assert {one["other_version"] for one in found} == {1}


def test_a_canary_that_disagrees_has_the_picture_kept(store: Store, digits: Manifest) -> None:
    store.rollback(channel="production", to=1, actor="tests", reason="")
    sent = pictures(*range(12))
    with live_server(Path(store.location), collect="disagrees", canary="2=100%") as live:
        wait_for(lambda: live.http.get("/readyz").json().get("canary") == 2)
        own = live.predict(*sent).json()
        assert own["canary"] is True
        other = live.predict(*sent, query="?version=1").json()["predictions"]
        pairs = zip(own["predictions"], other, strict=True)
        differing = {one["id"] for one, theirs in pairs if one["label"] != theirs["label"]}
        assert differing
        wait_for(lambda: listed(live)["total"] == len(differing))
        assert {one["id"] for one in listed(live)["items"]} == differing
        assert live.metric('dne_shadow_images_total{label="other"}') == 0  # there is no shadow


@pytest.mark.parametrize(("host", "status"), [("127.0.0.1", 200), ("0.0.0.0", 403)])
def test_without_any_token_only_this_machine_sees_the_inbox(
    store: Store, digits: Manifest, host: str, status: int
) -> None:
    with live_server(Path(store.location), admin_token=None, host=host) as live:
        assert live.http.get("/inbox").status_code == status


def test_the_inbox_is_shared_by_servers(everything: Live, store: Store) -> None:
    (item,) = ids_of(everything.predict(*pictures(1)))
    wait_for(lambda: listed(everything)["total"] == 1)
    with live_server(Path(store.location)) as other:
        assert listed(other)["items"][0]["id"] == item
        assert say(other, item, label="mug", after=0).status_code == 200
    assert_problem(say(everything, item, label="cup", after=0), 409, says="mug")


def test_a_server_without_a_store_has_no_inbox_yet(tmp_path: Path) -> None:
    with live_server(tmp_path / "models", collect="unknown") as live:
        assert (listed(live)["total"], listed(live)["collecting"]) == (0, True)
        groups = live.http.get("/inbox/groups", headers=ADMIN).json()
        assert (groups["groups"], groups["others"], groups["total"]) == ([], [], 0)


def test_a_trained_version_collects_what_it_doubts(trained_copy: TrainedStore) -> None:
    with live_server(trained_copy.location, collect="unknown,score<0.9,margin<0.9") as live:
        live.wait_until_ready()
        odd = encoded(photo(7, width=640, height=480))
        sent = [odd, *(trained_copy.image(name) for name in ("0", "1", "plus"))]
        said = live.predict(*sent).json()["predictions"]
        doubted = {one["id"] for one in said if one["unknown"] or one["score"] < 0.9}
        assert doubted
        wait_for(lambda: listed(live)["total"] >= len(doubted) - 1)
        found = {one["id"]: one for one in listed(live)["items"]}
        assert found.keys() <= {one["id"] for one in said}
        rules = {rule for one in found.values() for rule in one["rules"]}
        assert rules <= {"unknown", "score<0.9", "margin<0.9"}
        item = next(iter(found))
        assert feed(live, id=item, label="mug").status_code == 200
    inbox = Inbox(Store.open(str(trained_copy.location)).objects)
    head = inbox.head(item)
    assert head is not None
    assert head.label == "mug"


def test_a_server_keeps_nothing_on_a_disk_below_its_floor(store: Store, digits: Manifest) -> None:
    with live_server(Path(store.location), collect=f"sample=100%,free-bytes={1 << 60}") as live:
        live.wait_until_ready()
        assert live.predict(*pictures(1), query="?keep=true").status_code == 200
        dropped = 'dne_collect_dropped_images_total{reason="disk"}'
        wait_for(lambda: live.metric(dropped) == 1)
        assert listed(live)["total"] == 0
