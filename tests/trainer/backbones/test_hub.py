"""Weights by name, from a server that speaks the Hub's interface."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_hub import constants

from model_store.errors import NotPrivate, WeightsMissing, WrongUsage
from model_store.store.store import Store
from tests.faults.disks import small_disk
from tests.machine import know_machine
from tests.trainer.command import Command
from tests.trainer.fake_hub import COMMIT, FakeHub, Repository, fake_hub
from tests.trainer.towers import TOWERS, write_tower
from tests.trainer.vit import REAL, made_up, write_vit
from trainer.backbones import hub as fetching
from trainer.backbones import known
from trainer.backbones.hub import WeightsFile, find_weights, place_for
from trainer.backbones.known import FIRST, backbone_named
from trainer.backbones.pretrained import read_pretrained
from trainer.cli import commands, main

TOWER = "somebody/dinov2-tiny"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A Hub with one tower, and a program that has never asked it for anything."""
    folder = tmp_path / "tower"
    write_tower(folder, TOWERS["transformers DINOv2 with registers"]())
    (folder / "preprocessor_config.json").write_text("{}")
    with fake_hub() as made:
        made.add(TOWER, folder)
        for name, value in made.environment(tmp_path / "hf").items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.setattr(fetching, "cache_folder", lambda: tmp_path / "cache")
        # huggingface_hub reads its variables when it is imported.
        monkeypatch.setattr(constants, "ENDPOINT", made.url)
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(
            constants._HF_DEFAULT_ENDPOINT, made.url
        )
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf/hub"))
        monkeypatch.setattr(time, "sleep", lambda seconds: None)  # between two tries of a download
        monkeypatch.setattr(fetching, "ANSWER_S", 0.3)
        yield made


def find(asked: str) -> WeightsFile:
    return find_weights(asked, note=lambda text: None)


def refused(asked: str) -> str:
    with pytest.raises(WeightsMissing) as refusal:
        find(asked)
    return str(refusal.value)


def test_a_repository_is_fetched_with_its_settings_and_only_once(hub: FakeHub) -> None:
    told: list[str] = []
    weights = find_weights(TOWER, note=told.append)
    assert (weights.repository, weights.revision, weights.licence) == (TOWER, COMMIT, "apache-2.0")
    assert {one.name for one in weights.file.parent.iterdir()} == set(hub.repositories[TOWER].files)
    assert read_pretrained(weights.file).geometry.depth == 2
    assert told == [f"fetching {TOWER}", f"weights: {TOWER} at {COMMIT}; licence: apache-2.0"]
    hub.asked.clear()
    assert find(TOWER) == weights
    assert hub.asked == [f"GET /api/models/{TOWER}"]


def test_a_hub_that_answers_slowly_is_waited_for(hub: FakeHub) -> None:
    hub.repositories[TOWER].pause_s = 0.02
    weights = find_weights(TOWER, note=lambda said: None)
    assert weights.file.read_bytes() == hub.repositories[TOWER].files["model.safetensors"]


def test_what_is_in_the_cache_needs_no_hub(hub: FakeHub) -> None:
    fetched, told = find(TOWER), list[str]()
    hub.mute = True
    assert find_weights(TOWER, note=told.append).file == fetched.file
    assert told[0] == f"the Hub does not answer: {TOWER} is taken from the cache"


def test_a_pinned_backbone_in_the_cache_asks_nothing(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = read_pretrained(find(TOWER).file).sha256
    pinned = replace(FIRST, repository=TOWER, revision=COMMIT, sha256=digest)
    monkeypatch.setattr(known, "KNOWN", (pinned,))
    hub.asked.clear()
    assert find(FIRST.shown).revision == COMMIT
    assert hub.asked == []
    monkeypatch.setattr(known, "KNOWN", (replace(pinned, sha256="0" * 64),))
    assert "has the SHA-256" in refused(FIRST.shown)


def test_an_index_brings_all_its_files(hub: FakeHub, tmp_path: Path) -> None:
    names = list(made_up())
    folder = tmp_path / "sharded"
    folder.mkdir()
    first, second = (f"model-0000{part}-of-00002.safetensors" for part in (1, 2))
    tensors = made_up()
    write_vit(folder / first, {name: tensors[name] for name in names[::2]})
    write_vit(folder / second, {name: tensors[name] for name in names[1::2]})
    where = {name: (first, second)[index % 2] for index, name in enumerate(names)}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": where}))
    hub.add("somebody/sharded", folder)
    weights = find("somebody/sharded")
    assert weights.file.name == index.name
    assert read_pretrained(weights.file).geometry.depth == 2
    index.write_text(json.dumps({"weight_map": {"a": "../../etc/passwd"}}))
    hub.add("somebody/escaping", folder)
    assert "not safetensors beside it" in refused("somebody/escaping")


def _other_digest(tower: Repository) -> None:
    right = tower.files["model.safetensors"]
    tower.sent["model.safetensors"] = right[:-1] + bytes([right[-1] ^ 1])


def _a_page(tower: Repository) -> None:
    tower.sent["model.safetensors"] = b"<" * len(tower.files["model.safetensors"])


def _broken_off(tower: Repository) -> None:
    tower.cut["model.safetensors"] = 100


def _a_pickle(tower: Repository) -> None:
    del tower.files["model.safetensors"]
    tower.files["pytorch_model.bin"] = b"PK"


def _a_pickle_by_another_name(tower: Repository) -> None:
    tower.files["model.safetensors"] = b"PK\x03\x04 and so on"


def _gated(tower: Repository) -> None:
    tower.token = "hf_ours"


def _hidden(tower: Repository) -> None:
    tower.hidden = True


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (_other_digest, "; it was deleted: check HF_ENDPOINT and the proxy, and try again"),
        (_a_page, "is not safetensors: it begins with <<<<<<<<<"),
        (_broken_off, f"the download of {TOWER} broke off: try again, or put model.safetensors"),
        (_a_pickle, f"{TOWER} has pickles only, which can run programs when they are read"),
        (_a_pickle_by_another_name, "is not safetensors: it begins with PK"),
        (_gated, f"accept its licence on https://huggingface.co/{TOWER}, and set HF_TOKEN"),
        (_hidden, f"the Hub has no {TOWER}, or hides it without the right HF_TOKEN; "),
    ],
)
def test_a_spoilt_repository_is_one_sentence_and_leaves_nothing_behind(
    hub: FakeHub, spoil: Callable[[Repository], None], sentence: str
) -> None:
    tower = hub.repositories[TOWER]
    before = replace(tower, files=dict(tower.files), sent={}, cut={})
    spoil(tower)
    assert sentence in refused(TOWER)
    hub.repositories[TOWER] = before
    assert read_pretrained(find(TOWER).file).geometry.depth == 2


def test_a_gated_repository_opens_to_its_token(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    _gated(hub.repositories[TOWER])
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    assert "asks for a login" in refused(TOWER)
    monkeypatch.setenv("HF_TOKEN", "hf_ours")
    assert find(TOWER).repository == TOWER


def test_a_hub_that_never_answers_costs_seconds_and_names_the_place_by_hand(hub: FakeHub) -> None:
    hub.mute = True
    sentence = refused(TOWER)
    place = place_for(known.KnownBackbone(repository=TOWER))
    assert sentence.startswith(f"the Hub does not answer, and {TOWER} is not in the cache: put ")
    assert f"https://huggingface.co/{TOWER}/tree/main into {place}" in sentence
    place.mkdir(parents=True)
    for name, data in hub.repositories[TOWER].files.items():
        (place / name).write_bytes(data)
    assert find(TOWER).file == place / "model.safetensors"


def test_weights_put_by_hand_where_others_may_write_are_refused(hub: FakeHub) -> None:
    place = place_for(known.KnownBackbone(repository=TOWER))
    place.mkdir(parents=True)
    (place / "model.safetensors").write_bytes(hub.repositories[TOWER].files["model.safetensors"])
    place.chmod(0o777)
    with pytest.raises(NotPrivate, match="others may write it"):
        find(TOWER)


def test_without_a_network_the_sentence_says_why(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert refused(TOWER).startswith(f"HF_HUB_OFFLINE is set, and {TOWER} is not in the cache")
    assert hub.asked == []


def test_a_page_that_answers_for_the_hub_is_told(hub: FakeHub) -> None:
    hub.portal = True
    assert "does not answer as the Hugging Face Hub does: check HF_ENDPOINT" in refused(TOWER)


@pytest.mark.filterwarnings("ignore:Not enough free disk space")
def test_a_full_disk_is_told_and_a_larger_one_goes_on(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "large").mkdir()
    write_vit(tmp_path / "large/model.safetensors")
    hub.add("somebody/large", tmp_path / "large")
    with small_disk(tmp_path / "small", kib=100) as disk:
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(disk))
        assert refused("somebody/large").endswith("could not be fetched: the disk is full")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf/hub"))
    assert find("somebody/large").file.is_file()


def test_a_name_is_told_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert backbone_named("dinov2-small") is FIRST
    assert backbone_named("facebook/dinov2-small") is FIRST
    assert backbone_named("a/b") == known.KnownBackbone(repository="a/b")
    (tmp_path / "a").mkdir()
    (tmp_path / "a/b").touch()
    for file in ("a/b", "a/b.safetensors", "../up", "a/b/c", "model.bin"):
        assert backbone_named(file) is None
    with pytest.raises(WrongUsage, match="did you mean dinov2-small or "):
        backbone_named("dino-v2-smal")


def test_a_wrong_name_is_told_with_the_nearest_ones(dne_train: Command, letters: Path) -> None:
    assert dne_train("add-task", "--data", letters, "--pretrained", "vit-tny") == 2
    assert "--pretrained vit-tny is neither a file nor a known backbone" in dne_train.err
    assert "did you mean vit-tiny" in dne_train.err


def test_the_version_records_where_its_weights_are_from(
    hub: FakeHub, dne_train: Command, letters: Path
) -> None:
    know_machine()
    assert dne_train("add-task", "--data", letters, "--pretrained", TOWER, "--quick") == 0, (
        dne_train.err
    )
    assert f"weights: {TOWER} at {COMMIT}; licence: apache-2.0" in dne_train.err
    training = Store.open(str(dne_train.store)).manifest(1).tasks[0].training
    assert training["pretrained_from"] == TOWER
    assert training["pretrained_revision"] == COMMIT
    assert training["pretrained_licence"] == "apache-2.0"
    assert training["pretrained"] == read_pretrained(find(TOWER).file).sha256


def test_backbones_are_listed_with_what_is_here(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(commands, "KNOWN", (replace(FIRST, repository=TOWER, revision=None),))
    assert main(["backbones"]) == 0
    assert "dinov2-small  88 MB     11.2   apache-2.0  -     photos" in capsys.readouterr().out
    place_for(FIRST).mkdir(parents=True)
    weights = hub.repositories[TOWER].files["model.safetensors"]
    (place_for(FIRST) / "model.safetensors").write_bytes(weights)
    assert main(["backbones", "--json"]) == 0
    [listed] = json.loads(capsys.readouterr().out)["backbones"]
    assert (listed["name"], listed["cached"]) == ("dinov2-small", True)


@pytest.mark.long
@pytest.mark.skipif(not REAL.exists(), reason="THE REAL WEIGHTS WERE NOT FETCHED: no shared data")
def test_real_weights_come_by_name(
    hub: FakeHub, dne_train: Command, letters: Path, tmp_path: Path
) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real/model.safetensors").symlink_to(REAL)
    hub.add("timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k", tmp_path / "real")
    added = dne_train(
        "add-task", "--data", letters, "--pretrained", "vit-tiny", "--image-size", 32, "--quick"
    )
    assert added == 0, dne_train.err
    training = Store.open(str(dne_train.store)).manifest(1).tasks[0].training
    assert str(training["pretrained"]).startswith("e5e15964")
