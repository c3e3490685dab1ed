"""The store that the real commands made holds all kinds of versions."""

from __future__ import annotations

from model_store.store.store import Store
from tests.trained_store import EXTENDED, NEW_NAME, RENAMED, RETIRED, TrainedStore


def test_it_holds_every_kind_of_version(trained_store: TrainedStore) -> None:
    store = Store.open(str(trained_store.location))
    assert store.versions() == list(trained_store.versions)
    versions = {number: store.manifest(number) for number in trained_store.versions}
    refused = versions[trained_store.refused].metrics.gate
    assert refused is not None
    assert not refused.passed
    assert refused.reasons
    assert refused.confused
    assert versions[trained_store.branch].parent == trained_store.second
    assert NEW_NAME in versions[trained_store.renaming].classes
    assert RENAMED not in versions[trained_store.renaming].classes
    assert versions[trained_store.extension].extended == (EXTENDED,)
    assert versions[trained_store.retirement].retired == (RETIRED,)
    assert versions[trained_store.served].classes == trained_store.classes


def test_its_channel_was_rolled_back_and_resumed(trained_store: TrainedStore) -> None:
    store = Store.open(str(trained_store.location))
    moves = [(record.target, record.mode) for record in store.history("production")]
    assert moves[-2:] == [(trained_store.second, "pin"), (trained_store.served, "follow")]
    assert all(trained_store.refused != target for target, _ in moves)


def test_a_copy_can_be_changed(trained_copy: TrainedStore, trained_store: TrainedStore) -> None:
    store = Store.open(str(trained_copy.location))
    store.promote(trained_copy.first, channel="production", actor="tests", reason="")
    shared = Store.open(str(trained_store.location)).head("production")
    assert shared is not None
    assert shared.target == trained_store.served


def test_the_other_store_began_with_a_pretrained_file(trained_store: TrainedStore) -> None:
    store = Store.open(str(trained_store.pretrained))
    assert store.versions() == list(trained_store.pretrained_versions)
    assert store.manifest(1).network.token != "class-attention"
