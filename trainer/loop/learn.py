"""Learn from all labels of the inbox that neither the channel's head nor its ancestors have used,
and from corrections of kept images.

First come the corrections, in a version of their own, which fits the classifier again. Then images
of known classes extend these classes, in the next version. Then new names become a task: it is
learnt with the new images of known classes in the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from model_store.errors import (
    ChannelMoved,
    DataRejected,
    ImageRejected,
    ItemNotFound,
    NothingToLearn,
    PicturesGone,
    RecordInvalid,
    WrongUsage,
)
from model_store.loop.corrections import Corrections, classes_moved
from model_store.loop.inbox import Inbox
from model_store.loop.items import LabelledItem, in_threads, open_index, used_labels
from model_store.loop.waiting import (
    FEWEST_OF_NEW,
    WaitingLabels,
    fill_class_folders,
    find_waiting,
    version_path,
)
from model_store.names import notes_on_look_alikes
from model_store.records.inbox import ItemRecord
from model_store.records.manifest import Manifest
from model_store.store.store import Store
from model_store.tables import counted
from trainer.add_task import add_task, correct_images
from trainer.base import base_of
from trainer.data.folders import ClassFolder, Listing
from trainer.progress import Progress
from trainer.request import AddTask
from trainer.versions.outcome import Outcome


@dataclass(frozen=True, slots=True)
class _InboxPicture:
    """A picture that is read from the inbox on demand."""

    inbox: Inbox
    record: ItemRecord

    def __str__(self) -> str:
        return f"item {self.record.id}"

    def read_bytes(self) -> bytes:
        try:
            return self.inbox.picture(self.record)
        except ItemNotFound as error:
            raise _gone() from error
        except RecordInvalid as error:
            raise ImageRejected(str(error)) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class _LabelledPictures:
    """The pictures as a listing, and the number of the label record of each item."""

    listing: Listing
    numbers: Mapping[str, int]
    lost: int
    """Items that are left out: deleted meanwhile, damaged, or too few of a class."""


def refuse_if_gone(inbox: Inbox, items: Iterable[str]) -> None:
    """Raise PicturesGone if an item that a run has learnt from was deleted since."""

    def is_gone(item: str) -> bool:
        try:
            inbox.item(item)
        except ItemNotFound:
            return True
        return False

    if any(in_threads(is_gone, items)):
        raise _gone()


def _gone() -> PicturesGone:
    return PicturesGone(
        "pictures of the inbox that this run learns from were deleted meanwhile, so no version is "
        "kept; run it again without them"
    )


def list_pictures(
    inbox: Inbox, labels: Mapping[str, Sequence[LabelledItem]], *, folder: Path, fewest: int = 1
) -> _LabelledPictures:
    """List the pictures of each class. Leave out classes with fewer than `fewest` pictures.

    `folder` names the data; no folder is made.
    """
    folders = fill_class_folders(inbox, labels, fewest=fewest)
    classes = tuple(
        ClassFolder(name=name, files=tuple(_InboxPicture(inbox, record) for record in records))
        for name, records in folders.classes.items()
    )
    return _LabelledPictures(
        listing=Listing(folder=folder, classes=classes, ignored=()),
        numbers=folders.numbers,
        lost=sum(map(len, labels.values())) - len(folders.numbers),
    )


NAME = "inbox"
"""The name of a task whose classes come from the inbox, unless another one is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FromInbox:
    """The published versions in order, and the reason why each remaining label waits."""

    outcomes: tuple[Outcome, ...]
    left: Mapping[str, str] = field(default_factory=dict)

    @property
    def last(self) -> Outcome:
        return self.outcomes[-1]

    @property
    def any_refused(self) -> str | None:
        return next((each.any_refused for each in self.outcomes if each.any_refused), None)

    def as_json(self) -> dict[str, Any]:
        """Describe the last version, and the extension before it under `before`."""
        earlier = [outcome.as_json() for outcome in self.outcomes[:-1]]
        before = earlier[0] if earlier else None
        return {**self.last.as_json(), "before": before, "left": dict(self.left)}


def learn_from_inbox(
    request: AddTask,
    *,
    progress: Progress,
    but_used_by: Collection[int] = (),
    on_published: Callable[[Manifest], None] = lambda manifest: None,
) -> FromInbox:
    """Learn from the labels that wait. Leave out those that the versions `but_used_by` have used.

    The labels of a version are recorded as used before it is promoted, so every promoted version
    has its record. Then `on_published` is called; an error from it prevents the promotion.
    """
    _refuse_options(request)
    store = Store.open(request.store, keys=request.keys)
    head = base_of(request).parent
    index = open_index(Inbox(store.objects))
    waiting = find_waiting(store, index, head=head, but_used_by=but_used_by)
    _note_waiting(waiting, head, progress)
    run = _InboxRun(store=store, request=request, progress=progress, on_published=on_published)
    if any(store.manifest(version).corrected for version in but_used_by):
        waiting = replace(waiting, corrections=Corrections())  # they were learnt, and refused
    outcomes = run.learn(waiting)
    if not outcomes:
        raise NothingToLearn(_why_nothing(waiting, request))
    return FromInbox(outcomes=tuple(outcomes), left=waiting.left)


@dataclass(frozen=True, slots=True, kw_only=True)
class _InboxRun:
    """One run: corrections, an extension and a task, as far as there are any."""

    store: Store
    request: AddTask
    progress: Progress
    on_published: Callable[[Manifest], None]

    def learn(self, waiting: WaitingLabels) -> list[Outcome]:
        corrected = self._correct(waiting)
        extended = self._extend(waiting)
        added = self._learn(waiting.new, self.request, fewest=FEWEST_OF_NEW)
        return corrected + extended + added

    def _correct(self, waiting: WaitingLabels) -> list[Outcome]:
        """Fit the classifier again, with kept images in their right classes or taken out."""
        moves = waiting.corrections.waiting
        if not moves:
            return []
        names = classes_moved(moves)
        self.progress.note(f"corrected: {counted(len(moves), 'image')} of {', '.join(names)}")
        request = replace(_extension(self.request), on_published=self.on_published)
        try:
            return [correct_images(request, moves, progress=self.progress)]
        except (DataRejected, WrongUsage) as error:
            if not (waiting.known or waiting.new):
                raise
            self.progress.note(f"no correction: {error}")
            return []

    def _extend(self, waiting: WaitingLabels) -> list[Outcome]:
        """Extend known classes. Go on with the task if they cannot be extended: there is no new
        image, or other classes have no exemplars."""
        try:
            return self._learn(waiting.known, _extension(self.request))
        except (DataRejected, WrongUsage) as error:
            if not (waiting.new or waiting.corrections.waiting):
                raise
            self.progress.note(f"no extension: {error}")
            return []

    def _learn(
        self,
        labels: Mapping[str, Sequence[LabelledItem]],
        request: AddTask,
        *,
        fewest: int = 1,
    ) -> list[Outcome]:
        if not labels:
            return []
        inbox, folder = Inbox(self.store.objects), Path(NAME)
        pictures = list_pictures(inbox, labels, folder=folder, fewest=fewest)
        if pictures.lost:
            lost = counted(pictures.lost, "picture")
            self.progress.note(f"{lost} left out: deleted or damaged")
        if not pictures.listing.classes:
            return []

        def use(manifest: Manifest) -> None:
            _refuse_used(self.store, manifest, pictures)
            inbox.use(manifest.version, pictures.numbers, actor=request.actor)
            self.on_published(manifest)

        def check() -> None:
            refuse_if_gone(inbox, pictures.numbers)

        asked = replace(request, data=folder, before_publish=check, on_published=use)
        return [add_task(asked, progress=self.progress, listing=pictures.listing)]


def _refuse_used(store: Store, manifest: Manifest, pictures: _LabelledPictures) -> None:
    """Refuse to promote a version if an ancestor has used its labels: another run was faster."""
    used = used_labels(Inbox(store.objects), version_path(store, manifest).numbers)
    if any(used.get(item) == number for item, number in pictures.numbers.items()):
        raise ChannelMoved(
            f"another run has learnt these labels meanwhile, so version {manifest.version} is not "
            "promoted"
        )


def _extension(request: AddTask) -> AddTask:
    """Ask for an extension of known classes, without the options that are for a new task."""
    shape = replace(request.shape, heads=None)
    return replace(
        request, extend=True, name=None, quick=None, grow=None, hierarchy=None, shape=shape
    )


def _refuse_options(request: AddTask) -> None:
    if request.extend:
        raise WrongUsage("`from_inbox` extends known classes by itself: `extend` does not fit it")
    if request.val_data is not None:
        raise WrongUsage("`from_inbox` judges by held-out images: `val_data` does not fit it")
    if request.hierarchy == "folders":
        raise WrongUsage("`from_inbox` has no folders: give the groups as a file, `hierarchy=FILE`")


def _note_waiting(waiting: WaitingLabels, head: Manifest | None, progress: Progress) -> None:
    for kind, labels in (("more images of", waiting.known), ("new:", waiting.new)):
        if labels:
            counts = ", ".join(f"{name} ({len(items)})" for name, items in labels.items())
            progress.note(f"from the inbox, {kind} {counts}")
    for name, why in waiting.left.items():
        progress.note(f"left in the inbox: {name!r}: {why}")
    for correction, why in waiting.corrections.left:
        progress.note(f"left: the correction of an image of {correction.label!r}: {why}")
    for note in notes_on_look_alikes(waiting.left, known=head.classes if head else ()):
        progress.note(f"note: {note}")


def _why_nothing(waiting: WaitingLabels, request: AddTask) -> str:
    if waiting.left:
        reasons = "; ".join(f"{name!r}: {why}" for name, why in waiting.left.items())
        return f"no label of the inbox can be learnt from: {reasons}"[:1000]
    return (
        f"no label waits for learning on channel {request.channel}: label pictures on the server's "
        "page /label, or with `dne-store inbox label`"
    )
