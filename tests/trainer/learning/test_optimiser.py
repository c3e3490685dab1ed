from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.model_store.networks import grown
from tests.trainer.folders import SIZES, write_classes
from trainer.learning.fit import AdamW, muon, orthogonalised


def test_steps_have_the_bits_of_the_optimiser_of_torch() -> None:
    torch.manual_seed(0)
    ours = [torch.nn.Parameter(torch.randn(3, 4)), torch.nn.Parameter(torch.randn(5))]
    theirs = copy.deepcopy(ours)
    optimisers = [
        AdamW(groups_of(ours), lr=1e-2),
        torch.optim.AdamW(groups_of(theirs), lr=1e-2, fused=True),
    ]
    for rate in (1e-2, 3e-3, 1e-3):
        gradients = [torch.randn_like(one) for one in ours]
        for optimiser, parameters in zip(optimisers, (ours, theirs), strict=True):
            for one, gradient in zip(parameters, gradients, strict=True):
                one.grad = gradient.clone()
            for group in optimiser.param_groups:
                group["lr"] = rate
            optimiser.step()
    assert all(map(torch.equal, ours, theirs))


def groups_of(parameters: list[torch.nn.Parameter]) -> list[dict[str, object]]:
    return [{"params": [one], "weight_decay": 0.05 * one.ndim} for one in parameters]


@pytest.mark.parametrize("shape", [(3, 24, 12), (2, 40, 8), (2, 8, 40)])
def test_singular_values_of_steps_are_near_1(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonalised(torch.randn(shape)))
    assert values.min() > 0.3
    assert values.max() < 1.3


def test_a_step_turns_matrices_and_leaves_the_rest_to_adamw() -> None:
    torch.manual_seed(0)
    network = grown([2, 1])
    before = {name: one.detach().clone() for name, one in network.named_parameters()}
    optimiser = muon()(network, network.learnable(), 1e-3)
    for one in network.learnable():
        one.grad = torch.randn_like(one)
    optimiser.step()
    moved = {name: (one.detach() - before[name]) for name, one in network.named_parameters()}
    for part in moved["experts.1.blocks.0.attention.qkv.weight"].chunk(3):
        lengths = torch.linalg.svdvals(part) / 1e-3
        assert 0.5 < lengths.median() < 1.3
        assert lengths.max() < 1.3
    plain = moved["experts.1.token"].abs()
    torch.testing.assert_close(plain, torch.full_like(plain, 1e-3), rtol=0.01, atol=1e-5)
    assert not moved["experts.0.blocks.0.attention.qkv.weight"].any()


def test_parameters_that_came_from_a_file_are_left_to_adamw() -> None:
    network = grown([2])
    optimiser = muon(slow=network.newest.learnable())(network, network.learnable(), 1e-3)
    assert not any("parts" in group for group in optimiser.param_groups)


@pytest.mark.long
def test_a_task_is_learnt_without_the_compiler_of_torch(tmp_path: Path) -> None:
    """The compiler's import takes two seconds of every command."""
    code = (
        "import sys\n"
        "from trainer.cli import main\n"
        "code = main(sys.argv[1:])\n"
        "print(code, 'torch._dynamo' in sys.modules)\n"
    )
    data = write_classes(tmp_path / "letters", ["a", "b"])
    options = [*map(str, SIZES), "--epochs", "1", "--store", str(tmp_path / "models")]
    done = subprocess.run(
        [sys.executable, "-c", code, "add-task", "--data", str(data), *options],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "0 False", done.stderr
