"""The network before its first task: of a preset's sizes, or around a pre-trained expert."""

from __future__ import annotations

from dataclasses import dataclass, replace

from model_store.errors import WrongUsage
from model_store.network.expert import Expert
from model_store.records.manifest import Preprocessing
from model_store.spec import ExpertSpec, NetworkSpec
from model_store.tables import counted
from trainer.learning.presets import Shape
from trainer.learning.pretrained import Pretrained, read_pretrained
from trainer.progress import Progress
from trainer.request import AddTask, FromFile

Triple = tuple[float, float, float]

NORMALISATIONS: dict[str, tuple[Triple, Triple]] = {
    "half": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What the first task adds its classes to."""

    geometry: NetworkSpec
    expert: ExpertSpec
    preprocessing: Preprocessing
    weights: Pretrained | None = None
    unfreeze_last: int = 0

    def give(self, expert: Expert) -> None:
        """Puts the pre-trained weights, if there are any, into the first expert."""
        if self.weights is not None:
            self.weights.load_into(expert, geometry=self.geometry)
            expert.fix(but_last=self.unfreeze_last)


def refuse_pretrained(request: AddTask) -> None:
    """For a store that has versions: their first expert is what it is."""
    if request.pretrained is not None:
        raise WrongUsage(
            f"--pretrained is for the first task of a store, and {request.store} has versions; "
            "later tasks build on what the first one began with"
        )


def start_of(request: AddTask, *, progress: Progress) -> Start:
    if request.pretrained is None:
        geometry = request.shape.first_network()
        return Start(
            geometry=geometry,
            expert=ExpertSpec(heads=request.shape.heads_of_first()),
            preprocessing=Preprocessing(image_size=geometry.image_size),
        )
    return _pretrained_start(request.pretrained, request.shape, progress=progress)


def _pretrained_start(asked: FromFile, shape: Shape, *, progress: Progress) -> Start:
    if shape.preset is not None:
        raise WrongUsage(
            f"--preset {shape.preset} does not go with --pretrained: the file has its own sizes"
        )
    mean, std = normalisation_named(asked.normalise)
    weights = read_pretrained(asked.file, attention_heads=asked.attention_heads)
    geometry = weights.geometry
    if shape.image_size is not None:  # position embeddings can be had for any
        geometry = replace(geometry, image_size=shape.image_size)
    _refuse_other_sizes(shape, geometry, weights.expert)
    if asked.unfreeze_last > geometry.depth:
        raise WrongUsage(
            f"--unfreeze-last {asked.unfreeze_last}: {asked.file} has "
            f"{counted(geometry.depth, 'block')}"
        )
    heads = counted(weights.expert.attention_heads, "attention head")
    progress.note(
        f"starting from {asked.file}: {counted(geometry.depth, 'block')}, {weights.width} "
        f"channels, {heads}, images of {geometry.image_size} pixels, normalised with "
        f"{asked.normalise}"
    )
    return Start(
        geometry=geometry,
        expert=weights.expert,
        preprocessing=Preprocessing(image_size=geometry.image_size, mean=mean, std=std),
        weights=weights,
        unfreeze_last=asked.unfreeze_last,
    )


def _refuse_other_sizes(shape: Shape, geometry: NetworkSpec, expert: ExpertSpec) -> None:
    fixed = {
        "patch_size": geometry.patch_size,
        "depth": geometry.depth,
        "head_width": geometry.head_width,
        "heads": expert.heads,
    }
    for name, value in fixed.items():
        asked = getattr(shape, name)
        if asked is not None and asked != value:
            option = f"--{name.replace('_', '-')} {asked}"
            raise WrongUsage(f"{option} does not fit: the pre-trained file has fixed it at {value}")


def normalisation_named(text: str) -> tuple[Triple, Triple]:
    """Mean and deviation: `half`, `imagenet`, or the numbers themselves, `M,M,M/S,S,S`."""
    if text in NORMALISATIONS:
        return NORMALISATIONS[text]
    try:
        (m1, m2, m3), (s1, s2, s3) = (
            [float(number) for number in part.split(",")] for part in text.split("/")
        )
    except ValueError as error:
        raise WrongUsage(
            f"--normalise {text!r} is neither imagenet, half nor M,M,M/S,S,S"
        ) from error
    if not all(0 < one < float("inf") for one in (s1, s2, s3)) or not all(
        abs(one) < float("inf") for one in (m1, m2, m3)
    ):
        raise WrongUsage(f"--normalise {text!r}: deviations must be above 0, and all finite")
    return (m1, m2, m3), (s1, s2, s3)
