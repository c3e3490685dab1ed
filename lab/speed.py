"""Measure how much of a core's time learning spends in forward and backward."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from lab.batches import over_batches
from lab.cell import preprocessing_of
from lab.dataset import Dataset
from lab.method import Lesson, Method
from lab.presets import Preset
from lab.protocol import Memory, Protocol, make_protocol
from lab.registry import Choice
from trainer.data.folders import join
from trainer.learning.checkpoint import Checkpoint
from trainer.learning.losses import AnyLearner, BatchLoss
from trainer.progress import Progress

ROUNDS = 2
"""Epochs of each kind, in turns: a busy neighbour slows both."""


@dataclass(slots=True, kw_only=True)
class Speed:
    """Seconds of one core for equally many images."""

    images: int = 0
    learning_s: float = 0.0
    bare_s: float = 0.0

    @property
    def learning(self) -> float:
        """Count the images a second of learning as a cell does, with all that belongs to it."""
        return self.images / self.learning_s

    @property
    def bare(self) -> float:
        """Count the images a second of forward and backward alone."""
        return self.images / self.bare_s

    @property
    def share(self) -> float:
        return self.bare_s / self.learning_s


class _Measured(Exception):
    """The first phase is measured, and later ones need not be learnt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _TimedLesson(Lesson):
    folder: Path
    speed: Speed = field(default_factory=Speed)

    def fit(
        self, name: str, learner: AnyLearner, loss: BatchLoss[AnyLearner], **others: Any
    ) -> None:
        """Learn epochs, and take as many bare steps after each."""
        _bare_steps(self, learner, loss, steps=1)
        for place in range(ROUNDS):
            # A checkpoint of its own, so that each epoch is learnt and kept.
            checkpoint = Checkpoint(
                self.folder / str(place), configuration={}, progress=self.progress
            )
            one = Lesson(
                **{each: getattr(self, each) for each in Lesson.__dataclass_fields__}
                | {"checkpoint": checkpoint}
            )
            began_s = time.process_time()
            one.fit(name, learner, loss, **{**others, "epochs": 1})
            self.speed.learning_s += time.process_time() - began_s
            steps = -(-len(self.images) // self.preset.batch_size)
            began_s = time.process_time()
            _bare_steps(self, learner, loss, steps=steps)
            self.speed.bare_s += time.process_time() - began_s
            self.speed.images += len(self.images)
        raise _Measured


def _bare_steps(
    lesson: Lesson, learner: AnyLearner, loss: BatchLoss[AnyLearner], *, steps: int
) -> None:
    """Compute gradients of batches that are as large as those of the lesson's epochs."""
    side = lesson.preset.image_size
    epoch_steps = -(-len(lesson.images) // lesson.preset.batch_size)
    size = round(len(lesson.images) / epoch_steps)
    images_BCHW = torch.randn(size, 3, side, side)
    labels_B = torch.randint(lesson.classes, (size,))
    for _ in range(steps):
        for parameter in learner.learnable():
            parameter.grad = None
        loss(learner, images_BCHW, labels_B).loss.backward()  # type: ignore[no-untyped-call]


def measure(choice: Choice, data: Dataset, preset: Preset, *, progress: Progress) -> Speed:
    """Measure the second task. The first one is not learnt: the time does not depend on weights."""
    protocol, method, memory = make_protocol(data, preset, seed=0), choice.build(preset), Memory()
    with TemporaryDirectory() as folder:
        torch.manual_seed(0)
        method.expand(protocol.tasks[0])
        first = _lesson(protocol, memory, preset, task=0, folder=Path(folder), progress=progress)
        _remember(method, memory, first, protocol)
        method.expand(protocol.tasks[1])
        second = _lesson(protocol, memory, preset, task=1, folder=Path(folder), progress=progress)
        try:
            method.learn(second)
        except _Measured:
            return second.speed
    raise AssertionError("the method learns without Lesson.fit")


def _remember(method: Method, memory: Memory, lesson: Lesson, protocol: Protocol) -> None:
    method.requires_grad_(False).eval()
    memory.choose(
        lesson.images,
        names=lesson.new,
        quota=protocol.quota(0),
        features=partial(
            over_batches, function=method.features, preprocessing=lesson.preprocessing
        ),
    )
    method.remember(memory.images(lesson.images.classes), lesson)


def _lesson(
    protocol: Protocol,
    memory: Memory,
    preset: Preset,
    *,
    task: int,
    folder: Path,
    progress: Progress,
) -> _TimedLesson:
    new, kept = protocol.new_images(task), memory.images(protocol.classes_until(task))
    return _TimedLesson(
        task=task,
        new=protocol.tasks[task],
        images=new if kept is None else join(kept, new),
        preset=preset,
        preprocessing=preprocessing_of(preset),
        seed=task,
        progress=progress,
        folder=folder,
    )
