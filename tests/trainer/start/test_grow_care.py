"""Kills between the versions of a task, few images, mixed domains, ways back: nothing is lost."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from model_store import worth
from model_store.errors import DataRejected
from model_store.records.manifest import Draft, Manifest
from model_store.store.store import Store
from model_store.worth import proposal
from tests.trainer.folders import Listening, write_classes
from tests.trainer.start.pretrained_start import EFFORT, first, later, network_of, run
from tests.trainer.start.test_grow import ANY_GAIN, head_of, logits_of
from trainer.grow import deepen
from trainer.request import Deepen, GateLimits, Growth
from trainer.versions import one_version
from trainer.versions.outcome import Outcome

FORCED = GateLimits(force=True)
SEALED = {"version", "digest", "signature"}


class Killed(BaseException):
    """Ends a run as a kill does: nothing of it runs any more."""


@pytest.fixture(autouse=True)
def _earns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take every change for a gain: classes of tests are too easy for a true one."""
    monkeypatch.setattr("trainer.evaluation.gate.LIKELY", 1.0)
    monkeypatch.setattr("trainer.evaluation.gate._beats_its_rival", lambda one: 1.0 * one.right_N)
    monkeypatch.setattr("trainer.evaluation.gate.SIGNIFICANCE", 1.0)


def killed_at(turn: int, *, promotes: bool) -> Callable[..., str | None]:
    """Promote as a run does, and die before or after a version is promoted."""
    turns, promote = iter(range(1, 10)), one_version._promote

    def promote_and_die(*given: Any, **named: Any) -> str | None:
        dies = next(turns) == turn
        if dies and not promotes:
            raise Killed
        refused = promote(*given, **named)
        if dies:
            raise Killed
        return refused

    return promote_and_die


def opened(store: Path) -> Store:
    return Store.open(str(store))


@pytest.mark.parametrize("grow", ["adapt", "expert"])
@pytest.mark.parametrize(
    ("turn", "promotes", "served"),
    [
        pytest.param(1, False, 1, id="before-the-quick-version-serves"),
        pytest.param(1, True, 2, id="after-the-quick-version-serves"),
        pytest.param(2, False, 2, id="before-the-grown-version-serves"),
    ],
)
def test_the_same_command_goes_on_after_a_kill_and_the_best_so_far_serves(
    begun: Path,
    digits: Path,
    grow: Growth,
    turn: int,
    promotes: bool,
    served: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    request = later(begun, digits, grow=grow, limits=ANY_GAIN)
    with monkeypatch.context() as patched:
        patched.setattr(one_version, "_promote", killed_at(turn, promotes=promotes))
        with pytest.raises(Killed):
            run(request)
    assert head_of(begun) == served
    outcome = run(request)
    assert (outcome.deeper or outcome).promoted
    assert outcome.as_json()["promoted"]
    manifest = opened(begun).manifest(head_of(begun))
    assert manifest.classes == ("a", "b", "c", "0", "1")
    assert manifest.adapted == (grow == "adapt")
    assert manifest.deepened == (("digits",) if grow == "expert" else ())
    grown = [one for one in opened(begun).versions() if _has_grown(opened(begun).manifest(one))]
    assert grown == [head_of(begun)]  # learnt once
    assert not opened(begun).verify().problems
    with pytest.raises(DataRejected, match=r"knows .* already"):
        run(request)


def _has_grown(manifest: Manifest) -> bool:
    return manifest.adapted or bool(manifest.deepened)


@pytest.mark.long
@pytest.mark.faults
def test_a_killed_process_leaves_what_serves_and_the_same_command_adapts(
    store: Path, letters: Path, vit: Path, tmp_path: Path
) -> None:
    kept = tmp_path / "kept"
    options = ["--data", letters, "--pretrained", vit, "--store", store, "--checkpoint", kept]
    effort = ["--grow", "adapt", "--epochs", 60, "--threads", 1, "--device", "cpu"]
    command = [sys.executable, "-m", "trainer", "add-task", *map(str, [*options, *effort])]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        for line in process.stderr:  # of the run that adapts
            if b"adapting:" in line and opened(store).head("production"):
                break
        process.kill()
    assert head_of(store) == 1
    assert not opened(store).verify().problems
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert again.returncode in (0, 3), again.stderr  # 3: so easy classes gain nothing
    assert "version 1 has these images" in again.stderr
    assert opened(store).versions() == [1, 2]
    assert opened(store).manifest(2).adapted


def test_a_version_that_somebody_rolled_back_is_not_promoted_by_the_same_command(
    begun: Path, digits: Path
) -> None:
    request = later(begun, digits, grow="adapt", limits=ANY_GAIN)
    run(request)
    opened(begun).rollback(channel="production", to=None, actor="tests", reason="")
    with pytest.raises(DataRejected, match=r"knows .* already"):
        run(request)
    assert head_of(begun) == 2


@pytest.mark.long
def test_another_domain_is_adapted_to_in_one_lineage_and_older_versions_stay_to_the_bit(
    store: Path, letters: Path, digits: Path, vit: Path
) -> None:
    run(first(store, letters, vit, grow="adapt", limits=ANY_GAIN))
    before = {number: logits_of(store, opened(store).manifest(number)) for number in (1, 2)}
    run(later(store, digits, grow="adapt", limits=ANY_GAIN))
    versions = opened(store).versions()
    assert [opened(store).manifest(one).adapted for one in versions] == [False, True, False, True]
    newest = opened(store).manifest(versions[-1])
    assert {one.class_name for one in newest.statistics} == set(newest.classes)
    assert len({one.experts[0].sha256 for one in map(opened(store).manifest, versions)}) == 3
    for number, logits in before.items():
        assert torch.equal(logits_of(store, opened(store).manifest(number)), logits)


@pytest.mark.long
def test_a_rollback_goes_back_over_every_step_of_growth_to_the_bit(
    store: Path, letters: Path, digits: Path, tmp_path: Path, vit: Path
) -> None:
    run(first(store, letters, vit, grow="adapt", limits=ANY_GAIN))
    run(later(store, digits, grow="expert", limits=FORCED))
    grown = [opened(store).manifest(number) for number in (1, 2, 3, 4)]
    assert [(one.adapted, bool(one.deepened)) for one in grown] == [
        (False, False), (True, False), (False, False), (False, True)
    ]  # fmt: skip
    logits = [logits_of(store, one) for one in grown]
    for manifest, expected in zip(reversed(grown), reversed(logits), strict=True):
        opened(store).rollback(channel="production", to=manifest.version, actor="tests", reason="")
        assert head_of(store) == manifest.version
        assert torch.equal(logits_of(store, opened(store).manifest(manifest.version)), expected)
    opened(store).rollback(channel="production", to=2, actor="tests", reason="")
    signs = write_classes(tmp_path / "signs", ["plus", "minus"])
    child = run(later(store, signs, grow="quick")).manifest
    assert child.experts == grown[1].experts
    assert child.classes == ("a", "b", "c", "minus", "plus")


@pytest.mark.parametrize("readout", ["narrow", "wide"])
def test_both_kinds_of_growth_keep_the_readout_of_the_first_expert(
    store: Path, letters: Path, digits: Path, vit: Path, readout: str
) -> None:
    adapted = run(first(store, letters, vit, readout=readout, grow="adapt", limits=ANY_GAIN)).deeper
    assert adapted is not None
    network = network_of(store, adapted.manifest)
    assert (network.spec.readout is not None) == (readout == "wide")
    grown = run(later(store, digits, grow="expert", limits=FORCED)).deeper
    assert grown is not None
    spec = network_of(store, grown.manifest).spec
    assert spec.readout == network.spec.readout
    assert spec.slice_width(0) == network.spec.slice_width(0)
    assert torch.isfinite(logits_of(store, grown.manifest)).all()


@pytest.mark.parametrize("names", [["0"], ["0", "1"]], ids=["one-class", "two-classes"])
def test_an_expert_learns_from_two_images_a_class(
    begun: Path, tmp_path: Path, names: list[str]
) -> None:
    data = write_classes(tmp_path / "few", names, images=2)
    outcome = run(later(begun, data, grow="expert", limits=FORCED))
    assert outcome.deeper is not None
    assert outcome.deeper.manifest.classes == ("a", "b", "c", *names)
    assert torch.isfinite(logits_of(begun, outcome.deeper.manifest)).all()


def test_where_the_first_expert_cannot_change_another_one_is_proposed_or_nothing(
    begun: Path, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worth, "ENOUGH", {"narrow": 1.1, "wide": 1.1})
    run(later(begun, digits, grow="expert", limits=FORCED))
    signs = write_classes(tmp_path / "signs", ["plus", "minus"], images=30)
    progress = Listening()
    outcome = run(later(begun, signs), progress=progress)
    assert outcome.deeper is None
    assert any("; an expert for these 7 classes" in note for note in progress.notes)
    assert worth.kind_of(outcome.manifest) == "dense"
    assert worth.kind_of(opened(begun).manifest(3)) is None  # its tasks have one


def test_two_images_a_class_stay_quick_by_themselves(
    store: Path, tmp_path: Path, vit: Path
) -> None:
    outcome = run(first(store, write_classes(tmp_path / "few", ["a", "b"], images=2), vit))
    assert outcome.promoted
    assert outcome.deeper is None


def made_before(store: Path) -> Manifest:
    """Publish version 1 again, as software without growth and statistics wrote it."""
    now = opened(store).manifest(1)
    figures = {name: now.tasks[0].training[name] for name in ("images", "pretrained")}
    task = now.tasks[0].model_copy(update={"training": figures})
    update = {"tasks": (task,), "statistics": (), "parent": 1, "parent_digest": now.digest}
    older = now.model_copy(update=update).model_dump(by_alias=True, exclude=SEALED)
    manifest = opened(store).publish(Draft.model_validate(older), shards={})
    opened(store).promote(manifest.version, channel="production", actor="tests", reason="")
    return manifest


@pytest.mark.parametrize("grow", ["auto", "adapt", "expert"])
def test_a_version_made_before_grows_and_nothing_is_proposed_for_it(
    begun: Path, digits: Path, grow: Growth
) -> None:
    older = made_before(begun)
    assert proposal(opened(begun), older) is None
    outcome = run(later(begun, digits, grow=grow, limits=FORCED))
    newest = (outcome.deeper or outcome).manifest
    assert newest.classes == ("a", "b", "c", "0", "1")
    assert (newest.adapted, bool(newest.deepened)) == (grow == "adapt", grow == "expert")


def test_a_version_made_before_is_deepened(begun: Path) -> None:
    made_before(begun)
    request = Deepen(store=str(begun), effort=EFFORT, device="cpu", limits=ANY_GAIN)
    outcome: Outcome = deepen(request, progress=Listening())
    assert outcome.manifest.adapted
