"""Run one cell of a comparison: one method with one seed through all tasks.

A cell that was killed goes on after the last epoch that it finished.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lab import results, saved
from lab.batches import over_batches
from lab.costs import count_flop
from lab.dataset import Dataset
from lab.method import Lesson, Method
from lab.presets import Preset
from lab.protocol import Memory, Protocol, make_protocol
from lab.registry import Choice
from lab.results import Line
from model_store.errors import WrongUsage
from model_store.records.manifest import Preprocessing, Scalar
from model_store.store.cache import cache_folder
from trainer.backbones.pretrained import Pretrained, read_pretrained
from trainer.backbones.shapes import HALF
from trainer.data.folders import LabelledImages, join
from trainer.learning.checkpoint import Checkpoint
from trainer.progress import Progress

MEAN = (0.5071, 0.4865, 0.4409)
DEVIATION = (0.2673, 0.2564, 0.2762)
BASE_SETTINGS = (
    "images", "part", "image_size", "patch_size", "depth", "heads", "resnet_width",
    "first_epochs", "batch_size", "rate", "resnet_rate", "changes", "stem", "optimiser",
)  # fmt: skip
"""The settings that the first task depends on, besides its classes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    choice: Choice
    preset_name: str
    setting: str
    preset: Preset
    """The named preset with the changes of `setting`."""
    seed: int

    def configuration(self) -> dict[str, Scalar]:
        return {
            "method": self.choice.name,
            "variant": self.choice.variant,
            "preset": self.preset_name,
            "setting": self.setting,
            "seed": self.seed,
        }

    def __str__(self) -> str:
        setting = f" {self.setting}" if self.setting else ""
        return f"{self.choice} {self.preset_name}{setting} seed {self.seed}"


class Run:
    """The state of a cell between two tasks."""

    def __init__(
        self,
        cell: Cell,
        data: Dataset,
        *,
        out: Path,
        progress: Progress,
        folder: Path | None = None,
    ) -> None:
        self.cell, self.out, self.progress = cell, out, progress
        self.folder = folder or lab_folder()
        self.protocol: Protocol = make_protocol(data, cell.preset, seed=cell.seed)
        torch.manual_seed(self._seed(0))  # a method may make its backbone before the first task
        self.method: Method = cell.choice.build(cell.preset)
        self.memory = Memory(herds=cell.preset.exemplars == "herded")
        self.start = start_of(data, cell.preset)
        self.lines: list[Line] = []
        self.preprocessing = preprocessing_of(cell.preset)

    def go(self) -> None:
        """Learn all tasks that are not learnt yet, and write a line after each."""
        with saved.only_one(self._state, note=self.progress.note):
            done = self._restore()
            self._write_missing()
            for task in range(done):  # a kill may have come before a checkpoint was removed
                shutil.rmtree(self._checkpoints(task), ignore_errors=True)
            for task in range(done, len(self.protocol.tasks)):
                self._expand(task)
                if self.method.skips(task, of=len(self.protocol.tasks)):
                    continue
                self.progress.note(f"{self.cell}: task {task + 1} of {len(self.protocol.tasks)}")
                self._finish(task)

    def _finish(self, task: int) -> None:
        lesson = self._lesson(task)
        line = self._learn(task, lesson)
        self.lines.append(line)
        self._save()
        results.append(self.out, line)
        if lesson.checkpoint is not None:
            lesson.checkpoint.remove()  # last: until the task is saved, it goes on from there
        self.progress.note(f"{self.cell}: {100 * line.accuracy:.2f} % of {line.classes}")

    def _expand(self, task: int) -> None:
        torch.manual_seed(self._seed(task))
        self.method.expand(self.protocol.tasks[task])

    def _seed(self, task: int) -> int:
        return 1000 * self.cell.seed + task

    def _learn(self, task: int, lesson: Lesson) -> Line:
        resumed = lesson.checkpoint is not None and lesson.checkpoint.reached is not None
        began_s = time.process_time()
        shared_s = self._learn_base(lesson) if task == 0 else None
        if task > 0:
            self.method.learn(lesson)
        self.method.requires_grad_(False).eval()
        self._choose_exemplars(task)
        self.method.remember(self.memory.images(lesson.images.classes), lesson)
        spent_s = time.process_time() - began_s + (shared_s or 0.0)
        return self._line(task, spent_s=spent_s, shared=shared_s is not None, resumed=resumed)

    def _learn_base(self, lesson: Lesson) -> float | None:
        """Learn the first task, or take it from another cell; then return its seconds."""
        path = self.base_path
        if path is None:
            self.method.learn(lesson)
            return None
        module = self.method.base_module()
        with saved.only_one(path, note=self.progress.note):
            kept = saved.read(path, note=self.progress.note)
            if kept is not None and saved.fits(module, kept[0]):
                module.load_state_dict(kept[0])
                self.progress.note(f"the first task is taken from {path.name}")
                return float(kept[1]["cpu_s"])
            began_s = time.process_time()
            self.method.learn(lesson)
            saved.write(path, module.state_dict(), {"cpu_s": time.process_time() - began_s})
        return None

    @property
    def base_path(self) -> Path | None:
        """Return the file of the first task, if other cells share it."""
        if self.method.base is None:
            return None
        return self.folder / "bases" / f"{saved.digest(self._base_configuration())}.safetensors"

    def _base_configuration(self) -> dict[str, Scalar]:
        settings = asdict(self.cell.preset)
        return {
            "base": self.method.base,
            "seed": self.cell.seed,
            "data": self.protocol.data_digest,
            "classes": json.dumps(self.protocol.tasks[0]),
            **{name: settings[name] for name in BASE_SETTINGS},
        }

    def _lesson(self, task: int) -> Lesson:
        return Lesson(
            task=task,
            new=self.protocol.tasks[task],
            images=self._images(task),
            preset=self.cell.preset,
            preprocessing=self.preprocessing,
            start=self.start,
            seed=self._seed(task),
            progress=self.progress,
            checkpoint=Checkpoint(
                self._checkpoints(task),
                configuration=self._task_configuration(task),
                progress=self.progress,
            ),
        )

    def _images(self, task: int) -> LabelledImages:
        if self.method.sees_all_images:
            return self.protocol.images_until(task)
        new = self.protocol.new_images(task)
        kept = self.memory.images(new.classes)
        return new if kept is None else join(kept, new)

    def _checkpoints(self, task: int) -> Path:
        return self.folder / "checkpoints" / saved.digest(self._task_configuration(task))

    def _task_configuration(self, task: int) -> dict[str, Scalar]:
        shared = task == 0 and self.method.base is not None
        return self._base_configuration() if shared else self._configuration(task)

    def _configuration(self, task: int) -> dict[str, Scalar]:
        return {
            **self.cell.configuration(),
            "task": task,
            "data": self.protocol.data_digest,
            "order": self.protocol.order_digest,
            **asdict(self.cell.preset),
        }

    def _choose_exemplars(self, task: int) -> None:
        self.memory.choose(
            self.protocol.new_images(task),
            names=self.protocol.tasks[task],
            quota=self.protocol.quota(task),
            features=lambda pixels: self._over(pixels, self.method.features),
        )

    def _line(self, task: int, *, spent_s: float, shared: bool, resumed: bool) -> Line:
        tests = [self.protocol.test_images(one) for one in range(task + 1)]
        scores = [self._over(one.pixels_NHWC, self.method.scores) for one in tests]
        right = [right_answers(*one) for one in zip(scores, tests, strict=True)]
        new = len(self.protocol.tasks[task])
        side = self.cell.preset.image_size
        return Line(
            method=self.cell.choice.name,
            variant=self.cell.choice.variant,
            preset=self.cell.preset_name,
            setting=self.cell.setting,
            seed=self.cell.seed,
            order_digest=self.protocol.order_digest,
            data_digest=self.protocol.data_digest,
            task=task,
            classes=len(self.protocol.classes_until(task)),
            accuracies=tuple(float(one.mean()) for one in right),
            accuracy=float(np.concatenate(right).mean()),
            parameters=sum(one.numel() for one in self.method.parameters()),
            flop=count_flop(self.method, image_size=side),
            served_flop=self.method.served_flop(),
            passes=self.method.passes,
            cpu_s=spent_s,
            shared_base=shared,
            resumed=resumed,
            commit=_commit(),
            new_alone=float(right_answers(scores[-1], tests[-1], newest=new).mean()),
            attention=self._attention(tests[-1]),
            recipe=self.cell.preset.recipe,
            right=np.packbits(np.concatenate(right)).tobytes().hex(),
        )

    def _attention(self, images: LabelledImages) -> dict[str, tuple[float, float]] | None:
        groups = self.method.attention()
        if groups is None:
            return None
        found_G2 = self._over(images.pixels_NHWC, groups.measure).mean(axis=0)
        return {
            name: (float(share), float(mean))
            for name, (share, mean) in zip(groups.names, found_G2, strict=True)
        }

    def _over(
        self, pixels_NHWC: NDArray[np.uint8], function: Callable[[Tensor], Tensor]
    ) -> NDArray[np.float32]:
        return over_batches(pixels_NHWC, function, preprocessing=self.preprocessing)

    @property
    def _state(self) -> Path:
        return self.folder / "cells" / f"{saved.digest(self._configuration(-1))}.safetensors"

    def _save(self) -> None:
        tensors = {f"method.{name}": one for name, one in self.method.state_dict().items()}
        for place, pixels in enumerate(self.memory.kept.values()):
            tensors[f"memory.{place}"] = torch.from_numpy(pixels)
        lines = [results.record_of(line) for line in self.lines]
        saved.write(self._state, tensors, {"lines": lines, "memory": list(self.memory.kept)})

    def _restore(self) -> int:
        """Go back to the last task that was finished. Return the number of the next one."""
        kept = saved.read(self._state, note=self.progress.note)
        if kept is None:
            return 0
        tensors, known = kept
        self.lines = [results.line_of(one) for one in known["lines"]]
        done = self.lines[-1].task + 1
        for task in range(done):
            self._expand(task)
        prefix = "method."
        weights = {
            name.removeprefix(prefix): one
            for name, one in tensors.items()
            if name.startswith(prefix)
        }
        self.method.load_state_dict(weights)
        self.method.requires_grad_(False).eval()
        self.memory.kept = {
            name: tensors[f"memory.{place}"].numpy() for place, name in enumerate(known["memory"])
        }
        return done

    def _write_missing(self) -> None:
        """Write the lines that are not in the file: it may be another one than before."""
        written = results.read_beside(
            self.out,
            preset=self.cell.preset_name,
            data_digest=self.protocol.data_digest,
            note=self.progress.note,
        )
        for line in self.lines:
            if line not in written:
                results.append(self.out, line)


def right_answers(
    scores_NC: NDArray[np.float32], images: LabelledImages, *, newest: int = 0
) -> NDArray[np.bool_]:
    """Tell which answers are right; `newest`: among that many of the last classes."""
    others = scores_NC.shape[1] - newest if newest else 0
    answers = others + scores_NC[:, others:].argmax(axis=1)
    return np.asarray(answers == images.labels_N, dtype=np.bool_)


def lab_folder() -> Path:
    """Return the folder for unfinished cells, first tasks and decoded images."""
    return cache_folder() / "lab"


def preprocessing_of(preset: Preset) -> Preprocessing:
    mean, deviation = HALF if preset.pretrained else (MEAN, DEVIATION)
    return Preprocessing(image_size=preset.image_size, mean=mean, std=deviation)


def start_of(data: Dataset, preset: Preset) -> Pretrained | None:
    """Read the weights that the networks of a preset begin with, if there are any."""
    if not preset.pretrained:
        return None
    if data.archive is None:
        raise WrongUsage(f"the weights {preset.pretrained} stand beside an archive of images")
    return read_pretrained(data.archive.parent / preset.pretrained)


def _commit() -> str:
    """Name the commit of the code, with a plus if files differ from it."""
    told = subprocess.run(
        ["git", "describe", "--always", "--abbrev=12", "--dirty=+"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return told.stdout.strip() or "unknown"
