"""What `dne-train add-task` is asked, and what it builds on."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from model_store.errors import StoreNotFound, WrongUsage
from model_store.records.channel import ChannelRecord
from model_store.records.manifest import ClassImages, Manifest, ShardRef
from model_store.records.signing import Signer
from model_store.store.making import check_location
from model_store.store.publish import next_version
from model_store.store.store import Store
from trainer.evaluation.gate import Limits
from trainer.evaluation.unknown import RATE
from trainer.learning.plan import Effort
from trainer.learning.presets import Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class FromFile:
    """A pre-trained file to begin with."""

    file: Path
    normalise: str = "half"
    unfreeze_last: int = 0
    """Blocks that the first task may change; 0: none of its weights."""
    attention_heads: int | None = None
    """None: by the custom of its width."""

    def __post_init__(self) -> None:
        if self.unfreeze_last < 0:
            raise WrongUsage(f"--unfreeze-last must be 0 or more, not {self.unfreeze_last}")


@dataclass(frozen=True, slots=True, kw_only=True)
class AddTask:
    """What `dne-train add-task` is asked."""

    store: str
    data: Path
    channel: str = "production"
    name: str | None = None
    extend: bool = False
    """More images for classes that exist, and no new task."""
    val_data: Path | None = None
    shape: Shape = field(default_factory=Shape)
    pretrained: FromFile | None = None
    effort: Effort = field(default_factory=Effort)
    augment: str = "auto"
    flip: bool | None = None
    loss: str = "cross-entropy"
    memory: int = 2000
    seed: int = 0
    promote: bool = True
    limits: Limits = field(default_factory=Limits)
    unknown_rate: float = RATE
    skip_bad: bool = False
    device: str = "auto"
    actor: str = "unknown"
    signer: Signer | None = None
    reason: str = ""
    checkpoint: Path | None = None
    """The folder where the run is kept each epoch; None: nowhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """What a task is learnt on top of: the channel as it was when training began."""

    location: str
    store: Store | None
    """None before the first version: the store is made when there is something to publish."""
    head: ChannelRecord | None
    parent: Manifest | None

    def read_shard(self, ref: ShardRef) -> bytes:
        assert self.store is not None, "without a store there is no shard to ask for"
        return self.store.read_shard(ref)

    def made_store(self) -> Store:
        """Open the store, and make it where there is none."""
        return self.store or Store.create(self.location)

    def store_now(self) -> Store | None:
        """Open the store where there is one by now."""
        try:
            return self.store or Store.open(self.location)
        except StoreNotFound:
            return None

    @property
    def memory(self) -> tuple[ClassImages, ...]:
        """The parent's exemplars, but for those that were forgotten since."""
        return self._remembered(self.parent.memory) if self.parent else ()

    @property
    def held_out(self) -> tuple[ClassImages, ...]:
        return self._remembered(self.parent.held_out) if self.parent else ()

    def _remembered(self, entries: tuple[ClassImages, ...]) -> tuple[ClassImages, ...]:
        forgotten = self.store.forgotten() if self.store else ()
        return tuple(entry for entry in entries if entry.shard.sha256 not in forgotten)


def base_of(request: AddTask) -> Base:
    """The store, if it is there, and what its channel names now. A place where none can be made
    is refused now, and not after the training."""
    try:
        store = Store.open(request.store)
    except StoreNotFound:
        check_location(request.store)
        return Base(location=request.store, store=None, head=None, parent=None)
    head = store.head(request.channel)
    newest = store.newest()
    if head is None and newest is not None:
        raise WrongUsage(
            f"channel {request.channel} names no version to build on; choose one with "
            f"`dne-store promote {newest} --channel {request.channel}`"
        )
    parent = store.resolve(head) if head else None
    next_version(store)  # where none is left, that is said now too
    return Base(location=request.store, store=store, head=head, parent=parent)
