"""Waiting pictures go to Label Studio once, the doubtful ones first."""

from __future__ import annotations

from typing import Any

import pytest

from model_store.errors import LabelConfigInvalid, WrongUsage
from model_store.loop.inbox import DISCARD, WRONG, Inbox, Judgement
from model_store.store.store import Store
from tests.model_store.loop.items import add_item, picture_bytes
from tests.trainer.loop.fake_label_studio import FakeLabelStudio
from trainer.loop.label_studio import ProjectChoice, Pushed, push

BY_TITLE = ProjectChoice(project=None, title="pets")


def pushed(
    fake: FakeLabelStudio, store: Store, chosen: ProjectChoice = BY_TITLE, *, limit: int = 1000
) -> Pushed:
    with fake.open() as server:
        return push(server, chosen, store=store, channel="production", limit=limit)


def pushed_items(fake: FakeLabelStudio) -> list[str]:
    return [task["data"]["dne_item"] for task in fake.tasks.values()]


def test_waiting_pictures_are_imported_with_predictions_the_doubtful_first(
    fake: FakeLabelStudio, store: Store, inbox: Inbox
) -> None:
    sure = add_item(inbox, "sure", score=0.9)
    doubtful = add_item(inbox, "doubtful", score=0.3, minutes=1)
    wrong, labelled, useless = (add_item(inbox, name, minutes=2) for name in ("w", "l", "u"))
    inbox.judge(wrong, WRONG, actor="anna")
    inbox.judge(labelled, Judgement.of_class("zebra"), actor="anna")
    inbox.judge(useless, DISCARD, actor="anna")
    done = pushed(fake, store)
    assert (done.pushed, done.there, done.left) == (3, 0, 0)
    assert done.project.created
    assert pushed_items(fake) == [doubtful, wrong, sure]
    task = fake.tasks[1]
    (prediction,) = task["predictions"]
    assert prediction["score"] == pytest.approx(0.3)
    assert prediction["model_version"] == "dne-serve-1"
    assert prediction["result"][0]["value"] == {"choices": ["cat"]}
    names = [one["value"] for one in task["data"]["classes"]]
    assert names == ["cat", "dog", "zebra"]
    name = task["data"]["image"].removeprefix("/data/")
    contents = {path: data for _, path, data in fake.files.values()}
    assert contents[name] == picture_bytes("doubtful")
    project = fake.projects[1]
    assert project["sampling"] == "Uncertainty sampling"
    assert 'value="$classes"' in project["label_config"]
    assert project["model_version"] == "dne-serve-1"


def test_pushing_again_adds_only_what_is_not_there(
    fake: FakeLabelStudio, store: Store, inbox: Inbox
) -> None:
    first = [add_item(inbox, f"picture {n}", minutes=n) for n in range(3)]
    pushed(fake, store)
    again = pushed(fake, store)
    assert (again.pushed, again.there) == (0, 3)
    assert [one["title"] for one in fake.projects.values()] == ["pets", "pets: pictures"]
    new = add_item(inbox, "new", minutes=9)
    third = pushed(fake, store)
    assert (third.pushed, third.there) == (1, 3)
    assert sorted(pushed_items(fake)) == sorted([*first, new])


def test_many_pictures_go_in_batches_and_a_limit_holds(
    fake: FakeLabelStudio, store: Store, inbox: Inbox
) -> None:
    for number in range(120):
        add_item(inbox, f"picture {number}", minutes=number)
    done = pushed(fake, store, limit=110)
    assert (done.pushed, done.left) == (110, 10)
    done = pushed(fake, store, limit=110)
    assert (done.pushed, done.there, done.left) == (10, 110, 0)
    assert len(set(pushed_items(fake))) == 120


def test_tasks_without_a_label_get_new_classes_and_labelled_ones_stay(
    fake: FakeLabelStudio, store: Store, inbox: Inbox
) -> None:
    one, other = add_item(inbox, "one"), add_item(inbox, "other", minutes=1)
    pushed(fake, store)
    fake.annotate(other)
    third = add_item(inbox, "third", minutes=2)
    inbox.judge(third, Judgement.of_class("zebra"), actor="anna")
    assert pushed(fake, store).refreshed == 1
    classes = {
        task["data"]["dne_item"]: [name["value"] for name in task["data"]["classes"]]
        for task in fake.tasks.values()
    }
    assert classes == {one: ["cat", "dog", "zebra"], other: ["cat", "dog"]}


def test_an_answer_that_is_no_class_any_more_is_no_prediction(
    fake: FakeLabelStudio, store: Store, inbox: Inbox
) -> None:
    add_item(inbox, "picture", label="unicorn", score=0.8)
    pushed(fake, store)
    (prediction,) = fake.tasks[1]["predictions"]
    assert prediction["result"][0]["value"] == {"choices": ["dog"]}
    assert prediction["score"] == pytest.approx(0.2)


def test_a_project_by_number_is_used_as_it_is(
    fake: FakeLabelStudio, store: Store, inbox: Inbox
) -> None:
    add_item(inbox, "picture")
    config = (
        '<View><Image name="photo" value="$url"/><Choices name="kind" toName="photo">'
        '<Choice value="cat"/></Choices></View>'
    )
    fake.projects[1] = {"id": 1, "title": "theirs", "label_config": config}
    assert pushed(fake, store, ProjectChoice(project=1, title="pets")).pushed == 1
    task = fake.tasks[1]
    assert task["data"]["url"].startswith("/data/upload/2/")
    assert "image" not in task["data"]
    (prediction,) = task["predictions"]
    assert prediction["result"][0]["from_name"] == "kind"


@pytest.mark.parametrize(
    ("projects", "chosen", "error", "says"),
    [
        ([], ProjectChoice(project=7, title="pets"), WrongUsage, "no project 7"),
        (["pets", "pets"], BY_TITLE, WrongUsage, "`project`"),
        (["pets"], BY_TITLE, LabelConfigInvalid, "project 1 does not fit"),
    ],
)
def test_a_project_that_cannot_be_used_is_named(
    fake: FakeLabelStudio,
    store: Store,
    projects: list[str],
    chosen: ProjectChoice,
    error: type[Exception],
    says: str,
) -> None:
    for number, title in enumerate(projects, start=1):
        fake.projects[number] = {"id": number, "title": title, "label_config": "<View/>"}
    with pytest.raises(error, match=says):
        pushed(fake, store, chosen)


def test_a_push_that_broke_off_is_taken_up(
    fake: FakeLabelStudio, store: Store, inbox: Inbox
) -> None:
    for number in range(60):
        add_item(inbox, f"picture {number}", minutes=number)
    imports: list[Any] = []

    def fail_second_import(request: Any) -> Any:
        is_import = request.url.path.endswith("/import")
        if is_import and "json" in request.headers["content-type"]:
            imports.append(request)
            if len(imports) == 2:
                raise KeyboardInterrupt
        return None

    fake.fails = fail_second_import
    with pytest.raises(KeyboardInterrupt):
        pushed(fake, store)
    assert len(fake.tasks) == 50
    assert pushed(fake, store).pushed == 10
    assert len(set(pushed_items(fake))) == 60
