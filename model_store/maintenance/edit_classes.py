"""Retire or rename a class, or set its threshold: publish a version that differs in its manifest
only.

Nothing is trained and no shard is written, so the logits of all other classes are those of the
parent, bit for bit.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

from model_store import __version__
from model_store.errors import ChannelNotFound, DataRejected, WrongUsage
from model_store.names import new_class_name, notes_on_look_alikes, spelt_among
from model_store.records.manifest import (
    Accuracy,
    ClassImages,
    ClassTokens,
    Draft,
    Manifest,
    Metrics,
    Unknown,
)
from model_store.records.quality import ClassThreshold
from model_store.records.sealing import make_record, timestamp
from model_store.store.store import Store
from model_store.tables import counted

Kept = TypeVar("Kept", ClassImages, ClassTokens)
Thresholds = Mapping[str, ClassThreshold]


@dataclass(frozen=True, slots=True, kw_only=True)
class Care:
    """The store and channel of an edit, its actor and its reason."""

    store: Store
    channel: str
    actor: str
    reason: str = ""
    promote: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class CareOutcome:
    """The published version. `refused` tells why it was not promoted."""

    manifest: Manifest
    parent: Manifest
    promoted: bool
    refused: str | None
    notes: tuple[str, ...] = ()


def retire_class(name: str, *, care: Care) -> CareOutcome:
    """Publish a version that never answers `name`. Expert and logit stay where they are; the
    images and statistics kept of the class are not handed on."""

    def changed(parent: Manifest) -> dict[str, Any]:
        known = _known(parent, name)
        if known in parent.retired:
            raise DataRejected(f"class {name!r} is retired already")
        if parent.classes == (known,):
            raise DataRejected(f"{name!r} is the last class that is left, so it cannot be retired")
        gone = {*parent.retired, known}
        return {
            "retired": tuple(name for name in parent.spec.classes if name in gone),
            "memory": _without(parent.memory, known),
            "held_out": _without(parent.held_out, known),
            "statistics": _without(parent.statistics, known),
            "unknown": _with_thresholds(
                parent, lambda own: {name: one for name, one in own.items() if name != known}
            ),
            "metrics": _metrics_without(parent, known),
        }

    return _publish(care, changed, what=f"class {name} was retired")


def rename_class(old: str, new: str, *, care: Care) -> CareOutcome:
    """Publish a version that answers `new` instead of `old`. A retired class may be renamed too,
    which sets its name free."""
    new = new_class_name(new)

    def changed(parent: Manifest) -> dict[str, Any]:
        known = _known(parent, old)
        if known == new:
            raise WrongUsage(f"class {old!r} has that name already")
        taken = spelt_among(new, [name for name in parent.spec.classes if name != known])
        if taken is not None:
            retired = " that is retired" if taken in parent.retired else ""
            raise DataRejected(f"there is a class {taken!r}{retired} already")

        if parent.hierarchy is not None and new in parent.hierarchy.parents.values():
            raise DataRejected(f"{new!r} is a group of classes, and cannot be a class too")

        def named(name: str) -> str:
            return new if name == known else name

        return {
            "tasks": tuple(
                task.model_copy(update={"classes": tuple(map(named, task.classes))})
                for task in parent.tasks
            ),
            "retired": tuple(map(named, parent.retired)),
            "memory": _renamed(parent.memory, named),
            "held_out": _renamed(parent.held_out, named),
            "statistics": _renamed(parent.statistics, named),
            "hierarchy": parent.hierarchy and parent.hierarchy.renamed(known, new),
            "unknown": _with_thresholds(
                parent, lambda own: {named(name): one for name, one in own.items()}
            ),
            "metrics": Metrics(
                accuracy=parent.metrics.accuracy,
                per_class={named(name): n for name, n in parent.metrics.per_class.items()},
                images=parent.metrics.images,
                source=parent.metrics.source,
                confusion={
                    named(name): {named(answer): count for answer, count in answers.items()}
                    for name, answers in parent.metrics.confusion.items()
                },
                agreement=parent.metrics.agreement,
                scores=parent.metrics.scores,
            ),
        }

    outcome = _publish(care, changed, what=f"class {old} was renamed to {new}")
    others = [name for name in outcome.manifest.spec.classes if name != new]
    return replace(outcome, notes=notes_on_look_alikes([new], known=others))


FITTED: Final = None
"""Stands for the threshold that the trainer fitted for all classes."""


def set_thresholds(asked: Mapping[str, float | None], *, care: Care) -> CareOutcome:
    """Publish a version with other thresholds of single classes; FITTED takes one back. Each is a
    probability of none of the classes, above which an image that looks most like the class is
    called unknown."""

    def changed(parent: Manifest) -> dict[str, Any]:
        if parent.doubt is None:
            raise DataRejected(
                f"version {parent.version} tells no probability of unknown, which a threshold "
                "could be for; versions that begin with a pre-trained network do"
            )

        def with_asked(own: Thresholds) -> Thresholds:
            for name, above in asked.items():
                known = _known(parent, name)
                if known in parent.retired:
                    raise DataRejected(f"class {name!r} is retired: it is never answered")
                own = {one: said for one, said in own.items() if one != known}
                if above is not FITTED:
                    said = {"above": above, "actor": care.actor, "reason": care.reason}
                    own = {**own, known: make_record(ClassThreshold, **said)}
            return own

        # The gate judged the parent, by answers that thresholds do not change.
        metrics = parent.metrics.model_copy(update={"gate": None, "run": None})
        return {"unknown": _with_thresholds(parent, with_asked), "metrics": metrics}

    first, *more = asked
    classes = counted(len(asked), "class", "classes") if more else f"class {first}"
    return _publish(care, changed, what=f"the threshold of {classes} was set")


def _with_thresholds(
    parent: Manifest, changed: Callable[[Thresholds], Thresholds]
) -> Unknown | None:
    unknown = parent.unknown
    return unknown and unknown.with_thresholds(changed(unknown.by_class))


def _publish(
    care: Care, changed: Callable[[Manifest], Mapping[str, Any]], *, what: str
) -> CareOutcome:
    head = care.store.head(care.channel)
    if head is None:
        raise ChannelNotFound(f"channel {care.channel} names no version yet; promote one first")
    parent = care.store.resolve(head)
    # Everything else in the manifest is handed on as it is.
    kept = {name: getattr(parent, name) for name in Draft.model_fields}
    draft = Draft.model_validate(
        {
            **kept,
            "corrected": 0,
            "extended": (),  # that was done by the parent, and not again
            "deepened": (),
            "adapted": False,
            **changed(parent),
            "parent": parent.version,
            "parent_digest": parent.digest,
            "transaction": uuid.uuid4().hex,
            "created": timestamp(),
            "software": f"dne-serve {__version__}",
        }
    )
    manifest = care.store.publish(draft, shards={}, signer=care.store.keys.signer)
    refused = None
    if care.promote:
        refused = care.store.channel(care.channel).promote_or_explain(
            manifest,
            head=head,
            actor=care.actor,
            reason=care.reason or what,
        )
    return CareOutcome(
        manifest=manifest,
        parent=parent,
        promoted=care.promote and refused is None,
        refused=refused,
    )


def _known(parent: Manifest, name: str) -> str:
    """Find a class by its name in any spelling."""
    known = spelt_among(name, parent.spec.classes)
    if known is None:
        raise DataRejected(f"version {parent.version} knows no class {name!r}")
    return known


def _without(entries: tuple[Kept, ...], name: str) -> tuple[Kept, ...]:
    return tuple(entry for entry in entries if entry.class_name != name)


def _renamed(entries: tuple[Kept, ...], named: Callable[[str], str]) -> tuple[Kept, ...]:
    return tuple(
        entry.model_copy(update={"class_name": named(entry.class_name)}) for entry in entries
    )


def _metrics_without(parent: Manifest, name: str) -> Metrics:
    """Keep the parent's figures for the other classes. They are a lower bound: with one answer
    fewer to choose from, right answers stay right."""
    metrics = parent.metrics
    per_class = {label: share for label, share in metrics.per_class.items() if label != name}
    counts = {entry.class_name: entry.count for entry in parent.held_out}
    if metrics.source != "held-out" or sum(counts.values()) != metrics.images:
        return Metrics(per_class=per_class)  # the number of images of each class is unknown
    counts.pop(name, None)
    newest = parent.tasks[-1].classes

    def mean(names: list[str]) -> float | None:
        chosen = [label for label in names if counts.get(label) and label in per_class]
        images = sum(counts[label] for label in chosen)
        return (
            sum(per_class[label] * counts[label] for label in chosen) / images if images else None
        )

    return Metrics(
        accuracy=Accuracy(
            all=mean(list(counts)),
            old=mean([label for label in counts if label not in newest]),
            new=mean([label for label in counts if label in newest]),
        ),
        per_class=per_class,
        images=sum(counts.values()),
        source="held-out",
    )
