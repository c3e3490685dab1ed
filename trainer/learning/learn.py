"""Teach a student its task: choose the parameters, the images and their order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import nn

from model_store.errors import DataRejected
from model_store.inference.forward import Lineage
from model_store.records.manifest import Scalar
from model_store.tables import counted
from trainer.data.augment import Augmentation
from trainer.data.folders import LabelledImages
from trainer.data.sampling import DrawEpoch
from trainer.data.task_data import TaskData
from trainer.learning.checkpoint import Checkpoint
from trainer.learning.fit import ChooseThreads, OptimiserFactory, adamw, fit, muon
from trainer.learning.growing import grow, growing_plan
from trainer.learning.heads import HeadFit
from trainer.learning.losses import Objective, classification_named
from trainer.learning.plan import (
    BALANCING,
    EXTENDING,
    LEARNING,
    Plan,
    balanced_epoch,
    digest_of,
    is_balanced_in_loss,
    learning_epoch,
    log_counts,
    make_plan,
    make_plan_on_pretrained,
    tunes,
    tuning_plan,
)
from trainer.learning.student import Learnt, Student
from trainer.progress import Progress
from trainer.ranks.ranks import ALONE, Ranks, refuse_differences
from trainer.ranks.threads import choose_threads
from trainer.request import Learning


def plan_of(student: Student, *, images: LabelledImages, request: Learning) -> Plan | None:
    """Plan the steps of learning; None where only the classifier is fitted."""
    if not student.learns_by_steps:
        return None
    width = student.network.spec.width_of(0)
    if student.grows:
        adapts = student.aim == "adaptation"
        return growing_plan(request.effort, images=len(images), adapts=adapts, width=width)
    if student.on_pretrained:
        return make_plan_on_pretrained(request.effort, images=len(images), width=width)
    return make_plan(request.effort, images=len(images), width=width)


def learn(
    student: Student,
    *,
    data: TaskData,
    plan: Plan | None,
    request: Learning,
    progress: Progress,
    checkpoint: Checkpoint | None = None,
    ranks: Ranks = ALONE,
) -> Learnt:
    """Learn the newest expert, if it is to change, and all heads.

    All ranks learn the expert and read tokens; the first one alone fits a classifier.
    """
    lesson = Lesson(
        student=student,
        data=data,
        plan=plan,
        request=request,
        progress=progress,
        checkpoint=checkpoint,
        ranks=ranks,
    )
    lesson.say()
    if student.aim == "extension":
        lesson.refuse_missing()
    if checkpoint is not None and request.measures_threads:
        checkpoint.take_threads()
    if plan is not None:
        lesson.learn_by_steps(plan)
        lesson.refuse_different_weights()
    fitted = Learnt()
    if student.on_pretrained:
        fitted = HeadFit(
            student=student,
            data=data,
            request=request,
            progress=progress,
            checkpoint=checkpoint,
            ranks=ranks,
        ).run()
    student.network.requires_grad_(False).eval()
    return replace(fitted, training={**lesson.figures(), **fitted.training, **student.origin})


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """A student, its images and its plan."""

    student: Student
    data: TaskData
    plan: Plan | None
    """None: only the classifier is fitted."""
    request: Learning
    progress: Progress
    checkpoint: Checkpoint | None
    ranks: Ranks = ALONE

    @property
    def images(self) -> LabelledImages:
        return self.data.for_training

    @property
    def known_by_statistics(self) -> frozenset[str]:
        return frozenset(kept.entry.class_name for kept in self.data.statistics)

    def say(self) -> None:
        plan, memory = self.plan, self.request.exemplars
        classes = len(self.student.network.spec.classes)
        learnt = counted(len(self.student.new_classes), "class", "classes")
        effort = "only the classifier is fitted, and epochs, rate and augmentation do not count"
        if plan is not None:
            heads = self.student.network.spec.experts[-1].heads
            expert = f"an expert of {counted(heads, 'head')}, " if self.student.adds_expert else ""
            if self.student.aim == "adaptation":
                expert = "low-rank changes of the first expert, "
            effort = (
                f"{expert}{counted(plan.epochs, 'epoch')} in batches of {plan.batch_size}, "
                f"learning rate {plan.learning_rate:.2g}"
            )
        self.progress.note(
            f"learning {learnt} from {counted(self.data.new_images, 'image')} and "
            f"{counted(self.data.exemplars, 'exemplar')}: {effort}"
        )
        self._say_if_alone()
        if not self.request.keeps_pictures:
            self._say_without_pictures()
        if 0 < memory < classes:
            self.progress.note(
                f"a memory of {memory} is less than one image for each of {classes} classes, so "
                "none is kept"
            )

    def _say_without_pictures(self) -> None:
        judged = "the validation images"
        if self.data.source == "held-out":
            judged = "the images held out of this run, which are not kept either"
        self.progress.note(
            "no picture is kept: the version keeps counts, means and scatters of tokens, and no "
            f"picture. Its calibration, its threshold and its gate stand on {judged}; later "
            "versions cannot judge these classes without validation images. At the last "
            "measurement this cost 0.2 to 0.4 points (ADR 52)"
        )

    def _say_if_alone(self) -> None:
        answers = [name for name in self.images.classes if name not in self.data.retired]
        if len(answers) == 1:
            self.progress.note(
                f"with one class there is nothing to tell apart: every image will be answered "
                f"{answers[0]!r} until another task brings more classes"
            )

    def refuse_missing(self) -> None:
        missing = [
            name
            for name in self.images.classes
            if name not in self.data.retired
            and name not in self.known_by_statistics
            and not len(self.images.rows_of(name))
        ]
        if missing:
            raise DataRejected(
                f"the store keeps no images of {', '.join(map(repr, missing[:20]))}: tuning the "
                "classifier without them would make it forget them; give images of all classes"
            )

    def learn_by_steps(self, plan: Plan) -> None:
        if self.student.grows:
            grow(
                self.student,
                data=self.data,
                plan=plan,
                request=self.request,
                progress=self.progress,
                checkpoint=self.checkpoint,
                ranks=self.ranks,
                choose_threads=self._choose_threads,
            )
            return
        frozen = self.student.frozen_lineage()
        if self.student.aim == "extension":
            self._extend(plan, frozen)
            return
        self._learn_expert(plan, frozen)
        if tunes(self.student, self.data, loss=self.request.loss):
            self._balance(plan, frozen)

    def refuse_different_weights(self) -> None:
        """Refuse to go on unless all ranks have learnt the same, to the last bit."""
        if self.ranks.count > 1:
            learnt = digest_of(self.student.network.parameters())
            refuse_differences(self.ranks, {"learnt": learnt}, what="weights")

    def figures(self) -> dict[str, Scalar]:
        plan = self.plan
        return {
            "images": self.data.new_images,
            "exemplars": self.data.exemplars,
            "epochs": plan.epochs if plan else 0,
            "batch_size": plan.batch_size if plan else None,
            "learning_rate": plan.learning_rate if plan else None,
            "loss": self.request.loss,
            "seed": self.request.seed,
            **(self.data.split.figures() if self.data.split else {}),
            **({"data": self.data.digest} if self._can_be_grown else {}),
        }

    @property
    def _can_be_grown(self) -> bool:
        """Return whether a later run may grow the network for these very images."""
        return self.student.aim == "head" or (self.student.aim == "expert" and self.plan is None)

    def _learn_expert(self, plan: Plan, frozen: Lineage | None) -> None:
        network = self.student.network
        auxiliary = network.auxiliary_head() if self.student.teacher else None
        extra = list(auxiliary.parameters()) if auxiliary else []
        draw_epoch = learning_epoch(self.student, self.images)
        prior_C = None
        if is_balanced_in_loss(self.request.loss):
            prior_C = log_counts(draw_epoch, self.images).to(network.device)
        self._fit(
            LEARNING,
            plan,
            parameters=[*network.learnable(), *extra],
            objective=Objective(
                classification=classification_named(self.request.loss),
                teacher=self.student.teacher,
                auxiliary=auxiliary,
                frozen=frozen,
                log_counts_C=prior_C,
            ),
            draw_epoch=draw_epoch,
            seed=self.request.seed,
            make_optimiser=(adamw if self.student.on_pretrained else muon)(slow=self.student.given),
            choose=self._choose_threads,
        )

    def _extend(self, plan: Plan, all_experts: Lineage | None) -> None:
        """Tune the heads with equal shares of all classes; no expert changes."""
        self._fit(
            EXTENDING,
            plan,
            parameters=list(self.student.network.heads.parameters()),
            objective=Objective(
                classification=classification_named(self.request.loss), frozen=all_experts
            ),
            draw_epoch=balanced_epoch(self.data),
            seed=self.request.seed,
            choose=self._choose_threads,
        )

    def _balance(self, plan: Plan, frozen: Lineage | None) -> None:
        network = self.student.network
        network.newest.requires_grad_(False)
        for parameter in network.tunable():
            parameter.requires_grad_(True)
        self._fit(
            BALANCING,
            tuning_plan(plan, self.student, self.data),
            parameters=network.tunable(),
            objective=Objective(
                classification=classification_named(self.request.loss),
                teacher=self.student.teacher,
                frozen=frozen,
            ),
            draw_epoch=balanced_epoch(self.data),
            seed=self.request.seed + 1,
        )

    def _fit(
        self,
        name: str,
        plan: Plan,
        *,
        parameters: Sequence[nn.Parameter],
        objective: Objective,
        draw_epoch: DrawEpoch,
        seed: int,
        make_optimiser: OptimiserFactory | None = None,
        choose: ChooseThreads | None = None,
    ) -> None:
        preprocessing = self.student.preprocessing
        fit(
            self.student.network,
            self.images,
            parameters=parameters,
            objective=objective,
            plan=plan,
            make_optimiser=make_optimiser,
            augment=Augmentation.named(
                self.request.augment,
                flip=self.request.flip,
                image_size=preprocessing.image_size,
                on_pretrained=self.student.on_pretrained,
                epochs=plan.epochs,
            ),
            preprocessing=preprocessing,
            draw_epoch=draw_epoch,
            seed=seed,
            name=name,
            progress=self.progress,
            checkpoint=self.checkpoint,
            ranks=self.ranks,
            choose_threads=choose,
        )

    @property
    def _choose_threads(self) -> ChooseThreads | None:
        """Choose threads in the first phase of a run; one that is taken up has its own."""
        taken_up = self.checkpoint is not None and self.checkpoint.reached is not None
        if not self.request.measures_threads or taken_up:
            return None
        return partial(choose_threads, note=self.progress.note)
