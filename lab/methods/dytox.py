"""Learn with DyTox: a shared transformer, and a token, a norm and a classifier for each task.

All task tokens read the patches of one encoder through one class-attention block, the decoder.
Learning a task changes encoder, decoder and the newest task's parts; balanced tuning changes all
but the encoder, without distillation. Both phases change what the authors' configuration for
CIFAR-100 changes; weight decay and augmentation are those of the harness.

Shapes: B images, C channels, O old classes, N new ones.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from lab.draws import constant
from lab.method import Lesson, Method, Options
from lab.methods.dne import AUTHORS_TUNING_RATE_SHARE
from lab.presets import Preset
from lab.variants.design import Design, make_network
from lab.variants.task_tokens import TaskPart, classify, embeddings, task_head
from model_store.spec import Attention, ExpertSpec, TaskSpec
from trainer.data.sampling import balanced
from trainer.learning.losses import (
    Classification,
    LossWeights,
    Objective,
    Step,
    classification_named,
    distillation,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DytoxOptions(Options):
    attention: Attention = "gated"
    """The attention of the encoder."""
    loss: Literal["binary", "cross-entropy"] = "binary"
    weights: Literal["authors", "sums"] = "authors"
    """`authors`: (1 − ρ) / ρ / 0.1 on means over classes, ρ = old/all. `sums`: on sums."""


class Dytox(Method):
    options_type = DytoxOptions

    def __init__(self, preset: Preset, options: Options) -> None:
        super().__init__(preset, options)
        assert isinstance(options, DytoxOptions)
        self.options, self.design = options, Design(attention=options.attention)
        # One expert: encoder, decoder, and the parts of the first task, named as in DNE.
        self.network = make_network(self.design, preset)
        self.later = nn.ModuleList()

    @property
    def base(self) -> str:
        """Name the base of DNE, which learns the first task alike."""
        return f"{self.design.base}, {self.options.loss}, decay ours"

    def expand(self, new: tuple[str, ...]) -> None:
        spec = self.network.spec
        if not spec.tasks:
            expert = ExpertSpec(heads=self.preset.heads)
            self.network.expand(TaskSpec(name="task 1", classes=new, expert=expert))
            return
        width, eps = spec.token_width, spec.layer_norm_eps
        self.later.append(TaskPart(width=width, classes=len(new), eps=eps))

    def learn(self, lesson: Lesson) -> None:
        if not self.later:
            self._learn_first(lesson)
            return
        self._learn_task(lesson)
        self._tune(lesson)

    def scores(self, images_BCHW: Tensor) -> Tensor:
        return self.classify(self.embeddings(images_BCHW))

    def features(self, images_BCHW: Tensor) -> Tensor:
        return torch.cat(self.embeddings(images_BCHW), dim=-1)

    def embeddings(self, images_BCHW: Tensor) -> list[Tensor]:
        return embeddings(self.network, self._later(), images_BCHW)

    def classify(self, embedded: list[Tensor]) -> Tensor:
        return classify(self.network, self._later(), embedded)

    def learnable(self) -> list[nn.Parameter]:
        """List all parameters: tuning changes those that learning does not."""
        return list(self.parameters())

    def _later(self) -> list[TaskPart]:
        return [part for part in self.later if isinstance(part, TaskPart)]

    def _encoder(self) -> list[nn.Parameter]:
        expert = self.network.newest
        return [expert.position, *expert.patch_embed.parameters(), *expert.blocks.parameters()]

    def _learn_first(self, lesson: Lesson) -> None:
        lesson.fit(
            "learning",
            self.network,
            Objective(classification=classification_named(self.options.loss)),
            parameters=self.network.learnable(),
            rate=self.preset.rate,
        )

    def _learn_task(self, lesson: Lesson) -> None:
        # The encoder changes, so the old model needs a copy of it, and a forward pass.
        teacher = copy.deepcopy(self)
        del teacher.later[-1]
        divergence = task_head(self.network.spec.token_width, 1 + len(lesson.new))
        decoder, newest = self.network.newest.class_block, self.later[-1]
        learns = [*self._encoder(), *decoder.parameters(), *newest.parameters()]
        self._let_learn(learns)
        lesson.fit(
            "learning",
            self,
            DytoxObjective(
                classification=classification_named(self.options.loss),
                weights=self._weights(lesson),
                teacher=teacher,
                divergence=divergence,
                old=lesson.old,
            ),
            parameters=[*learns, *divergence.parameters()],
            rate=self.preset.rate,
        )

    def _tune(self, lesson: Lesson) -> None:
        fixed = {id(one) for one in self._encoder()}
        learns = [one for one in self.parameters() if id(one) not in fixed]
        self._let_learn(learns)
        lesson.fit(
            "balanced tuning",
            self,
            DytoxObjective(classification=classification_named(self.options.loss)),
            parameters=learns,
            rate=AUTHORS_TUNING_RATE_SHARE * self.preset.rate,
            epochs=self.preset.tuning_epochs,
            draw_epoch=balanced(lesson.images),
            schedule=constant,
        )

    def _let_learn(self, learns: list[nn.Parameter]) -> None:
        """Compute gradients of these parameters alone."""
        self.requires_grad_(False)
        for one in learns:
            one.requires_grad_(True)

    def _weights(self, lesson: Lesson) -> LossWeights:
        """Weigh sums over classes; with `authors` so that they are the weights of means."""
        old = lesson.old / lesson.classes
        if self.options.weights == "sums":
            return LossWeights(classification=1 - old, distillation=old, expertise=0.1)
        expertise = 0.1 * lesson.classes / (1 + len(lesson.new))
        return LossWeights(classification=1 - old, distillation=1.0, expertise=expertise)


@dataclass(frozen=True, slots=True, kw_only=True)
class DytoxObjective:
    """Classification, distillation from the old model, and divergence of the newest token.

    The divergence head tells new classes apart, and all old ones as output 0.
    """

    classification: Classification
    weights: LossWeights = field(default_factory=LossWeights)
    teacher: Dytox | None = None
    divergence: nn.Linear | None = None
    old: int = 0

    def __call__(self, method: Dytox, images_BCHW: Tensor, labels_B: Tensor) -> Step:
        embeddings = method.embeddings(images_BCHW)
        logits = method.classify(embeddings)
        loss = self.weights.classification * self.classification(logits, labels_B)
        if self.teacher is not None:
            with torch.no_grad():
                taught_BO = self.teacher.scores(images_BCHW)
            loss = loss + self.weights.distillation * distillation(logits[:, : self.old], taught_BO)
        if self.divergence is not None:
            asked = (labels_B - self.old + 1).clamp_min(0)
            diverging = self.classification(self.divergence(embeddings[-1]), asked)
            loss = loss + self.weights.expertise * diverging
        right = (logits.detach().argmax(dim=-1) == labels_B).sum()
        return Step(loss=loss, right=right)
