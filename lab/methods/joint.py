"""Learn all classes so far at once, from all their images: the bound that others are held to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lab.backbones import PlainNetwork
from lab.method import Lesson, Options
from lab.plain import PlainMethod, PlainOptions
from lab.presets import Preset


@dataclass(frozen=True, slots=True, kw_only=True)
class JointOptions(PlainOptions):
    at: Literal["last", "every"] = "last"
    """`last`: learn once, at the last task. `every`: begin anew at each task."""


class Joint(PlainMethod):
    options_type = JointOptions
    sees_all_images = True

    def __init__(self, preset: Preset, options: Options) -> None:
        super().__init__(preset, options)
        assert isinstance(options, JointOptions)
        self.at = options.at
        self.classes = 0

    @property
    def base(self) -> str | None:
        return super().base if self.at == "every" else None

    def expand(self, new: tuple[str, ...]) -> None:
        """Begin a new network, with one head for all classes."""
        self.classes += len(new)
        self.network = PlainNetwork(self.kind.make(self.preset))
        self.network.heads.grow(self.classes)

    def skips(self, task: int, *, of: int) -> bool:
        return self.at == "last" and task < of - 1

    def learn(self, lesson: Lesson) -> None:
        # A network that begins anew needs as many epochs as a first task.
        self.begin(lesson)
        self.learn_network(lesson, epochs=self.preset.first_epochs)
