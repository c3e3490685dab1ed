"""Learn from all labels of the inbox that no version behind the channel's head has used.

Images of known classes extend them, in a version of their own. Then new names become a task, in the
next version. The extension comes first: the new task is learnt with its images in the memory.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from model_store.errors import ChannelMoved, DataRejected, NothingToLearn, WrongUsage
from model_store.inbox.inbox import Inbox
from model_store.inbox.reading import Labelled, open_index, used_labels
from model_store.jobs.waiting import FEWEST_OF_NEW, Waiting, find_waiting, lineage_of
from model_store.names import notes_on_look_alikes
from model_store.records.manifest import Manifest
from model_store.store.store import Store
from model_store.tables import counted
from trainer.base import base_of
from trainer.inbox.pictures import Pictures, write_pictures
from trainer.progress import Progress
from trainer.request import AddTask

if TYPE_CHECKING:
    from trainer.data.folders import Listing
    from trainer.versions.outcome import Outcome

NAME = "inbox"
"""The name of a task whose classes come from the inbox, unless another one is given."""


class AddsTask(Protocol):
    """`trainer.add_task.add_task`, which is given and not imported: it stands on much."""

    def __call__(
        self, request: AddTask, *, progress: Progress, listing: Listing | None
    ) -> Outcome: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FromInbox:
    """The versions that were published, in order, and the labels that still wait."""

    outcomes: tuple[Outcome, ...]
    left: Mapping[str, str] = field(default_factory=dict)

    @property
    def last(self) -> Outcome:
        return self.outcomes[-1]

    @property
    def any_refused(self) -> str | None:
        return next((one.any_refused for one in self.outcomes if one.any_refused), None)

    def as_json(self) -> dict[str, Any]:
        """Describe the last version, and under `before` the extension that came first."""
        earlier = [one.as_json() for one in self.outcomes[:-1]]
        before = earlier[0] if earlier else None
        return {**self.last.as_json(), "before": before, "left": dict(self.left)}


def learn_from_inbox(
    request: AddTask,
    *,
    add_task: AddsTask,
    progress: Progress,
    but_used_by: Collection[int] = (),
    on_published: Callable[[Manifest], None] = lambda manifest: None,
) -> FromInbox:
    """Learn from the labels that wait. Those that the versions `but_used_by` have used do not wait.

    A version's labels are recorded as used before it is promoted, so no version behind the head
    lacks its record. `on_published` is called after that; an error from it prevents the promotion.
    """
    _refuse_options(request)
    store = Store.open(request.store)
    head = base_of(request).parent
    index = open_index(Inbox(store.objects))
    waiting = find_waiting(store, index, head=head, but_used_by=but_used_by)
    _say(waiting, head, progress)
    run = _Run(
        store=store,
        request=request,
        add_task=add_task,
        progress=progress,
        on_published=on_published,
    )
    outcomes = run.learn(waiting)
    if not outcomes:
        raise NothingToLearn(_nothing(waiting, request))
    return FromInbox(outcomes=tuple(outcomes), left=waiting.left)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """One run: at most an extension, and then at most a task."""

    store: Store
    request: AddTask
    add_task: AddsTask
    progress: Progress
    on_published: Callable[[Manifest], None]

    def learn(self, waiting: Waiting) -> list[Outcome]:
        with tempfile.TemporaryDirectory(prefix="dne-inbox-") as folder:
            outcomes = self._extend(waiting, Path(folder, "known", NAME))
            return outcomes + self._add(waiting, Path(folder, "new", NAME))

    def _extend(self, waiting: Waiting, folder: Path) -> list[Outcome]:
        """Extend known classes. An extension that cannot be does not stop the task: one without a
        new image, or without exemplars of the other classes."""
        try:
            return self._learn(waiting.known, _extension(self.request), folder)
        except (DataRejected, WrongUsage) as error:
            if not waiting.new:
                raise
            self.progress.note(f"no extension: {error}")
            return []

    def _add(self, waiting: Waiting, folder: Path) -> list[Outcome]:
        return self._learn(waiting.new, self.request, folder, fewest=FEWEST_OF_NEW)

    def _learn(
        self,
        labels: Mapping[str, Sequence[Labelled]],
        request: AddTask,
        folder: Path,
        *,
        fewest: int = 1,
    ) -> list[Outcome]:
        if not labels:
            return []
        pictures = write_pictures(Inbox(self.store.objects), labels, folder=folder, fewest=fewest)
        if pictures.lost:
            lost = counted(pictures.lost, "picture")
            self.progress.note(f"{lost} left out, being deleted or damaged")
        if not pictures.listing.classes:
            return []

        def use(manifest: Manifest) -> None:
            _refuse_used(self.store, manifest, pictures)
            inbox = Inbox(self.store.objects)
            inbox.use(manifest.version, pictures.numbers, actor=request.actor)
            self.on_published(manifest)

        asked = replace(request, data=folder, on_published=use)
        return [self.add_task(asked, progress=self.progress, listing=pictures.listing)]


def _refuse_used(store: Store, manifest: Manifest, pictures: Pictures) -> None:
    """Refuse to promote a version whose ancestors have these labels: another run was faster."""
    used = used_labels(Inbox(store.objects), lineage_of(store, manifest).numbers)
    if any(used.get(item) == number for item, number in pictures.numbers.items()):
        raise ChannelMoved(
            f"another run has learnt these labels meanwhile, so version {manifest.version} is not "
            "promoted"
        )


def _extension(request: AddTask) -> AddTask:
    """Ask for more images of known classes; options of a new task do not concern them."""
    shape = replace(request.shape, heads=None)
    return replace(request, extend=True, name=None, quick=None, hierarchy=None, shape=shape)


def _refuse_options(request: AddTask) -> None:
    if request.extend:
        raise WrongUsage("--from-inbox extends known classes by itself: --extend does not fit it")
    if request.val_data is not None:
        raise WrongUsage("--from-inbox judges by held-out images: --val-data does not fit it")
    if request.hierarchy == "folders":
        raise WrongUsage("--from-inbox has no folders: give the groups as a file to --hierarchy")


def _say(waiting: Waiting, head: Manifest | None, progress: Progress) -> None:
    for what, labels in (("more images of", waiting.known), ("new:", waiting.new)):
        if labels:
            each = ", ".join(f"{name} ({len(some)})" for name, some in labels.items())
            progress.note(f"from the inbox, {what} {each}")
    for name, why in waiting.left.items():
        progress.note(f"left in the inbox: {name!r}: {why}")
    for note in notes_on_look_alikes(waiting.left, known=head.classes if head else ()):
        progress.note(f"note: {note}")


def _nothing(waiting: Waiting, request: AddTask) -> str:
    if waiting.left:
        each = "; ".join(f"{name!r}: {why}" for name, why in waiting.left.items())
        return f"no label of the inbox can be learnt from: {each}"[:1000]
    return (
        f"no label waits for learning on channel {request.channel}: label pictures on the server's "
        "page /label, or with `dne-store inbox label`"
    )
