"""How a student learns its task: which parameters, from which images, in which order."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from model_store.errors import DataRejected
from model_store.inference.forward import Lineage
from model_store.records.manifest import Scalar
from model_store.tables import counted
from trainer.data.augment import Augmentation
from trainer.data.folders import LabelledImages
from trainer.data.sampling import balanced, can_be_balanced, evened, side_by_side
from trainer.data.task_data import TaskData
from trainer.learning.checkpoint import Checkpoint
from trainer.learning.classifier import fit_classifier, former_weights
from trainer.learning.fit import DrawEpoch, Plan, fit
from trainer.learning.losses import Objective, classification_named
from trainer.learning.student import Student
from trainer.learning.token_cache import read_tokens
from trainer.progress import Progress
from trainer.request import AddTask


def plan_of(student: Student, *, images: LabelledImages, request: AddTask) -> Plan | None:
    """None where there is nothing to learn step by step: only the classifier is fitted."""
    if not student.learns_by_steps:
        return None
    width = student.network.spec.width_of(0)
    if student.on_pretrained:
        new = sum(len(images.rows_of(name)) for name in student.new_classes)
        return request.effort.plan_on_pretrained(epoch=min(2 * new, len(images)), width=width)
    return request.effort.plan(images=len(images), width=width)


def learn(
    student: Student,
    *,
    data: TaskData,
    request: AddTask,
    progress: Progress,
    checkpoint: Checkpoint | None = None,
) -> dict[str, Scalar]:
    """Learns the newest expert, if it is to change, and all heads. Gives the figures."""
    lesson = Lesson(
        student=student,
        data=data,
        images=data.for_training,
        request=request,
        progress=progress,
        checkpoint=checkpoint,
    )
    lesson.say()
    if student.extends:
        lesson.refuse_missing()
    if lesson.plan is not None:
        lesson.learn_by_steps(lesson.plan)
    figures = lesson.figures()
    if student.on_pretrained:
        figures["strength"] = lesson.fit_classifier()
    student.network.requires_grad_(False).eval()
    return {**figures, **student.origin}


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """One student and what it learns from."""

    student: Student
    data: TaskData
    images: LabelledImages
    """All that is learnt from: new ones and exemplars."""
    request: AddTask
    progress: Progress
    checkpoint: Checkpoint | None

    @property
    def plan(self) -> Plan | None:
        return plan_of(self.student, images=self.images, request=self.request)

    def say(self) -> None:
        plan, memory = self.plan, self.request.memory
        classes = len(self.student.network.spec.classes)
        learnt = counted(len(self.student.new_classes), "class", "classes")
        effort = "only the classifier is fitted, and epochs, rate and augmentation do not count"
        if plan is not None:
            heads = self.student.network.spec.tasks[-1].expert.heads
            expert = "" if self.student.extends else f"an expert of {counted(heads, 'head')}, "
            effort = (
                f"{expert}{counted(plan.epochs, 'epoch')} in batches of {plan.batch_size}, "
                f"learning rate {plan.learning_rate:.2g}"
            )
        self.progress.note(
            f"learning {learnt} from {counted(len(self.data.new), 'image')} and "
            f"{counted(len(self.data.memory), 'exemplar')}: {effort}"
        )
        self._say_if_alone()
        if 0 < memory < classes:
            self.progress.note(
                f"--memory {memory} is less than one image for each of {classes} classes, so none "
                "is kept"
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
            if name not in self.data.retired and not len(self.images.rows_of(name))
        ]
        if missing:
            raise DataRejected(
                f"the store keeps no images of {', '.join(map(repr, missing[:20]))}: tuning the "
                "classifier without them would make it forget them; give images of all classes"
            )

    def learn_by_steps(self, plan: Plan) -> None:
        network, tasks = self.student.network, len(self.student.network.spec.tasks)
        if self.student.extends:
            self._extend(plan, Lineage.of(network))
            return
        # The older experts are the same function of an image from the first step to the last.
        older = Lineage.of(network, experts=tasks - 1) if tasks > 1 else None
        self._learn_expert(plan, older)
        if self.student.teacher and can_be_balanced(self.images, retired=self.data.retired):
            self._balance(plan, older)

    def fit_classifier(self) -> float | None:
        """All heads, on the tokens as they are now; its strength. None without images of all."""
        if not can_be_balanced(self.images, retired=self.data.retired):
            self.progress.note("without images of every class the classifier is not fitted again")
            return None
        network, images = self.student.network, self.images
        tokens_NW = read_tokens(
            network,
            images,
            preprocessing=self.student.preprocessing,
            progress=self.progress,
            checkpoint=self.checkpoint,
        )
        fitted = fit_classifier(
            network,
            tokens_NW,
            images.labels_N,
            answered=[
                place for place, name in enumerate(images.classes) if name not in self.data.retired
            ],
            loss=classification_named(self.request.loss),
            former_CW=self._former_weights(),
        )
        return fitted.strength

    def _former_weights(self) -> Tensor | None:
        teacher, classes = self.student.teacher, self.images.classes
        if teacher is None:
            return None
        trust_C = [self.data.forgotten(name) for name in classes]
        width = self.student.network.spec.token_width
        return former_weights(teacher.heads, width=width, trust_C=trust_C)

    def figures(self) -> dict[str, Scalar]:
        plan = self.plan
        return {
            "images": len(self.data.new),
            "exemplars": len(self.data.memory),
            "epochs": plan.epochs if plan else 0,
            "batch_size": plan.batch_size if plan else None,
            "learning_rate": plan.learning_rate if plan else None,
            "loss": self.request.loss,
            "seed": self.request.seed,
        }

    def _learn_expert(self, plan: Plan, older: Lineage | None) -> None:
        network = self.student.network
        auxiliary = network.auxiliary_head() if self.student.teacher else None
        extra = list(auxiliary.parameters()) if auxiliary else []
        draw = side_by_side if self.student.on_pretrained else evened
        self._fit(
            "learning",
            plan,
            parameters=[*network.learnable(), *extra],
            objective=Objective(
                classification=classification_named(self.request.loss),
                teacher=self.student.teacher,
                auxiliary=auxiliary,
                frozen=older,
            ),
            draw_epoch=draw(self.images, among=self.student.new_classes),
            seed=self.request.seed,
            slow=self.student.given,
        )

    def _extend(self, plan: Plan, all_experts: Lineage) -> None:
        """All classes alike, and no expert moves."""
        self._fit(
            "extending",
            plan,
            parameters=list(self.student.network.heads.parameters()),
            objective=Objective(
                classification=classification_named(self.request.loss), frozen=all_experts
            ),
            draw_epoch=balanced(self.images, retired=self.data.retired),
            seed=self.request.seed,
        )

    def _balance(self, plan: Plan, older: Lineage | None) -> None:
        network, most = self.student.network, None
        if self.student.on_pretrained:  # as long as an epoch of learning, however many classes
            most = 2 * len(self.data.new)
        network.newest.requires_grad_(False)
        for parameter in network.tunable():
            parameter.requires_grad_(True)
        self._fit(
            "balancing",
            self.request.effort.tuning(plan),
            parameters=network.tunable(),
            objective=Objective(
                classification=classification_named(self.request.loss),
                teacher=self.student.teacher,
                frozen=older,
            ),
            draw_epoch=balanced(self.images, retired=self.data.retired, most=most),
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
        slow: Collection[nn.Parameter] = (),
    ) -> None:
        preprocessing = self.student.preprocessing
        fit(
            self.student.network,
            self.images,
            parameters=parameters,
            objective=objective,
            plan=plan,
            slow=slow,
            augment=Augmentation.named(
                self.request.augment,
                flip=self.request.flip,
                image_size=preprocessing.image_size,
                on_pretrained=self.student.on_pretrained,
            ),
            preprocessing=preprocessing,
            draw_epoch=draw_epoch,
            seed=seed,
            name=name,
            progress=self.progress,
            checkpoint=self.checkpoint,
        )
