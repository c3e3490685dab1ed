"""Choose the network that the first task adds its classes to, and its first weights."""

from __future__ import annotations

from dataclasses import dataclass, replace

from model_store.errors import WrongUsage
from model_store.network.expert import Expert
from model_store.records.manifest import Preprocessing
from model_store.spec import ExpertSpec, NetworkSpec, Readout
from model_store.tables import counted
from trainer.backbones.hub import WeightsFile, find_weights
from trainer.backbones.known import FIRST
from trainer.backbones.pretrained import Pretrained, read_pretrained
from trainer.backbones.settings import Triple
from trainer.backbones.shapes import HALF, IMAGENET
from trainer.progress import Progress
from trainer.request import AddTask, NetworkShape, PretrainedFile

NORMALISATIONS: dict[str, tuple[Triple, Triple]] = {"half": HALF, "imagenet": IMAGENET}
_READ_AT = (4 / 12, 6 / 12, 8 / 12, 10 / 12)
"""The places of earlier blocks that a wide readout reads, as shares of the depth."""
_FEW_A_CLASS = 300
"""Images of a class below which a start from scratch has to be meant."""
GRID_AT, GRID = 6 / 12, 3
"""The place of the block that is read on a grid, and the cells of a side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The network that the first task adds its classes to."""

    geometry: NetworkSpec
    expert: ExpertSpec
    preprocessing: Preprocessing
    weights: Pretrained | None = None
    found: WeightsFile | None = None
    unfreeze_last: int = 0
    readout_is_open: bool = False
    """The readout of earlier blocks is given up unless cross-validation asks for it."""

    def give(self, expert: Expert) -> None:
        """Put the pre-trained weights, if there are any, into the first expert."""
        if self.weights is not None:
            self.weights.load_into(expert, geometry=self.geometry)
            expert.fix(but_last=self.unfreeze_last)


def start_of(request: AddTask, *, images: int, classes: int, progress: Progress) -> Start:
    if request.pretrained is None:
        _say_what_to_expect(request, images=images, classes=classes, progress=progress)
        geometry = request.shape.first_network()
        return Start(
            geometry=geometry,
            expert=ExpertSpec(heads=request.shape.heads_of_first()),
            preprocessing=Preprocessing(image_size=geometry.image_size),
        )
    return _pretrained_start(request.pretrained, request.shape, progress=progress)


def _say_what_to_expect(request: AddTask, *, images: int, classes: int, progress: Progress) -> None:
    """Say that so few images are better learnt after a pre-trained start, unless this is meant."""
    is_meant = request.from_scratch or request.shape != NetworkShape()
    if is_meant or images >= _FEW_A_CLASS * classes:
        return
    progress.note(
        f"note: without a pre-trained start {counted(images, 'photo')} of "
        f"{counted(classes, 'class', 'classes')} usually end below 60 % after long learning: stop "
        f"with Ctrl-C, and begin with --pretrained {FIRST.shown}; --from-scratch says that this is "
        "meant"
    )


def _pretrained_start(asked: PretrainedFile, shape: NetworkShape, *, progress: Progress) -> Start:
    if shape.preset is not None:
        raise WrongUsage(
            f"`preset={shape.preset}` does not go with `pretrained`: the file has its own sizes"
        )
    # A wrong option is refused before a large file is read.
    normalisation = None if asked.normalise is None else normalisation_named(asked.normalise)
    found = find_weights(str(asked.file), note=progress.note)
    weights = read_pretrained(found.file, attention_heads=asked.attention_heads)
    mean, std = normalisation or weights.normalisation
    geometry = weights.geometry
    if shape.image_size is not None:  # position embeddings can be resized
        geometry = replace(geometry, image_size=shape.image_size)
    _refuse_other_sizes(shape, geometry, weights.expert)
    if asked.unfreeze_last > geometry.depth:
        raise WrongUsage(
            f"`unfreeze_last={asked.unfreeze_last}`: {asked.file} has "
            f"{counted(geometry.depth, 'block')}"
        )
    readout = None if asked.readout == "narrow" else _wide_readout(geometry)
    if asked.readout == "wide" and readout is None:
        raise WrongUsage(f"`readout=wide`: {asked.file} has no block before its last one")
    heads = counted(weights.expert.attention_heads, "attention head")
    progress.note(
        f"starting from {found.repository or found.file}: {counted(geometry.depth, 'block')}, "
        f"{weights.width} channels, {heads}, images of {geometry.image_size} pixels, normalised "
        f"with {_named_normalisation(mean, std)}"
    )
    return Start(
        geometry=replace(geometry, readout=readout),
        expert=weights.expert,
        readout_is_open=asked.readout == "auto" and readout is not None,
        preprocessing=Preprocessing(image_size=geometry.image_size, mean=mean, std=std),
        weights=weights,
        found=found,
        unfreeze_last=asked.unfreeze_last,
    )


def _wide_readout(geometry: NetworkSpec) -> Readout | None:
    """Choose the earlier blocks to read: 4, 6, 8 and 10 of 12, and a grid of block 6 (ADR 92).

    Return None where there is only one block.
    """
    depth, side = geometry.depth, geometry.image_size // geometry.patch_size
    chosen = {max(1, round(share * depth)) for share in _READ_AT}
    blocks = tuple(sorted(block for block in chosen if block < depth))
    if not blocks:
        return None
    middle = min(blocks, key=lambda block: abs(block - GRID_AT * depth))
    return Readout(blocks=blocks, grid_block=middle, grid=min(GRID, side))


def _refuse_other_sizes(shape: NetworkShape, geometry: NetworkSpec, expert: ExpertSpec) -> None:
    fixed = {
        "patch_size": geometry.patch_size,
        "depth": geometry.depth,
        "head_width": geometry.head_width,
        "stem": geometry.stem,
        "heads": expert.heads,
    }
    for name, value in fixed.items():
        asked = getattr(shape, name)
        if asked is not None and asked != value:
            raise WrongUsage(
                f"`{name}={asked}` does not fit: the pre-trained file has fixed it at {value}"
            )


def _named_normalisation(mean: Triple, std: Triple) -> str:
    """Return the value of `normalise` for these numbers."""
    for name, known in NORMALISATIONS.items():
        if known == (mean, std):
            return name
    return "/".join(",".join(f"{one:g}" for one in part) for part in (mean, std))


def normalisation_named(text: str) -> tuple[Triple, Triple]:
    """Return mean and deviation of `half`, of `imagenet`, or of the numbers `M,M,M/S,S,S`."""
    if text in NORMALISATIONS:
        return NORMALISATIONS[text]
    try:
        (m1, m2, m3), (s1, s2, s3) = (
            [float(number) for number in part.split(",")] for part in text.split("/")
        )
    except ValueError as error:
        raise WrongUsage(
            f"`normalise={text!r}` is neither imagenet, half nor M,M,M/S,S,S"
        ) from error
    if not all(0 < one < float("inf") for one in (s1, s2, s3)) or not all(
        abs(one) < float("inf") for one in (m1, m2, m3)
    ):
        raise WrongUsage(f"`normalise={text!r}`: deviations must be above 0, and all finite")
    return (m1, m2, m3), (s1, s2, s3)


def refuse_pretrained(request: AddTask) -> None:
    """Refuse a pre-trained file for a store that has versions: their first expert is fixed."""
    if request.from_scratch:
        raise WrongUsage(
            f"`from_scratch` is for the first task of a store, and {request.store} has versions"
        )
    if request.pretrained is not None:
        raise WrongUsage(
            f"`pretrained` is for the first task of a store, and {request.store} has versions; "
            "later tasks build on what the first one began with"
        )
