"""Time a step of learning when the older experts are frozen, beside one in which all learn."""

from __future__ import annotations

import statistics
import time

import torch

from benchmarks.figures import Figure, at_most
from model_store.inference.forward import Lineage
from model_store.network.network import Network
from model_store.spec import ExpertSpec, TaskSpec
from trainer.learning.fit import AdamW, parameter_groups
from trainer.learning.losses import Objective, Teacher, cross_entropy
from trainer.request import NetworkShape

STEP_BATCH = 32


def measure_steps(rounds: int = 7) -> tuple[list[Figure], dict[str, float]]:
    """A step for task 6 of the `paper` preset, one thread, processor time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    network, teacher = _grown_network(tasks=6)
    took_ms: dict[str, list[float]] = {"older experts frozen": [], "all experts train": []}
    for number in range(rounds + 1):
        for name in took_ms:
            spent_ms = _time_step(network, teacher, everything=name == "all experts train")
            if number:  # the first one warms up
                took_ms[name].append(spent_ms)
    torch.set_num_threads(threads)
    medians = {name: statistics.median(times) for name, times in took_ms.items()}
    ratio = medians["older experts frozen"] / medians["all experts train"]
    return [at_most("a step for task 6, in steps where all experts train", ratio, 0.5)], {
        f"ms of a step, {name}": value for name, value in medians.items()
    }


def _grown_network(*, tasks: int) -> tuple[Network, Teacher]:
    """After its last expansion, and the parent's classifier from before it."""
    torch.manual_seed(0)
    shape = NetworkShape(preset="paper")
    network = Network(shape.first_network())
    for index in range(tasks):
        teacher = Teacher(heads=network.heads, classes=len(network.spec.classes))
        heads = shape.heads_of_later(images=0) if index else shape.heads_of_first()
        classes = tuple(f"class {index}.{number}" for number in range(10))
        network.expand(
            TaskSpec(name=f"task {index}", classes=classes, expert=ExpertSpec(heads=heads))
        )
    return network, teacher


def _time_step(network: Network, teacher: Teacher, *, everything: bool) -> float:
    """The trainer's own objective and optimiser; only what learns differs."""
    *older, _ = network.experts
    for expert in older:
        expert.requires_grad_(everything)
    parameters = list(network.parameters()) if everything else network.learnable()
    size = network.spec.image_size
    images = torch.randn(STEP_BATCH, 3, size, size)
    labels = torch.randint(len(network.spec.classes), (STEP_BATCH,))
    objective = Objective(
        classification=cross_entropy,
        teacher=teacher,
        auxiliary=network.auxiliary_head(),
        frozen=None if everything else Lineage.of(network, experts=len(older)),
    )
    optimiser = AdamW(parameter_groups(network, parameters), lr=1e-6)
    began_s = time.process_time()
    step = objective(network, images, labels)
    step.loss.backward()  # type: ignore[no-untyped-call]
    optimiser.step()
    spent_s = time.process_time() - began_s
    network.zero_grad(set_to_none=True)
    return 1000 * spent_s
