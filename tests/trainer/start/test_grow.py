"""A network that grows after its quick version: adapted, by request or by itself."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch

from model_store import worth
from model_store.codec import load_network
from model_store.errors import DataRejected, Interrupted, WrongUsage
from model_store.inference.forward import FoldedNetwork
from model_store.loop.describe import describe_job
from model_store.loop.jobs import Jobs
from model_store.records.describe import change
from model_store.records.manifest import Manifest, delta_of
from model_store.records.quality import Gate
from model_store.store.store import Store
from tests.trainer.command import Command
from tests.trainer.folders import Listening, asked, write_classes
from tests.trainer.start.pretrained_start import EFFORT, first, later, network_of, run
from trainer.evaluation.gate import GateInput, decide
from trainer.evaluation.judged import Judged
from trainer.grow import NothingToDeepen, deepen
from trainer.loop.worker import Worker
from trainer.request import AddTask, Deepen, GateLimits, NetworkShape
from trainer.versions.outcome import Outcome

ANY_GAIN = GateLimits(min_gain=0, max_drop=1)


@pytest.fixture
def earns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take every change for a gain: classes of tests are too easy for a true one."""
    monkeypatch.setattr("trainer.evaluation.gate.LIKELY", 1.0)
    monkeypatch.setattr("trainer.evaluation.gate._beats_its_rival", lambda one: 1.0 * one.right_N)


@pytest.fixture
def promising(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every task look as if there was much to win."""
    monkeypatch.setattr(worth, "ENOUGH", {"narrow": 1.1, "wide": 1.1})


def head_of(store: Path) -> int:
    head = Store.open(str(store)).head("production")
    assert head is not None
    return head.target


def adapted(store: Path, data: Path, vit: Path, **others: object) -> Outcome:
    return run(first(store, data, vit, grow="adapt", limits=ANY_GAIN, **others))


def logits_of(store: Path, manifest: Manifest) -> torch.Tensor:
    network = load_network(Store.open(str(store)).read_shard, manifest)
    pixels = torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return FoldedNetwork.of(network)(pixels)


@pytest.mark.usefixtures("earns")
def test_the_quick_version_is_promoted_before_the_first_expert_is_adapted(
    store: Path, letters: Path, vit: Path
) -> None:
    outcome = adapted(store, letters, vit)
    assert outcome.promoted
    assert outcome.deeper is not None
    quick, child = outcome.manifest, outcome.deeper.manifest
    assert (quick.version, child.version, child.parent) == (1, 2, 1)
    assert child.adapted
    assert child.new_classes == ()
    assert child.classes == quick.classes
    assert [ref.kind for ref in delta_of(child, quick)] == ["expert", "classifier"]
    assert outcome.deeper.promoted
    assert head_of(store) == 2
    assert change(child, quick) == "adapted the first expert to a, b, c"
    assert outcome.as_json()["deeper"]["adapted"] is True


@pytest.mark.usefixtures("earns")
def test_an_adapted_version_keeps_images_and_renews_statistics(
    store: Path, letters: Path, vit: Path
) -> None:
    outcome = adapted(store, letters, vit)
    assert outcome.deeper is not None
    quick, child = outcome.manifest, outcome.deeper.manifest
    assert (child.memory, child.held_out) == (quick.memory, quick.held_out)
    for old, new in zip(quick.statistics, child.statistics, strict=True):
        assert (old.class_name, old.count) == (new.class_name, new.count)
        assert old.shard.sha256 != new.shard.sha256


@pytest.mark.usefixtures("earns")
def test_older_versions_keep_their_expert_to_the_bit(store: Path, letters: Path, vit: Path) -> None:
    run(first(store, letters, vit, grow="quick"))
    quick = Store.open(str(store)).manifest(1)
    before = logits_of(store, quick)
    outcome = run(later(store, letters, grow="adapt", limits=ANY_GAIN))
    assert outcome.manifest.adapted
    assert Store.open(str(store)).manifest(1) == quick
    assert torch.equal(logits_of(store, quick), before)
    assert outcome.manifest.experts != quick.experts


@pytest.mark.usefixtures("earns")
def test_forecast_and_outcome_say_that_an_adaptation_costs_a_backbone(
    store: Path, letters: Path, vit: Path
) -> None:
    outcome = adapted(store, letters, vit)
    assert outcome.deeper is not None
    facts, quick = outcome.deeper.as_json(), outcome.manifest
    assert facts["delta_bytes"] == facts["total_bytes"]
    assert facts["forecast"]["delta_bytes"] == pytest.approx(facts["delta_bytes"], rel=0.01)
    assert facts["forecast"]["version"]["gflop"] == facts["forecast"]["parent"]["gflop"]
    assert facts["total_bytes"] == pytest.approx(
        sum(ref.bytes for ref in quick.model_shards), rel=0.01
    )


@pytest.mark.usefixtures("earns")
def test_a_task_after_an_adaptation_is_quick_again(
    store: Path, letters: Path, digits: Path, vit: Path
) -> None:
    before = adapted(store, letters, vit).deeper
    assert before is not None
    outcome = run(later(store, digits, grow="quick"))
    child = outcome.manifest
    assert child.experts == before.manifest.experts
    assert not child.adapted
    assert child.statistics[:3] == before.manifest.statistics
    assert child.new_classes == ("0", "1")


@pytest.mark.usefixtures("earns")
def test_a_later_task_adapts_the_first_expert_in_its_place(begun: Path, digits: Path) -> None:
    outcome = run(later(begun, digits, grow="adapt", limits=ANY_GAIN))
    assert outcome.deeper is not None
    child = outcome.deeper.manifest
    assert child.adapted
    assert child.classes == ("a", "b", "c", "0", "1")
    assert network_of(begun, child).spec == network_of(begun, outcome.manifest).spec
    assert {one.class_name for one in child.statistics} == set(child.classes)


@pytest.mark.usefixtures("earns")
@pytest.mark.parametrize("memory", [5, "statistics"])
def test_statistics_of_lost_images_are_carried_over(
    store: Path, letters: Path, digits: Path, vit: Path, memory: int | str
) -> None:
    begin = run(first(store, letters, vit, grow="quick", memory=memory)).manifest
    outcome = run(later(store, digits, grow="adapt", limits=ANY_GAIN, memory=memory))
    assert outcome.deeper is not None
    child = outcome.deeper.manifest
    counts = {one.class_name: one.count for one in child.statistics}
    assert counts == {
        one.class_name: one.count for one in (*begin.statistics, *outcome.manifest.statistics)
    }
    old = {one.class_name: one.shard for one in begin.statistics}
    assert all(old.get(one.class_name) != one.shard for one in child.statistics)
    assert np.isfinite(logits_of(store, child).numpy()).all()


def test_an_adaptation_that_earns_nothing_is_published_and_left(
    store: Path, letters: Path, vit: Path
) -> None:
    outcome = run(first(store, letters, vit, grow="adapt"))
    assert outcome.deeper is not None
    assert outcome.deeper.refused is not None
    assert "does not earn its cost" in outcome.deeper.refused
    assert outcome.any_refused == outcome.deeper.refused
    assert head_of(store) == 1


@pytest.mark.usefixtures("promising")
def test_by_itself_a_network_is_adapted_where_there_is_much_to_win(
    store: Path, letters: Path, vit: Path
) -> None:
    progress = Listening()
    outcome = run(first(store, letters, vit), progress=progress)
    assert outcome.deeper is not None
    assert outcome.deeper.manifest.adapted
    assert any("usually gains" in note for note in progress.notes)
    assert outcome.deeper.refused is not None
    assert outcome.any_refused is None  # nobody has asked for it


def test_by_itself_a_network_stays_where_there_is_nothing_to_win(
    store: Path, letters: Path, vit: Path
) -> None:
    progress = Listening()
    outcome = run(first(store, letters, vit), progress=progress)
    assert outcome.deeper is None
    assert not any("usually gains" in note for note in progress.notes)
    assert Store.open(str(store)).versions() == [1]


@pytest.mark.usefixtures("promising")
def test_a_quick_task_says_what_could_be_won(store: Path, letters: Path, vit: Path) -> None:
    progress = Listening()
    outcome = run(first(store, letters, vit, grow="quick"), progress=progress)
    assert outcome.deeper is None
    assert any("`--grow adapt` does it" in note for note in progress.notes)


@pytest.mark.usefixtures("promising")
@pytest.mark.parametrize("memory", [5, "statistics"])
def test_by_itself_a_network_is_not_adapted_at_the_cost_of_classes_without_images(
    store: Path, letters: Path, tmp_path: Path, vit: Path, memory: int | str
) -> None:
    run(first(store, letters, vit, grow="quick", memory=memory))
    signs = write_classes(tmp_path / "signs", ["plus", "minus"], images=30)
    progress = Listening()
    outcome = run(later(store, signs, memory=memory), progress=progress)
    assert outcome.deeper is None
    assert any("at the cost of 3 classes" in note for note in progress.notes)


@pytest.mark.usefixtures("earns")
def test_a_run_that_was_killed_between_the_versions_goes_on(
    store: Path, letters: Path, vit: Path, tmp_path: Path
) -> None:
    request = first(
        store, letters, vit, grow="adapt", limits=ANY_GAIN, checkpoint=tmp_path / "kept"
    )
    with pytest.raises(Interrupted):
        run(request, progress=Listening(interrupt_in="adapting", after=2))
    assert head_of(store) == 1  # the best so far serves
    progress = Listening()
    outcome = run(request, progress=progress)
    assert outcome.manifest.adapted
    assert outcome.manifest.version == 2
    assert any("adapting to them is next" in note for note in progress.notes)
    assert outcome.any_refused is None
    whole = run(first(tmp_path / "whole", letters, vit, grow="adapt", limits=ANY_GAIN)).deeper
    assert whole is not None
    assert outcome.manifest.experts == whole.manifest.experts  # to the bit


@pytest.mark.usefixtures("earns")
def test_a_run_that_was_killed_after_it_had_adapted_adapts_nothing_again(
    store: Path, letters: Path, vit: Path, tmp_path: Path
) -> None:
    request = first(
        store, letters, vit, grow="adapt", limits=ANY_GAIN, checkpoint=tmp_path / "kept"
    )
    run(first(store, letters, vit, grow="quick"))
    with pytest.raises(Interrupted):
        run(request, progress=Listening(interrupt_in="reading embeddings"))
    progress = Listening()
    outcome = run(request, progress=progress)
    assert outcome.manifest.adapted
    assert "adapting" not in progress.phases


@pytest.mark.usefixtures("promising")
def test_what_was_grown_and_refused_is_not_grown_again(
    store: Path, letters: Path, vit: Path
) -> None:
    run(first(store, letters, vit))
    assert Store.open(str(store)).versions() == [1, 2]
    with pytest.raises(WrongUsage):
        run(first(store, letters, vit))
    assert Store.open(str(store)).versions() == [1, 2]


@pytest.mark.usefixtures("earns")
def test_classes_that_the_network_was_adapted_to_have_a_price_too(
    store: Path, letters: Path, digits: Path, vit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapted(store, letters, vit)
    seen: list[GateInput] = []

    def listening(candidate: GateInput, *, limits: GateLimits) -> Gate:
        seen.append(candidate)
        return decide(candidate, limits=limits)

    monkeypatch.setattr("trainer.versions.assess.decide", listening)
    run(later(store, digits, grow="quick"))
    images = sum(entry.count for entry in Store.open(str(store)).manifest(2).memory)
    assert 0 < seen[0].price.images <= images


def refusing_quick_versions(candidate: GateInput, *, limits: GateLimits) -> Gate:
    gate = decide(candidate, limits=limits)
    if candidate.deepens:
        return gate
    return gate.model_copy(update={"passed": False, "reasons": ("old classes fell",)})


@pytest.mark.usefixtures("earns", "promising")
def test_a_refused_quick_version_is_adapted_and_then_compared_with_what_serves(
    begun: Path, digits: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[GateInput] = []

    def listening(candidate: GateInput, *, limits: GateLimits) -> Gate:
        seen.append(candidate)
        return refusing_quick_versions(candidate, limits=limits)

    monkeypatch.setattr("trainer.versions.assess.decide", listening)
    outcome = run(later(begun, digits, limits=ANY_GAIN))
    assert outcome.refused is not None
    assert outcome.deeper is not None
    assert outcome.deeper.promoted
    assert outcome.any_refused is None
    assert head_of(begun) == 3
    assert seen[0].served is None
    assert seen[1].served is not None
    assert seen[1].served_classes == ("a", "b", "c")


def test_an_adaptation_that_forgets_what_serves_is_refused() -> None:
    names = ("a", "b")
    labels = np.repeat([0, 1], 40)
    right = np.eye(2, dtype=np.float32)[labels] * 4
    served = Judged(classes=names, labels_N=labels, logits_NC=right)
    forgets = Judged(classes=names, labels_N=labels, logits_NC=right * [1, -1] + [1, 0])
    bad = Judged(classes=names, labels_N=labels, logits_NC=-right)
    candidate = GateInput(
        judged=forgets,
        parent=bad,
        older=names,
        newest=names,
        model_bytes=0,
        deepens=True,
        slower=False,
    )
    assert decide(candidate, limits=GateLimits()).passed
    gate = decide(replace(candidate, served=served, served_classes=names), limits=GateLimits())
    assert not gate.passed
    assert "accuracy on old classes fell" in gate.reasons[0]


@pytest.mark.usefixtures("earns")
def test_a_rollback_goes_back_over_an_adaptation_and_the_next_task_builds_on_it(
    store: Path, letters: Path, digits: Path, vit: Path
) -> None:
    adapted(store, letters, vit)
    opened = Store.open(str(store))
    opened.rollback(channel="production", to=None, actor="tests", reason="")
    assert head_of(store) == 1
    child = run(later(store, digits, grow="quick")).manifest
    assert child.parent == 1
    assert child.experts == opened.manifest(1).experts


def test_an_expert_that_others_read_is_not_adapted(
    begun: Path, digits: Path, tmp_path: Path
) -> None:
    run(later(begun, digits, grow="expert", limits=GateLimits(force=True)))
    signs = write_classes(tmp_path / "signs", ["plus", "minus"])
    with pytest.raises(WrongUsage, match="has an expert that reads the first one"):
        run(later(begun, signs, grow="adapt"))


@pytest.mark.parametrize("images", [1, 2])
@pytest.mark.usefixtures("earns")
def test_few_images_are_adapted_to_as_well(
    store: Path, tmp_path: Path, vit: Path, images: int
) -> None:
    data = write_classes(tmp_path / "few", ["a", "b"], images=max(2, images))
    outcome = adapted(store, data, vit)
    assert outcome.deeper is not None
    assert outcome.deeper.refused is not None  # nothing was held out, so nothing shows a gain
    assert "was not judged" in outcome.deeper.refused


@pytest.mark.usefixtures("earns")
def test_one_class_has_nothing_to_adapt_to(store: Path, tmp_path: Path, vit: Path) -> None:
    outcome = adapted(store, write_classes(tmp_path / "one", ["a"]), vit)
    assert outcome.promoted
    assert outcome.deeper is None


def test_options_that_do_not_fit_are_refused(begun: Path, digits: Path, store: Path) -> None:
    with pytest.raises(
        WrongUsage, match="`quick=True` is `grow=quick`: `grow=adapt` does not fit it"
    ):
        later(begun, digits, quick=True, grow="adapt")
    with pytest.raises(WrongUsage, match="`grow` does not fit it"):
        later(begun, digits, extend=True, grow="adapt")
    plain = asked(begun.parent / "plain", digits, grow="adapt", shape=NetworkShape(preset="tiny"))
    with pytest.raises(WrongUsage, match="`grow=adapt` is for a model with a pre-trained start"):
        run(plain)


def deepened(store: Path, **others: object) -> Outcome:
    request = {"store": str(store), "effort": EFFORT, "device": "cpu", **others}
    return deepen(Deepen(**request), progress=Listening())  # type: ignore[arg-type]


@pytest.mark.usefixtures("earns")
def test_a_deepening_adapts_the_first_expert_to_all_classes_that_are_there(
    begun: Path, digits: Path
) -> None:
    parent = run(later(begun, digits, grow="quick")).manifest
    child = deepened(begun, limits=ANY_GAIN).manifest
    assert child.adapted
    assert child.classes == parent.classes
    assert (child.memory, child.held_out) == (parent.memory, parent.held_out)
    with pytest.raises(NothingToDeepen, match="no task was added since version 3 was adapted"):
        deepened(begun, if_needed=True)
    again = deepened(begun, limits=ANY_GAIN).manifest  # nobody forbids it
    assert again.parent == child.version


def test_a_refused_adaptation_is_not_tried_again_by_the_clock(begun: Path, digits: Path) -> None:
    run(later(begun, digits, grow="quick"))
    assert deepened(begun).refused is not None
    with pytest.raises(NothingToDeepen, match="version 3 was adapted to these tasks"):
        deepened(begun, if_needed=True)


def work(store: Path) -> dict[str, Any]:
    """Run a job that asks to grow, as `dne-train worker --once` does, and describe its end."""
    opened = Store.open(str(store))
    jobs = Jobs(opened.objects)
    job = jobs.ask(channel="production", actor="tests", reason="", kind="grow").id
    request = asked(store, Path("inbox"), effort=EFFORT, limits=ANY_GAIN)
    Worker(request, progress=Listening()).run(once=True, poll_s=0.01, stop=Event())
    return describe_job(jobs.job(job), opened)


@pytest.mark.usefixtures("earns", "promising")
def test_a_job_adapts_the_version_that_a_page_proposes_to_adapt(begun: Path, digits: Path) -> None:
    opened = Store.open(str(begun))
    quick = run(later(begun, digits, grow="quick")).manifest
    said = worth.proposal(opened, quick)
    assert said is not None
    assert "adapting the first expert to these 5 classes takes about" in str(said)
    facts = work(begun)
    assert (facts["state"], facts["before"]) == ("promoted", 2)
    child = opened.manifest(3)
    assert child.adapted
    assert head_of(begun) == 3
    assert worth.proposal(opened, child) is None
    facts = work(begun)
    assert facts["state"] == "failed"
    assert "no task was added since version 3 was adapted" in facts["said"]


@pytest.mark.usefixtures("promising")
def test_nothing_is_proposed_again_that_was_refused(begun: Path, digits: Path) -> None:
    opened = Store.open(str(begun))
    quick = run(later(begun, digits, grow="quick")).manifest
    assert deepened(begun).refused is not None
    assert worth.proposed(quick) is not None
    assert worth.proposal(opened, quick) is None


@pytest.mark.usefixtures("promising")
@pytest.mark.parametrize("memory", [5, "statistics"])
def test_nothing_is_proposed_without_images_to_do_it_with(
    store: Path, letters: Path, vit: Path, memory: int | str
) -> None:
    quick = run(first(store, letters, vit, grow="quick", memory=memory)).manifest
    assert worth.proposal(Store.open(str(store)), quick) is None


def test_without_images_of_two_classes_nothing_is_adapted(begun: Path, digits: Path) -> None:
    run(later(begun, digits, grow="quick", memory=0))
    with pytest.raises(DataRejected, match="images of fewer than two classes"):
        deepened(begun)


def test_an_expert_that_others_read_gets_another_one_beside_it(
    begun: Path, digits: Path, tmp_path: Path
) -> None:
    run(later(begun, digits, grow="expert", limits=GateLimits(force=True)))
    signs = write_classes(tmp_path / "signs", ["plus", "minus"])
    run(later(begun, signs, grow="quick"))
    child = deepened(begun).manifest
    assert child.deepened == ("signs",)
    with pytest.raises(WrongUsage, match="has an expert that reads the first one"):
        deepened(begun, kind="adapter")


@pytest.mark.parametrize(
    ("quick", "grow", "growth"),
    [
        (None, None, "auto"),
        (True, None, "quick"),
        (False, None, "expert"),
        (None, "adapt", "adapt"),
    ],
)
def test_quick_is_a_spelling_of_grow(
    begun: Path, digits: Path, quick: bool | None, grow: str | None, growth: str
) -> None:
    request: AddTask = later(begun, digits, quick=quick, grow=grow)
    assert request.growth == growth


def test_the_command_ends_with_3_only_if_growing_was_asked_for(
    begun: Path,
    digits: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worth, "ENOUGH", {"narrow": 1.1, "wide": 1.1})
    command = Command(begun, capsys)
    assert command("add-task", "--data", digits, "--epochs", 1, "--json") == 0
    facts = json.loads(command.out)
    assert facts["deeper"]["adapted"]
    assert facts["deeper"]["refused"]
    signs = write_classes(tmp_path / "signs", ["plus", "minus"])
    assert command("add-task", "--data", signs, "--epochs", 1, "--grow", "adapt") == 3
    assert "adapted:" in command.out
    assert EFFORT.epochs
