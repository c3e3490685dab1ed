"""Choose the sizes of a comparison: tasks, images, memory, networks and epochs."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Literal

from model_store.errors import WrongUsage
from model_store.spec import Stem

CIFAR_CLASSES = 100
"""Classes of a preset that takes all of the data set."""
MAY_BE_ZERO = ("memory", "tuning_epochs")

Part = Literal["table", "trial"]
"""`trial` takes classes that `table` never takes or, where a table has all classes, training images
that it never takes, also to test on: no choice is made by a test image of the table."""
Loss = Literal["cross-entropy", "balanced"]
"""`balanced`: balanced softmax, the cross-entropy of logits plus the logarithms of class counts."""
Changes = Literal["standard", "light", "gentle"]
"""The changes of training images: crop, flip and RandAugment; crop and flip; those of pre-trained
networks, which mirror nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    classes: int | None
    """Classes in all, or None for all that the data set has."""
    first: int
    """Classes of the first task."""
    step: int
    """Classes of each later task."""
    images: int | None
    """Training images a class, or None for all."""
    memory: int
    """Exemplars in all."""
    part: Part
    table_classes: int = 0
    """Classes that tables draw theirs from, always the same; trials draw from all others. 0: both
    draw from all classes."""
    domain: str = ""
    """The folder of the archive that holds `train` and `test`."""
    pretrained: str = ""
    """The file of weights, beside the archive, that a vision transformer begins with."""
    stem: Stem = "patches"
    """The way in which transformers make patches."""
    optimiser: Literal["adamw", "muon"] = "adamw"
    """`muon`: for the matrices and convolutions of transformers, beside AdamW for the rest."""
    loss: Loss = "cross-entropy"
    changes: Changes = "standard"
    exemplars: Literal["herded", "random"] = "herded"
    image_size: int
    patch_size: int
    depth: int
    """Patch blocks of the transformer, before its class-attention block."""
    heads: int
    """Heads of the first expert."""
    attention_heads: int = 0
    """The heads that its spatial attention is cut into; 0: the same."""
    resnet_width: int
    """Channels of the first stage of the ResNet-18; the full one has 64."""
    first_epochs: int
    epochs: int
    tuning_epochs: int
    batch_size: int
    rate: float
    """The learning rate of AdamW for transformers."""
    resnet_rate: float
    """The learning rate of SGD with momentum for ResNets."""
    fine_rate: float = 0.0
    """The learning rate of pre-trained weights."""
    fine_epochs: int = 0
    """Epochs of a task in which pre-trained weights change."""

    @property
    def recipe(self) -> str:
        """Tell in words how networks learn."""
        start = self.pretrained or f"{self.stem}, {self.optimiser}"
        return f"{start}, {self.loss}, {self.changes} changes, {self.exemplars} exemplars"


SHORT = Preset(
    classes=None,
    first=50,
    step=10,
    images=200,
    memory=800,
    part="table",
    image_size=32,
    patch_size=4,
    depth=3,
    heads=4,
    resnet_width=20,
    first_epochs=20,
    epochs=10,
    tuning_epochs=5,
    batch_size=128,
    rate=1e-3,
    resnet_rate=0.1,
)


CONVERGED = replace(
    SHORT,
    classes=30,
    first=10,
    step=5,
    images=500,
    memory=600,
    table_classes=60,
    stem="convolutions",
    optimiser="muon",
    loss="balanced",
    changes="light",
    exemplars="random",
    patch_size=8,
    first_epochs=20,
    epochs=10,
    tuning_epochs=0,
    batch_size=64,
    rate=2e-3,
)

SIGNS = Preset(
    classes=15,
    first=5,
    step=5,
    images=40,
    memory=120,
    part="table",
    table_classes=30,
    domain="signs",
    pretrained="vit_tiny_patch16_224.safetensors",
    loss="balanced",
    changes="gentle",
    exemplars="random",
    image_size=96,
    patch_size=16,
    depth=12,
    heads=6,
    attention_heads=3,
    resnet_width=0,
    first_epochs=20,
    epochs=20,
    tuning_epochs=0,
    batch_size=32,
    rate=8e-4,
    resnet_rate=0.0,
    fine_rate=1e-4,
    fine_epochs=8,
)

PRESETS = {
    "paper": replace(
        SHORT,
        images=None,
        memory=2000,
        depth=5,
        heads=12,
        resnet_width=64,
        first_epochs=500,
        epochs=500,
        tuning_epochs=20,
        rate=2.5e-4,
    ),
    "short": SHORT,
    "trial": replace(
        SHORT,
        classes=20,
        first=10,
        step=5,
        memory=160,
        part="trial",
        first_epochs=30,
        epochs=15,
        tuning_epochs=3,
    ),
    "converged": CONVERGED,
    "converged-trial": replace(CONVERGED, classes=20, memory=400, part="trial"),
    "signs": SIGNS,
    "signs-trial": replace(SIGNS, classes=13, step=4, memory=104, part="trial"),
    "mini": replace(
        SHORT,
        classes=6,
        first=2,
        step=2,
        images=20,
        memory=24,
        patch_size=8,
        depth=1,
        heads=2,
        resnet_width=4,
        first_epochs=3,
        epochs=2,
        tuning_epochs=1,
        batch_size=16,
    ),
}


def preset_named(name: str) -> Preset:
    if name not in PRESETS:
        raise WrongUsage(f"preset {name!r} is not one of {', '.join(PRESETS)}")
    return PRESETS[name]


def changed(preset: Preset, setting: str) -> Preset:
    """Change numbers of a preset by text such as `memory=200,step=5`."""
    known = [one.name for one in fields(Preset) if one.type == "int"]
    changes: dict[str, int] = {}
    for one in filter(None, setting.split(",")):
        name, _, value = one.partition("=")
        if name not in known:
            raise WrongUsage(f"there is no setting {name!r}; the settings: {', '.join(known)}")
        least = 0 if name in MAY_BE_ZERO else 1
        if not value.isdecimal() or int(value) < least:
            raise WrongUsage(f"--set {one}: {name} must be a whole number from {least} on")
        changes[name] = int(value)
    return replace(preset, **changes)  # type: ignore[arg-type]
