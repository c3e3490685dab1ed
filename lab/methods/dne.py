"""Learn with the product's network: one narrow expert a task, which reads all older experts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from lab.backbones import first_task, give, learning_of
from lab.batches import over_batches
from lab.draws import constant, repeated
from lab.method import AttentionGroups, Lesson, Method, Options
from lab.presets import Preset
from lab.variants.design import NETWORKS, NetworkName, make_network
from lab.variants.guide import Guided, GuidedObjective
from lab.variants.refit import TaskStatistics, keep_statistics, refit
from lab.variants.spatial import GROUPS, attention_by_group
from model_store.inference.forward import Lineage
from model_store.network.expert import Expert
from model_store.network.flops import folded_flops
from model_store.spec import Attention, ExpertSpec, TaskSpec
from trainer.data.folders import LabelledImages
from trainer.data.sampling import balanced, evened
from trainer.learning.fit import OptimiserFactory, adamw, normalisation_on
from trainer.learning.losses import LossWeights, Objective, Teacher, classification_named
from trainer.learning.plan import TUNING_RATE_SHARE

AUTHORS_DECAY = 1e-6
AUTHORS_TUNING_RATE_SHARE = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class DneOptions(Options):
    k: int = 1
    """Heads of a later expert."""
    network: NetworkName = "dne"
    """A variant of the network: `lab/variants/design.py` lists their parts."""
    loss: Literal["cross-entropy", "binary"] = "cross-entropy"
    weights: Literal["sums", "authors"] = "sums"
    """`sums`: 1 / 0.1 / 1 on sums over classes. `authors`: by their means over classes."""
    tuning: Literal["ours", "authors", "none"] = "ours"
    """`authors`: without distillation, a tenth of the rate, constant."""
    decay: Literal["ours", "authors"] = "ours"
    """`authors`: a weight decay of 1e-6."""
    attention: Attention = "gated"
    """The attention of patch blocks, as in the product. Networks that attend across tasks, `sta-…`
    and `mhsa…`, have only `plain`."""
    drop_path: Literal["0", "0.1"] = "0"
    """The chance that a branch is dropped, in the expert that learns."""
    repeats: int = 1
    """How often an image comes in an epoch, changed anew, while fewer images come."""
    guide: Literal["none", "contrastive"] = "none"
    """`contrastive`: from the second task on a guide without labels, after TagFex."""
    head: Literal["learnt", "fitted", "statistics"] = "learnt"
    """`fitted`: logistic regression on the final tokens of new images and exemplars, after each
    task. `statistics`: stand-ins for all images that are gone take the place of exemplars."""


class Dne(Method):
    options_type = DneOptions

    def __init__(self, preset: Preset, options: Options) -> None:
        super().__init__(preset, options)
        assert isinstance(options, DneOptions)
        self.options = options
        self.design = replace(
            NETWORKS[options.network],
            attention=options.attention,
            drop_path=float(options.drop_path),
        )
        self.network = make_network(self.design, preset)
        self.teacher: Teacher | None = None
        self.statistics = nn.ModuleList()

    @property
    def base(self) -> str | None:
        if self.preset.pretrained:
            return None
        repeated = f", {self.options.repeats} repeats" if self.options.repeats > 1 else ""
        return f"{self.design.base}, {self.options.loss}, decay {self.options.decay}{repeated}"

    def base_module(self) -> nn.Module:
        return nn.ModuleDict({"network": self.network})

    def expand(self, new: tuple[str, ...]) -> None:
        if self.preset.pretrained and not self.network.spec.tasks:
            self.network.expand(first_task(self.preset))
            del self.network.heads[0]  # its class is never answered
        known, old = self.network.spec, self.network.heads
        # The old experts stay in the network, so the old heads are all that is left to keep.
        classes = sum(head.out_features for head in old if isinstance(head, nn.Linear))
        self.teacher = Teacher(heads=old, classes=classes) if classes else None
        heads = self.options.k if known.tasks else self.preset.heads
        name = f"task {len(known.tasks) + 1}"
        self.network.expand(TaskSpec(name=name, classes=new, expert=ExpertSpec(heads=heads)))
        if self.options.head == "statistics":
            width = self.network.spec.token_width
            self.statistics.append(TaskStatistics(classes=len(new), width=width))

    def learn(self, lesson: Lesson) -> None:
        if lesson.start is not None and lesson.task == 0:
            oldest = self.network.experts[0]
            assert isinstance(oldest, Expert)
            give(oldest, lesson.start, self.preset)
        self.network.heads.requires_grad_(True)
        # The older experts stay in evaluation mode: they are constants.
        self.network.newest.train()
        self._learn_expert(lesson)
        tunes = self.options.tuning != "none" and self.preset.tuning_epochs > 0
        if self.teacher is not None and tunes:
            self.network.newest.eval()
            self._tune(lesson)

    def remember(self, exemplars: LabelledImages | None, lesson: Lesson) -> None:
        """Fit the heads, where they are fitted; the first task has learnt its own with others."""
        if self.options.head == "learnt":
            return
        images = lesson.images
        tokens_NW = over_batches(
            images.pixels_NHWC, self.features, preprocessing=lesson.preprocessing
        )
        kept = [one for one in self.statistics if isinstance(one, TaskStatistics)]
        refit(
            self.network,
            tokens_NW,
            images.labels_N,
            known=[one for task in kept[:-1] for one in task.each()],
            loss=classification_named(self.options.loss),
        )
        for newest in kept[-1:]:
            keep_statistics(newest, tokens_NW, images.labels_N, old=lesson.old)

    def scores(self, images_BCHW: Tensor) -> Tensor:
        scores: Tensor = self.network(images_BCHW)
        return scores

    def features(self, images_BCHW: Tensor) -> Tensor:
        return torch.cat(self.network.token_slices(images_BCHW), dim=-1)

    def attention(self) -> AttentionGroups | None:
        if self.design.spatial is None or len(self.network.spec.tasks) == 1:
            return None
        return AttentionGroups(names=GROUPS, measure=partial(attention_by_group, self.network))

    def served_flop(self) -> int | None:
        return folded_flops(self.network.spec) if self.design.folds else None

    def _learn_expert(self, lesson: Lesson) -> None:
        auxiliary = self.network.auxiliary_head() if self.teacher else None
        extra = list(auxiliary.parameters()) if auxiliary else []
        objective = Objective(
            classification=classification_named(self.options.loss),
            log_counts_C=lesson.log_counts if self.options.loss == "cross-entropy" else None,
            teacher=self.teacher,
            auxiliary=auxiliary,
            frozen=self._frozen(),
            weights=self._weights(lesson),
        )
        fit = partial(
            lesson.fit,
            "learning",
            rate=self.preset.rate,
            draw_epoch=repeated(evened(lesson.images, among=lesson.new), self.options.repeats),
            make_optimiser=self._optimiser(),
        )
        if self.options.guide == "none" or self.teacher is None:
            fit(self.network, objective, parameters=[*self.network.learnable(), *extra])
            return
        learner = Guided(self.network)
        guided = GuidedObjective(
            objective=objective,
            old=lesson.old,
            normalisation=normalisation_on(learner.device, lesson.preprocessing),
        )
        fit(learner, guided, parameters=[*learner.learnable(), *extra])

    def _tune(self, lesson: Lesson) -> None:
        as_authors = self.options.tuning == "authors"
        share = AUTHORS_TUNING_RATE_SHARE if as_authors else TUNING_RATE_SHARE
        lesson.fit(
            "balanced tuning",
            self.network,
            Objective(
                classification=classification_named(self.options.loss),
                teacher=None if as_authors else self.teacher,
                frozen=self._frozen(),
                weights=self._weights(lesson),
            ),
            parameters=self.network.tunable(),
            rate=share * self.preset.rate,
            epochs=self.preset.tuning_epochs,
            draw_epoch=balanced(lesson.images),
            make_optimiser=self._optimiser(),
            schedule=constant if as_authors else None,
        )

    def _frozen(self) -> Lineage | None:
        """Fold the older experts, where the folded form computes the same."""
        older = len(self.network.spec.tasks) - 1
        return Lineage.of(self.network, experts=older) if older and self.design.folds else None

    def _optimiser(self) -> OptimiserFactory:
        if self.options.decay == "authors":
            return adamw(weight_decay=AUTHORS_DECAY)
        return learning_of(self.preset)

    def _weights(self, lesson: Lesson) -> LossWeights:
        if self.options.weights == "sums" or not lesson.old:
            return LossWeights()
        return LossWeights(
            classification=1 - lesson.old / lesson.classes,
            distillation=1.0,
            expertise=0.1 * lesson.classes / (1 + len(lesson.new)),
        )
