"""Define the manifest: the immutable JSON that describes one version."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from functools import cached_property, lru_cache
from typing import Annotated, Any, ClassVar, Literal, Protocol, Self

from pydantic import Field, model_validator

from model_store.errors import RecordInvalid, SpecInvalid
from model_store.records.hierarchy import Hierarchy
from model_store.records.quality import Accuracy as Accuracy
from model_store.records.quality import Calibration as Calibration
from model_store.records.quality import Metrics as Metrics
from model_store.records.quality import Unknown as Unknown
from model_store.records.sealing import (
    FORMAT,
    LATER,
    MAX_RECORD_BYTES,
    Count,
    Record,
    Sha256,
    Signature,
    Text,
    Timestamp,
    Transaction,
    Version,
    seal,
    unseal_record,
)
from model_store.spec import (
    MAX_TASKS,
    Activation,
    Attention,
    Backbone,
    ExpertSpec,
    NetworkSpec,
    Pooling,
    Readout,
    Stem,
    TaskSpec,
    Token,
)

ShardKind = Literal["expert", "classifier", "doubt", "memory", "held-out", "statistics"]
Scalar = str | int | float | bool | None

_KEPT_MANIFESTS = 32
_KEPT_SPECS = 8  # one may name many thousands of classes


class ShardRef(Record):
    """A shard by its digest. Its name follows: `shards/<first two>/<sha256>.safetensors`."""

    kind: ShardKind
    sha256: Sha256
    bytes: Count


LARGEST_MEAN, SMALLEST_STD = 1e6, 1e-6
"""Limits on the normalisation of pixels, which are between 0 and 1. Beyond them, numbers of 32 bits
become 0 or infinity."""
Mean = Annotated[float, Field(ge=-LARGEST_MEAN, le=LARGEST_MEAN)]
_Deviation = Annotated[float, Field(ge=SMALLEST_STD, le=LARGEST_MEAN)]


class Preprocessing(Record):
    """Settings for turning bytes into pixels, fixed by the first version of a lineage."""

    image_size: Annotated[int, Field(ge=1, le=4096)]
    resize: Literal["cover"] = "cover"
    interpolation: Literal["bilinear", "bicubic"] = "bicubic"
    mean: tuple[Mean, Mean, Mean] = (0.5, 0.5, 0.5)
    std: tuple[_Deviation, _Deviation, _Deviation] = (0.5, 0.5, 0.5)


class BackboneRecord(Record):
    """The ways in which a pre-trained first expert differs from the plain one."""

    registers: int
    rotary: bool
    activation: Activation
    pre_norm: bool
    qk_norm: bool
    hidden_norm: int
    pooling: Pooling


class ReadoutRecord(Record):
    """The earlier blocks that the slice of a pre-trained first expert holds features of."""

    blocks: tuple[int, ...]
    grid_block: int
    grid: int


class Geometry(Record):
    """The part of a `NetworkSpec` that the first task fixes."""

    image_size: int
    patch_size: int
    depth: int
    head_width: int
    mlp_ratio: int
    layer_norm_eps: float
    qkv_bias: bool
    token: Token
    attention: Annotated[Attention, Field(exclude_if=lambda kind: kind == "plain")] = "plain"
    """Left out where it is plain, as `LATER` members are."""
    stem: Annotated[Stem, Field(exclude_if=lambda kind: kind == "patches")] = "patches"
    backbone: Annotated[BackboneRecord | None, LATER] = None
    """None where the first expert is a plain transformer."""
    readout: Annotated[ReadoutRecord | None, LATER] = None
    """Left out where the first expert's slice is of its last block alone."""


class TaskRecord(Record):
    """One task: its classes, the shape of its expert, and the expert's shard."""

    name: str
    classes: tuple[str, ...]
    heads: int
    attention_heads: Annotated[int, Field(ge=0)]
    """The heads of the expert's own attention."""
    expert: ShardRef | None
    """None, with 0 heads: the task has a head only, which reads the experts that were there."""
    training: dict[str, Scalar] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _heads_of_an_expert(self) -> Self:
        if self.expert is None and (self.heads, self.attention_heads) != (0, 0):
            raise ValueError(f"task {self.name!r} has heads and no expert")
        if self.expert is not None and not (self.heads and self.attention_heads):
            raise ValueError(f"task {self.name!r} has an expert without heads")
        return self


class ClassImages(Record):
    """Images of one class: the first `count` of a shard."""

    class_name: str = Field(alias="class")
    shard: ShardRef
    count: Count
    groups: Annotated[tuple[Count, ...], LATER] = ()
    """A number for each image: images with the same one belong together. Left out where all are
    alone."""

    @model_validator(mode="after")
    def _a_group_each(self) -> Self:
        if self.groups and len(self.groups) != self.count:
            raise ValueError(f"{self.count} images of {self.class_name!r} have other groups")
        return self

    def first(self, count: int) -> Self:
        """Keep the first images only."""
        kept = min(self.count, count)
        return self.model_copy(update={"count": kept, "groups": self.groups[:kept]})


class ClassTokens(Record):
    """Statistics of the tokens of `count` images of one class."""

    class_name: str = Field(alias="class")
    shard: ShardRef
    count: Annotated[Count, Field(ge=1)]


class Draft(Record):
    """A version before it has a number."""

    format: Literal[1] = FORMAT
    parent: Version | None = None
    parent_digest: Sha256 | None = None
    transaction: Transaction
    network: Geometry
    preprocessing: Preprocessing
    tasks: Annotated[tuple[TaskRecord, ...], Field(min_length=1, max_length=MAX_TASKS)]
    classifier: ShardRef
    doubt: Annotated[ShardRef | None, LATER] = None
    """The score `log-odds` of `unknown`."""
    memory: tuple[ClassImages, ...] = ()
    held_out: tuple[ClassImages, ...] = ()
    statistics: Annotated[tuple[ClassTokens, ...], LATER] = ()
    retired: tuple[str, ...] = ()
    """Classes that are never answered any more. They keep their places among the logits."""
    extended: tuple[str, ...] = ()
    """Classes that got more images in this version, which then has no new task."""
    corrected: Annotated[Count, LATER] = 0
    """Kept images that this version moved to another class or took out; their classes are the
    extended ones."""
    deepened: Annotated[tuple[str, ...], LATER] = ()
    """Tasks that an expert was learnt for in this version, which then has no new task."""
    adapted: Annotated[bool, LATER] = False
    """True: this version has its parent's tasks, and a first expert that was changed for them."""
    hierarchy: Annotated[Hierarchy | None, LATER] = None
    """The groups above the classes."""
    calibration: Calibration = Calibration()
    unknown: Unknown | None = None
    metrics: Metrics = Metrics()
    created: Timestamp
    software: Text

    @model_validator(mode="after")
    def _coherent(self) -> Self:
        if (self.parent is None) != (self.parent_digest is None):
            raise ValueError("parent and parent_digest go together")
        try:
            spec = self.spec
        except SpecInvalid as error:
            raise ValueError(str(error)) from error
        if self.preprocessing.image_size != self.network.image_size:
            raise ValueError("preprocessing and network disagree on the image size")
        for what, entries in self._by_kind:
            names = [entry.class_name for entry in entries]
            if len(set(names)) != len(names) or not set(names) <= set(spec.classes):
                raise ValueError(f"the classes of {what} are not distinct classes of the tasks")
            if not set(names).isdisjoint(self.retired):
                raise ValueError(f"a class of {what} is retired")
            if any(entry.shard.kind != what for entry in entries):
                raise ValueError(f"a shard of {what} has another kind")
        retired = set(self.retired)
        if self.retired != tuple(name for name in spec.classes if name in retired):
            raise ValueError("the retired classes are not classes of the tasks, in their order")
        if len(retired) == len(spec.classes):
            raise ValueError("all classes are retired")
        kinds = {ref.kind for ref in self.experts} | {self.classifier.kind}
        if kinds != {"expert", "classifier"} or self.classifier.kind != "classifier":
            raise ValueError("an expert or classifier shard has another kind")
        if self.doubt is not None and self.doubt.kind != "doubt":
            raise ValueError("the doubt shard has another kind")
        by_token = self.unknown is not None and self.unknown.score == "log-odds"
        if by_token != (self.doubt is not None):
            raise ValueError("the score log-odds and a doubt shard go together")
        own = set(self.unknown.by_class) if self.unknown else set()
        if own and not (by_token and own <= set(spec.classes) - retired):
            raise ValueError("a threshold of a class without the score log-odds, or of no class")
        if len({ref.sha256 for ref in self.experts}) != len(self.experts):
            raise ValueError("two tasks name the same expert shard")
        self._check_deepened()
        self._check_adapted()
        self._check_shown()
        if self.hierarchy is not None:
            self.hierarchy.check_names(spec.classes)
        if len(set(self.extended)) != len(self.extended) or not set(self.extended) <= set(
            spec.classes
        ):
            raise ValueError("the extended classes are not distinct classes of the tasks")
        if self.extended and self.parent is None:
            raise ValueError("a first version extends nothing")
        if self.corrected and not self.extended:
            raise ValueError("images were corrected, and no class was")
        return self

    def _check_deepened(self) -> None:
        """The tasks that an expert was learnt for are the newest ones, and the last has it."""
        if not self.deepened:
            return
        if self.extended or self.parent is None:
            raise ValueError("a version that deepens tasks has a parent, and extends no class")
        newest = self.tasks[-len(self.deepened) :]
        if self.deepened != tuple(task.name for task in newest):
            raise ValueError("the deepened tasks are not the newest ones, in their order")
        if [task.expert is not None for task in newest] != [False] * (len(newest) - 1) + [True]:
            raise ValueError("of the deepened tasks, the last one and no other has the expert")

    def _check_adapted(self) -> None:
        """Younger experts read the first one, so an adapted one is alone."""
        if self.adapted and (self.parent is None or self.extended or self.deepened):
            raise ValueError("a version that adapts has a parent, and extends or deepens nothing")
        if self.adapted and len(self.experts) > 1:
            raise ValueError("an expert was adapted that younger ones read")

    def _check_shown(self) -> None:
        """The images of the report are held-out ones of this very version."""
        counts = {entry.class_name: entry.count for entry in self.held_out}
        if any(image.image >= counts.get(image.class_name, 0) for image in self.metrics.shown):
            raise ValueError("an image that is shown is not held out")

    @property
    def _by_kind(self) -> tuple[tuple[ShardKind, tuple[ClassImages | ClassTokens, ...]], ...]:
        return (
            ("memory", self.memory),
            ("held-out", self.held_out),
            ("statistics", self.statistics),
        )

    @property
    def kept_of_classes(self) -> tuple[ClassImages | ClassTokens, ...]:
        """Everything that is kept of single classes, and that can be forgotten with a class."""
        return tuple(entry for _, entries in self._by_kind for entry in entries)

    @cached_property
    def spec(self) -> NetworkSpec:
        shapes = tuple(
            (task.name, task.classes, task.heads, task.attention_heads, task.expert is not None)
            for task in self.tasks
        )
        return _spec_of(self.network, shapes)

    @property
    def classes(self) -> tuple[str, ...]:
        """The classes that the version answers, in the order of the logits: all but the retired
        ones. `spec.classes` names every logit."""
        return self.without_retired(self.spec.classes)

    @property
    def places(self) -> tuple[int, ...]:
        """The logits of `classes`."""
        retired = set(self.retired)
        return tuple(i for i, name in enumerate(self.spec.classes) if name not in retired)

    def without_retired(self, names: Iterable[str]) -> tuple[str, ...]:
        retired = set(self.retired)
        return tuple(name for name in names if name not in retired)

    @property
    def new_classes(self) -> tuple[str, ...]:
        """The classes that this version added; none if it extends classes that were there."""
        known = self.extended or self.deepened or self.adapted
        return () if known else self.tasks[-1].classes

    @property
    def experts(self) -> tuple[ShardRef, ...]:
        """The shards of the experts, oldest first."""
        return tuple(task.expert for task in self.tasks if task.expert is not None)

    @property
    def model_shards(self) -> tuple[ShardRef, ...]:
        """The shards that a server reads: experts, oldest first, then the classifier and, where
        there is one, the doubt shard."""
        doubt = () if self.doubt is None else (self.doubt,)
        return (*self.experts, self.classifier, *doubt)

    @property
    def image_shards(self) -> tuple[ShardRef, ...]:
        return tuple(entry.shard for entry in (*self.memory, *self.held_out))

    @property
    def shards(self) -> tuple[ShardRef, ...]:
        return (*self.model_shards, *(entry.shard for entry in self.kept_of_classes))


@lru_cache(maxsize=_KEPT_SPECS)
def _spec_of(
    network: Geometry, tasks: tuple[tuple[str, tuple[str, ...], int, int, bool], ...]
) -> NetworkSpec:
    """Make and check the network of a version. Versions that follow each other share it."""
    specs = tuple(
        TaskSpec(
            name=name,
            classes=classes,
            expert=ExpertSpec(heads=heads, attention_heads=attention_heads) if has_expert else None,
        )
        for name, classes, heads, attention_heads, has_expert in tasks
    )
    return spec_of(network, tasks=specs)


def spec_of(network: Geometry, *, tasks: tuple[TaskSpec, ...]) -> NetworkSpec:
    """Make and check a network: the way back from `geometry_of`."""
    shared = {name: getattr(network, name) for name in Geometry.model_fields}
    if network.backbone is not None:
        shared["backbone"] = Backbone(**network.backbone.model_dump())
    if network.readout is not None:
        shared["readout"] = Readout(**network.readout.model_dump())
    return NetworkSpec(**shared, tasks=tasks)


class Signs(Protocol):
    """Anything that signs records for one store."""

    def sign(self, body: dict[str, Any], *, kind: str, store: str) -> Signature: ...


class Manifest(Draft):
    """A version with its number."""

    signed_kind: ClassVar[str] = "manifest"
    version: Version
    signature: Signature | None = None
    digest: Sha256

    @model_validator(mode="after")
    def _older_parent(self) -> Self:
        if self.parent is not None and self.parent >= self.version:
            raise ValueError("a parent is older than its child")
        return self


def task_record(
    task: TaskSpec, *, expert: ShardRef | None, training: dict[str, Scalar] | None = None
) -> TaskRecord:
    """Describe a task, with the shard of its expert if it has one."""
    shape = task.expert
    return TaskRecord(
        name=task.name,
        classes=task.classes,
        heads=shape.heads if shape else 0,
        attention_heads=shape.attention_heads if shape else 0,
        expert=expert,
        training=training or {},
    )


def geometry_of(spec: NetworkSpec) -> Geometry:
    """Return the part of a spec that all tasks share."""
    values = {name: getattr(spec, name) for name in Geometry.model_fields}
    if spec.backbone is not None:
        values["backbone"] = BackboneRecord(**asdict(spec.backbone))
    if spec.readout is not None:
        values["readout"] = ReadoutRecord(**asdict(spec.readout))
    return Geometry(**values)


def encode(draft: Draft, *, version: int, store: str = "", signer: Signs | None = None) -> bytes:
    """Seal the manifest of a new version. A signature covers its number and `store`, the id of the
    store, too."""
    body = {**_body(draft), "version": version}
    signature = None
    if signer is not None:
        signature = signer.sign(body, kind=Manifest.signed_kind, store=store).model_dump()
    return seal({**body, "signature": signature})


def decode(name: str, sealed: bytes, *, version: int) -> Manifest:
    """Read a sealed manifest, and check that it is the manifest of `version`."""
    manifest = _as_written(sealed)
    if manifest is not None and manifest.version == version:
        return manifest
    manifest = unseal_record(name, sealed, Manifest)
    if manifest.version != version:
        raise RecordInvalid(name, f"it says it is version {manifest.version}")
    raise RecordInvalid(name, "a field is missing or spelt in another way")


@lru_cache(maxsize=_KEPT_MANIFESTS)
def _as_written(sealed: bytes) -> Manifest | None:
    """Read a manifest that this software would write with these very bytes, which are then
    canonical and have the right digest. Return None for any other bytes: `decode` tells why.

    Kept by its bytes: runs and servers meet the same versions again and again.
    """
    if len(sealed) > MAX_RECORD_BYTES:
        return None
    try:
        manifest = Manifest.model_validate_json(sealed)
        return manifest if reseal(manifest) == sealed else None
    except (ValueError, RecursionError):  # not a manifest, or one without a canonical form
        return None


def reseal(manifest: Manifest) -> bytes:
    """Write a manifest that was read with the bytes that it was read from."""
    return seal(manifest.model_dump(mode="json", by_alias=True, exclude={"digest"}))


def delta_of(child: Draft, parent: Draft | None) -> tuple[ShardRef, ...]:
    """List the model shards that `child` has and `parent` has not."""
    known = {ref.sha256 for ref in parent.model_shards} if parent else set()
    return tuple(ref for ref in child.model_shards if ref.sha256 not in known)


def total_bytes(refs: tuple[ShardRef, ...]) -> int:
    """Sum the sizes of shards, each counted once."""
    return sum({ref.sha256: ref.bytes for ref in refs}.values())


def _body(draft: Draft) -> dict[str, Any]:
    """Return every member but those that follow from the others."""
    return draft.model_dump(mode="json", by_alias=True, exclude={"digest", "signature"})
