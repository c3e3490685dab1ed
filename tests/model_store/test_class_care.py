from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from model_store.cli.main import main
from model_store.errors import ChannelNotFound, DataRejected, RecordInvalid, WrongUsage
from model_store.layout import SHARDS
from model_store.maintenance.edit_classes import Care, rename_class, retire_class, set_thresholds
from model_store.records.manifest import Draft, Manifest, decode, delta_of, encode
from model_store.records.sealing import seal
from model_store.records.signing import Trust, load_signer, load_trust, save_trust
from model_store.store.shard import shard_ref
from model_store.store.store import Store
from tests.model_store.drafts import image_shard, prepare, publish_lineage

ClassCounts = dict[str, int]


@pytest.fixture
def store(location: str) -> Store:
    """Versions 1 and 2: class-0a, class-0b, class-1a, class-1b."""
    store = Store.open(location)
    publish_lineage(store, 2)
    return store


def care(store: Store, **asked: object) -> Care:
    return Care(store=store, channel="production", actor="tests", **asked)  # type: ignore[arg-type]


def shards_of(store: Store) -> list[str]:
    return sorted(entry.name for entry in store.objects.list(SHARDS))


def test_retiring_a_class_writes_no_shard_and_keeps_every_tensor(store: Store) -> None:
    before, parent = shards_of(store), store.manifest(2)
    outcome = retire_class("class-0b", care=care(store))
    child = outcome.manifest
    assert shards_of(store) == before
    assert delta_of(child, parent) == ()
    assert child.model_shards == parent.model_shards
    assert child.spec == parent.spec
    assert child.classes == ("class-0a", "class-1a", "class-1b")
    assert child.places == (0, 2, 3)
    assert store.verify().ok


def test_pictures_of_a_retired_class_are_not_handed_on(store: Store) -> None:
    child = retire_class("class-0b", care=care(store)).manifest
    assert [one.class_name for one in child.memory] == ["class-0a", "class-1a", "class-1b"]
    assert [one.class_name for one in store.manifest(2).memory][1] == "class-0b"


def test_a_renamed_class_keeps_its_place_and_its_pictures(store: Store) -> None:
    before, parent = shards_of(store), store.manifest(2)
    child = rename_class("class-1a", "Straße 7", care=care(store)).manifest
    assert child.classes == ("class-0a", "class-0b", "Straße 7", "class-1b")
    assert [one.shard for one in child.memory] == [one.shard for one in parent.memory]
    assert child.memory[2].class_name == "Straße 7"
    assert child.metrics.per_class == {"Straße 7": 0.25, "class-1b": 0.25}
    assert child.metrics.confusion == {"Straße 7": {"Straße 7": 1}, "class-1b": {"Straße 7": 1}}
    assert child.metrics.accuracy == parent.metrics.accuracy
    assert shards_of(store) == before
    assert store.verify().ok


def test_whatever_else_the_parent_says_is_handed_on(store: Store) -> None:
    parent = store.manifest(2)
    for outcome in (
        rename_class("class-1a", "x", care=care(store)),
        retire_class("class-1b", care=care(store)),
    ):
        ours = {"parent", "parent_digest", "transaction", "tasks", "memory", "held_out"}
        ours |= {"retired", "metrics", "created", "software"}
        for name in Draft.model_fields.keys() - ours:
            assert getattr(outcome.manifest, name) == getattr(parent, name)


def test_class_care_promotes_and_says_what_was_done(store: Store) -> None:
    retire_class("class-0b", care=care(store))
    rename_class("class-0a", "x", care=care(store, reason="because"))
    assert [(one.target, one.reason) for one in store.history("production")[-2:]] == [
        (3, "class class-0b was retired"),
        (4, "because"),
    ]
    assert store.manifest(4).parent == 3
    assert store.manifest(4).retired == ("class-0b",)


def test_a_version_without_probabilities_of_unknown_takes_no_threshold(store: Store) -> None:
    with pytest.raises(DataRejected, match="version 2 tells no probability of unknown"):
        set_thresholds({"class-0a": 0.3}, care=care(store))
    assert store.versions() == [1, 2]


def test_on_a_pinned_channel_it_is_published_and_not_promoted(store: Store) -> None:
    store.rollback(channel="production", to=1, actor="tests", reason="")
    outcome = retire_class("class-0b", care=care(store))
    assert outcome.manifest.parent == 1
    assert not outcome.promoted
    assert "pinned to version 1; `dne-store promote 3" in str(outcome.refused)
    head = store.head("production")
    assert head is not None
    assert (head.target, head.mode) == (1, "pin")


class Overtaken(Store):
    """Someone moves the channel between the publish and the promotion."""

    def publish(self, draft: Draft, **how: Any) -> Manifest:
        published = super().publish(draft, **how)
        self.promote(1, channel="production", actor="another", reason="")
        return published


def test_a_channel_that_moves_meanwhile_makes_it_a_branch(store: Store) -> None:
    overtaken = Overtaken.open(store.location)
    outcome = retire_class("class-0b", care=care(overtaken))
    assert "is a branch" in str(outcome.refused)
    head = store.head("production")
    assert head is not None
    assert head.target == 1


def test_all_classes_of_a_task_may_be_retired_but_not_the_last_class(store: Store) -> None:
    for name in ("class-1a", "class-1b", "class-0b"):
        retire_class(name, care=care(store))
    newest = store.manifest(5)
    assert newest.retired == ("class-0b", "class-1a", "class-1b")  # in the classes' order
    assert len(newest.tasks) == 2
    with pytest.raises(DataRejected, match="the last class that is left"):
        retire_class("class-0a", care=care(store))
    assert store.newest() == 5


def test_the_name_of_a_retired_class_is_free_after_a_rename(store: Store) -> None:
    retire_class("class-0b", care=care(store))
    with pytest.raises(DataRejected, match="a class 'class-0b' that is retired already"):
        rename_class("class-0a", "class-0b", care=care(store))
    rename_class("class-0b", "old", care=care(store))
    child = rename_class("class-0a", "class-0b", care=care(store)).manifest
    assert child.retired == ("old",)
    assert child.classes == ("class-0b", "class-1a", "class-1b")


def test_what_makes_no_sense_is_refused_and_publishes_nothing(store: Store) -> None:
    with pytest.raises(DataRejected, match="version 2 knows no class 'x'"):
        retire_class("x", care=care(store))
    with pytest.raises(DataRejected, match="knows no class"):
        rename_class("x", "y", care=care(store))
    with pytest.raises(DataRejected, match="there is a class 'class-1a' already"):
        rename_class("class-0a", "class-1a", care=care(store))
    with pytest.raises(WrongUsage, match="has that name already"):
        rename_class("class-0a", "class-0a", care=care(store))
    with pytest.raises(WrongUsage, match="must be printable"):
        rename_class("class-0a", "a\nb", care=care(store))
    with pytest.raises(ChannelNotFound):
        retire_class("class-0a", care=Care(store=store, channel="staging", actor="tests"))
    assert store.newest() == 2
    retire_class("class-0a", care=care(store))
    with pytest.raises(DataRejected, match="retired already"):
        retire_class("class-0a", care=care(store))


def test_the_figures_left_are_those_of_the_remaining_images(tmp_path: Path) -> None:
    store = Store.create(str(tmp_path / "other"))
    _publish_judged(store, held={"a": 4, "b": 2}, per_class={"a": 0.75, "b": 0.5}, images=6)
    metrics = retire_class("b", care=care(store)).manifest.metrics
    assert metrics.per_class == {"a": 0.75}
    assert (metrics.images, metrics.source) == (4, "held-out")
    assert (metrics.accuracy.all, metrics.accuracy.old, metrics.accuracy.new) == (0.75, None, 0.75)


def test_figures_that_cannot_be_split_are_not_claimed(tmp_path: Path) -> None:
    store = Store.create(str(tmp_path / "other"))
    _publish_judged(store, held={"a": 4, "b": 2}, per_class={"a": 0.75, "b": 0.5}, images=99)
    metrics = retire_class("b", care=care(store)).manifest.metrics
    assert metrics.per_class == {"a": 0.75}
    assert (metrics.accuracy.all, metrics.images, metrics.source) == (None, 0, "none")


def _publish_judged(
    store: Store, *, held: ClassCounts, per_class: dict[str, float], images: int
) -> None:
    made = prepare(classes=tuple(held), images=0)
    shards = dict(made.shards)
    entries = []
    for name, count in held.items():
        data = image_shard([f"{name} {i}".encode() for i in range(count)])
        ref = shard_ref("held-out", data)
        shards[ref.sha256] = data
        entries.append({"class": name, "shard": ref, "count": count})
    draft = Draft.model_validate(
        {
            **{name: getattr(made.draft, name) for name in Draft.model_fields},
            "held_out": tuple(entries),
            "metrics": {
                "accuracy": {"all": 0.6, "new": 0.6},
                "per_class": per_class,
                "images": images,
                "source": "held-out",
            },
        }
    )
    manifest = store.publish(draft, shards=shards)
    store.promote(manifest.version, channel="production", actor="tests", reason="")


# The manifest


@pytest.mark.parametrize(
    "retired",
    [
        ["unheard of"],
        ["class-0b", "class-0b"],
        ["class-0a", "class-0b"],
        "class-0a",
        ["class-0a"],
    ],
    ids=["unknown", "twice", "all", "text", "with pictures"],
)
def test_retired_classes_that_make_no_sense_are_refused(retired: object) -> None:
    images = 2 if retired == ["class-0a"] else 0
    body = json.loads(encode(prepare(images=images).draft, version=1))
    del body["digest"]
    with pytest.raises(RecordInvalid):
        decode("x", seal({**body, "retired": retired}), version=1)
    right = {**body, "memory": [], "retired": ["class-0b"]}
    assert decode("x", seal(right), version=1).classes == ("class-0a",)


# The commands

Capture = pytest.CaptureFixture[str]


def test_the_commands_say_what_they_did(store: Store, capsys: Capture) -> None:
    at = ["--store", store.location]
    assert main(["retire-class", "class-0b", *at, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == {
        "retired_class": "class-0b",
        "version": 3,
        "parent": 2,
        "classes": 3,
        "retired": ["class-0b"],
        "promoted": True,
        "refused": None,
        "notes": [],
        "delta_bytes": 0,
    }
    assert main(["rename-class", "class-0a", "x", *at, "--no-promote"]) == 0
    assert "version 4: class class-0a is called x; 3 classes" in capsys.readouterr().out
    assert main(["show", "3", *at, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["classes"] == ["class-0a", "class-1a", "class-1b"]
    assert shown["tasks"][0]["classes"] == ["class-0a"]
    assert shown["retired"] == ["class-0b"]
    assert main(["show", "3", *at]) == 0
    assert "retired    class-0b" in capsys.readouterr().out
    assert main(["diff", "2", "3", *at]) == 0
    assert "- classes: class-0b" in capsys.readouterr().out
    assert main(["list", *at, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["versions"]
    assert [row["classes"] for row in rows] == [2, 4, 3, 3]


def test_a_pinned_channel_ends_the_command_with_3(store: Store, capsys: Capture) -> None:
    store.rollback(channel="production", to=1, actor="tests", reason="")
    assert main(["retire-class", "class-0b", "--store", store.location]) == 3
    assert "not promoted: channel production is pinned" in capsys.readouterr().err
    assert main(["retire-class", "nobody", "--store", store.location]) == 1
    assert main(["rename-class", "class-0a", " x", "--store", store.location]) == 2


def test_a_version_of_class_care_can_be_signed(store: Store, tmp_path: Path) -> None:
    key = tmp_path / "key"
    assert main(["keys", "new", str(key)]) == 0
    trust = tmp_path / "trust.json"
    save_trust(trust, Trust({"ann": load_signer(key).public}))
    at, keys = ["--store", store.location], ["--sign", str(key), "--trust", str(trust)]
    assert main(["retire-class", "class-0b", *at, *keys]) == 1  # on top of what nobody signed
    copied = Store.create(str(tmp_path / "signed"))
    assert main(["copy", "--to", copied.location, *at, "--sign", str(key)]) == 0
    assert main(["retire-class", "class-0b", "--store", copied.location, *keys]) == 0
    assert copied.verify(trust=load_trust(trust)).ok
