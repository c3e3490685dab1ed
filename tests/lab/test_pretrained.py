"""Methods begin with pre-trained weights, and change those that they say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lab.backbones import Transformer
from lab.cell import start_of
from lab.dataset import Dataset
from lab.method import BalancedSoftmax
from lab.methods.adapter import Adapter
from lab.methods.dne import Dne
from lab.methods.joint import Joint
from lab.methods.lda import Lda
from lab.plain import PlainMethod
from lab.presets import PRESETS
from model_store.errors import WrongUsage
from model_store.network.expert import Expert
from tests.lab.tiny import TINY, assert_same_bits, run_cell, run_killed, tiny_run
from tests.trainer.vit import made_up, write_vit
from trainer.backbones.pretrained import read_pretrained
from trainer.learning.losses import cross_entropy

BEGUN = replace(
    TINY,
    pretrained="vit.safetensors",
    loss="balanced",
    changes="gentle",
    exemplars="random",
    depth=2,
    heads=2,
    first_epochs=1,
    epochs=1,
    fine_epochs=1,
    fine_rate=1e-4,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_vit(tmp_path / "vit.safetensors", made_up(image_size=16, mlp_ratio=4))
    return tmp_path


def backbone_of(method: nn.Module) -> Expert:
    network = method.network
    assert isinstance(network, nn.Module)
    experts = network.experts
    assert isinstance(experts, nn.ModuleList)
    oldest = experts[0]
    assert isinstance(oldest, Expert)
    return oldest


def given_weights(folder: Path) -> dict[str, Tensor]:
    expert = Transformer(BEGUN)
    expert.begin(read_pretrained(folder / "vit.safetensors"))
    return {name: one.clone() for name, one in expert.state_dict().items()}


@pytest.mark.parametrize("choice", ["dne", "dne:network=independent", "lda", "ncm"])
def test_pre_trained_weights_stay_where_experts_or_heads_learn(choice: str, folder: Path) -> None:
    run, lines = run_cell(choice, folder, preset=BEGUN)
    assert [line.classes for line in lines] == [2, 4, 6]
    assert lines[-1].recipe is not None
    assert "vit.safetensors" in lines[-1].recipe
    kept = backbone_of(run.method).state_dict()
    assert all(kept[name].equal(one) for name, one in given_weights(folder).items())
    if isinstance(run.method, Dne):
        assert [one.heads for one in run.method.network.spec.experts] == [2, 1, 1, 1]


@pytest.mark.parametrize(("choice", "lines"), [("adapter", 3), ("joint", 1), ("replay", 3)])
def test_pre_trained_weights_change_where_they_learn(choice: str, lines: int, folder: Path) -> None:
    run, written = run_cell(choice, folder, preset=BEGUN)
    assert len(written) == lines
    kept, given = backbone_of(run.method).state_dict(), given_weights(folder)
    assert kept.keys() == given.keys()  # changes are merged
    assert not kept["blocks.0.widen.weight"].equal(given["blocks.0.widen.weight"])


@pytest.mark.long
@pytest.mark.parametrize(("choice", "phases"), [("dne", 0), ("dne", 2), ("adapter", 1)])
def test_a_killed_cell_goes_on_to_the_same_bits(choice: str, phases: int, tmp_path: Path) -> None:
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
        write_vit(tmp_path / name / "vit.safetensors", made_up(image_size=16, mlp_ratio=4))
    brief = replace(BEGUN, first_epochs=2, epochs=2, fine_epochs=2)
    whole, _ = run_cell(choice, tmp_path / "whole", preset=brief)
    killed = run_killed(choice, tmp_path / "killed", phases=phases, preset=brief)
    assert_same_bits(killed.method, whole.method)
    assert [one.right for one in killed.lines] == [one.right for one in whole.lines]


def test_methods_of_a_preset_are_built_without_its_weights() -> None:
    options: Callable[[type[PlainMethod]], PlainMethod] = lambda one: one(BEGUN, one.options_type())  # noqa: E731
    assert [options(one).base for one in (Adapter, Joint, Lda)] == [None] * 3


def test_other_weights_and_other_starts_are_refused(folder: Path) -> None:
    write_vit(folder / "vit.safetensors", made_up(image_size=16, depth=3, mlp_ratio=4))
    with pytest.raises(WrongUsage, match="not the vision transformer of this preset"):
        tiny_run("lda", folder, preset=BEGUN).go()
    with pytest.raises(WrongUsage, match="adapter changes a pre-trained transformer"):
        tiny_run("adapter", folder).go()
    data = tiny_run("lda", folder, preset=BEGUN).protocol.train
    with pytest.raises(WrongUsage, match="beside an archive"):
        start_of(Dataset(train=data, test=data), BEGUN)


def test_balanced_softmax_adds_the_logarithms_of_counts() -> None:
    logits, labels = torch.randn(5, 3), torch.tensor([0, 1, 2, 2, 1])
    counts = torch.tensor([1.0, 4.0, 10.0])
    weighted = logits.exp() * counts
    expected = -(weighted[range(5), labels] / weighted.sum(dim=1)).log().mean()
    loss = BalancedSoftmax(log_counts_C=counts.log())
    assert float(loss(logits, labels)) == pytest.approx(float(expected), rel=1e-5)


def test_the_loss_is_balanced_from_the_second_task_on(folder: Path) -> None:
    first = tiny_run("ncm", folder, preset=BEGUN)._lesson(0)
    run, _ = run_cell("ncm", folder, preset=BEGUN)
    last = run._lesson(2)
    assert first.classification is cross_entropy
    assert isinstance(last.classification, BalancedSoftmax)
    counts = np.bincount(last.images.labels_N)
    assert last.classification.log_counts_C.exp().numpy() == pytest.approx(counts)
    assert len(set(counts.tolist())) == 2
    plain = replace(last, preset=replace(BEGUN, loss="cross-entropy"))
    assert plain.classification is cross_entropy


@pytest.mark.parametrize("name", ["converged", "signs"])
def test_presets_of_trials_differ_in_their_part(name: str) -> None:
    table, trial = PRESETS[name], PRESETS[f"{name}-trial"]
    assert (table.part, trial.part) == ("table", "trial")
    sizes = {"classes", "first", "step", "memory", "part"}
    assert all(
        getattr(table, name) == getattr(trial, name)
        for name in table.__dataclass_fields__
        if name not in sizes
    )
