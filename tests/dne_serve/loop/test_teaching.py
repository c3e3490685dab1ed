"""Pictures that are sent with the name of their class: `POST /inbox`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from dne_serve.access.permission import new_token
from model_store.loop.inbox import Inbox
from model_store.loop.jobs import Jobs
from model_store.records.manifest import Manifest
from model_store.store.store import Store
from tests.dne_serve.loop.photos import encoded, photo
from tests.live_server import TOKEN, Live, assert_problem, live_server, wait_for
from tests.model_store.loop.items import add_item

ADMIN = {"Authorization": f"Bearer {TOKEN}"}


def teach(live: Live, label: str, *pictures: bytes, **more: Any) -> httpx.Response:
    files = [("files", (f"{n}.png", picture)) for n, picture in enumerate(pictures)]
    options = {"headers": ADMIN, "params": {"label": label}, **more}
    return live.http.post("/inbox", files=files, **options)


def outcomes(answer: httpx.Response) -> list[str]:
    assert answer.status_code == 200, answer.text
    return [picture["outcome"] for picture in answer.json()["pictures"]]


def pictures(*seeds: int) -> list[bytes]:
    return [encoded(photo(seed), "PNG") for seed in seeds]


def read(live: Live, path: str) -> Any:
    answer = live.http.get(path, headers=ADMIN)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_the_first_pictures_make_the_store_and_wait_to_be_learnt(tmp_path: Path) -> None:
    with live_server(tmp_path / "models") as live:
        assert read(live, "/inbox")["total"] == 0
        nothing = read(live, "/jobs")
        assert (nothing["head"], nothing["jobs"], nothing["waiting"]["new"]) == (None, [], [])
        assert not (tmp_path / "models").exists()
        assert outcomes(teach(live, "cat", *pictures(1, 2))) == ["kept", "kept"]
        assert outcomes(teach(live, "dog", *pictures(3, 4))) == ["kept", "kept"]
        found = read(live, "/jobs")["waiting"]["new"]
        assert found == [{"label": "cat", "images": 2}, {"label": "dog", "images": 2}]
        item = read(live, "/inbox")["items"][0]
        assert (item["version"], item["label"], item["score"], item["top"]) == (
            None,
            None,
            None,
            [],
        )
        assert (item["rules"], item["judgement"]["label"]) == (["taught"], "dog")
        asked = live.admin("/jobs", pretrained="dinov2-small")
        assert asked.status_code == 200, asked.text
        store = Store.open(str(tmp_path / "models"))
        assert Jobs(store.objects).job(asked.json()["id"]).record.pretrained == "dinov2-small"


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/b/c", "", "a b", "file:x"])
def test_a_job_takes_names_of_weights_and_no_paths(live: Live, name: str) -> None:
    assert_problem(live.admin("/jobs", pretrained=name), 400, says="pretrained")


def test_weights_are_for_the_first_task_only(live: Live) -> None:
    teach(live, "cat", *pictures(1, 2))
    assert_problem(live.admin("/jobs", pretrained="dinov2-small"), 400, says="first task")


def test_bad_files_are_told_and_the_others_kept(live: Live) -> None:
    answer = teach(live, "cat", pictures(1)[0], b"not an image", pictures(2)[0])
    assert outcomes(answer) == ["kept", "bad", "kept"]
    bad = answer.json()["pictures"][1]
    assert (bad["filename"], bad["item"]) == ("1.png", None)
    assert "image" in bad["why"]
    assert read(live, "/inbox")["counts"]["labelled"] == 2


def test_the_same_picture_is_kept_once_and_under_one_class(live: Live) -> None:
    picture = pictures(1)
    first = teach(live, "cat", *picture).json()["pictures"][0]["item"]
    again = teach(live, "cat", *picture)
    assert outcomes(again) == ["known"]
    assert again.json()["pictures"][0]["item"] == first
    other = teach(live, "dog", *picture)
    assert outcomes(other) == ["other"]
    assert "labelled 'cat' already" in other.json()["pictures"][0]["why"]
    assert read(live, "/inbox")["total"] == 1


def test_a_picture_that_waits_without_a_label_gets_it(live: Live) -> None:
    item = teach(live, "cat", *pictures(1)).json()["pictures"][0]["item"]
    said = live.http.post(f"/inbox/{item}/label", json={"discard": True}, headers=ADMIN)
    assert said.status_code == 200
    assert outcomes(teach(live, "dog", *pictures(1))) == ["known"]
    assert read(live, f"/inbox/{item}")["judgement"]["label"] == "dog"


def test_look_alikes_are_kept_and_the_hour_does_not_count(store: Store, digits: Manifest) -> None:
    with live_server(Path(store.location), collect="sample=0%,per-hour=1") as live:
        live.wait_until_ready()
        taught = teach(live, "cat", *pictures(1), encoded(photo(1, width=60, height=40), "PNG"))
        assert outcomes(taught) == ["kept", "kept"]


def test_a_full_inbox_refuses_in_words_and_leaves_room_for_feedback(
    store: Store, digits: Manifest
) -> None:
    with live_server(Path(store.location), collect="sample=0%,total=10") as live:
        live.wait_until_ready()
        answer = teach(live, "cat", *pictures(*range(12)))
        assert outcomes(answer) == ["kept"] * 9 + ["refused"] * 3
        assert "the inbox is full" in answer.json()["pictures"][-1]["why"]
        (item,) = [one["id"] for one in live.predict(*pictures(50)).json()["predictions"]]
        fed = live.http.post("/feedback", json={"id": item, "wrong": True}, headers=ADMIN)
        assert fed.status_code == 200


def test_a_server_that_collects_nothing_deletes_nothing(live: Live, store: Store) -> None:
    """Its operator has not said for how many days pictures stay."""
    inbox = Inbox(store.objects)
    old = add_item(inbox, "an old one", minutes=-60 * 24 * 400)
    teach(live, "cat", *pictures(1))
    wait_for(lambda: live.serving.inbox_handle.index.find(old) is not None)
    assert inbox.item(old).id == old


def test_bad_requests_are_told_why(live: Live) -> None:
    assert_problem(teach(live, "a/b", *pictures(1)), 422, says="cannot name a folder")
    assert_problem(teach(live, "x" * 201, *pictures(1)), 422, says="longer than 200")
    assert_problem(teach(live, "cat"), 400, says="no image")
    assert_problem(teach(live, "cat", *pictures(1), params={}), 400, says="label")
    text = {**ADMIN, "Content-Type": "text/plain"}
    assert_problem(live.http.post("/inbox?label=cat", content=b"x", headers=text), 415)
    many = [pictures(1)[0]] * 65
    assert_problem(teach(live, "cat", *many), 413, says="more than 64 images")


def test_teaching_needs_the_scope_label(tmp_path: Path, store: Store, digits: Manifest) -> None:
    reader, labeller = new_token("eve=read,predict"), new_token("ann=label")
    tokens = tmp_path / "tokens"
    tokens.write_text(f"{reader.line}\n{labeller.line}\n")
    with live_server(Path(store.location), token_file=tokens, admin_token=None) as live:
        assert_problem(teach(live, "cat", *pictures(1), headers={}), 401)
        eve = {"Authorization": f"Bearer {reader.secret}"}
        assert_problem(teach(live, "cat", *pictures(1), headers=eve), 403)
        ann = {"Authorization": f"Bearer {labeller.secret}"}
        taught = teach(live, "cat", *pictures(1), headers=ann)
        assert outcomes(taught) == ["kept"]
        shown = live.http.get(f"/inbox/{taught.json()['pictures'][0]['item']}", headers=ann)
        assert shown.json()["judgement"]["actor"].startswith("http:ann@")


def test_a_client_that_leaves_or_waits_too_long_ends_no_thread(
    store: Store, digits: Manifest
) -> None:
    with live_server(Path(store.location), max_wait_seconds=0.001) as live:
        live.wait_until_ready()
        assert set(outcomes(teach(live, "cat", *pictures(1, 2)))) == {"refused"}
        wait_for(lambda: "known" in outcomes(teach(live, "cat", *pictures(1))) or _total(live) >= 1)
        assert _total(live) >= 1


def _total(live: Live) -> int:
    found: int = read(live, "/inbox")["total"]
    return found
