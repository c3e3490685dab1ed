"""List the pre-trained backbones that have names here, and tell names from files.

Import no torch: the list is shown, and a wrong name refused, within a blink.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from pathlib import Path

from model_store.errors import WrongUsage

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_FILE_ENDINGS = (".safetensors", ".json", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownBackbone:
    """A repository of the Hugging Face Hub whose weights can be the first expert."""

    repository: str
    name: str | None = None
    revision: str | None = None
    """The commit that is taken; None: the newest one, which the version then records."""
    sha256: str | None = None
    """The digest of its weights, where it is known; None: what the Hub says of them counts."""
    licence: str | None = None
    megabytes: int | None = None
    gflop: float | None = None
    """For one image of 224 pixels."""
    good_for: str = ""

    @property
    def shown(self) -> str:
        return self.name or self.repository


KNOWN: tuple[KnownBackbone, ...] = (
    KnownBackbone(
        name="dinov2-small",
        repository="facebook/dinov2-small",
        revision="ed25f3a31f01632728cabb09d1542f84ab7b0056",
        sha256="ae1e99fcefd534ed978cdeb8326f08030c96e28b7a81ffcbc98a857c84d14be1",
        licence="apache-2.0",
        megabytes=88,
        gflop=11.2,
        good_for="photos, and telling what is like no class; begin with this one",
    ),
    KnownBackbone(
        name="vit-tiny",
        repository="timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k",
        licence="apache-2.0",
        megabytes=23,
        gflop=2.3,
        good_for="photos on slow machines: five times as fast, and a few points worse",
    ),
    KnownBackbone(
        name="dinov2-base",
        repository="facebook/dinov2-base",
        revision="f9e44c814b77203eaa57a6bdbbd535f21ede1415",
        licence="apache-2.0",
        megabytes=346,
        gflop=42.5,
        good_for="photos whose classes look much alike, where time matters less",
    ),
    KnownBackbone(
        name="dinov3-small",
        repository="timm/vit_small_patch16_dinov3.lvd1689m",
        revision="3bf4720a82ec2066db88137180ff1f83a675cef0",
        licence="dinov3-license",
        megabytes=86,
        gflop=8.8,
        good_for="photos; its licence has conditions of its own",
    ),
    KnownBackbone(
        name="eva02-small",
        repository="timm/eva02_small_patch14_224.mim_in22k",
        revision="79c7d4274f6dbf202549d8f976ae24eeaf97e5ad",
        licence="mit",
        megabytes=86,
        gflop=13.2,
        good_for="photos; learnt from pictures without labels, by filling in what was masked",
    ),
    KnownBackbone(
        name="clip-base",
        repository="openai/clip-vit-base-patch32",
        licence="mit",
        megabytes=605,
        gflop=8.1,
        good_for="drawings, logos, pictures with writing: learnt from captions",
    ),
    KnownBackbone(
        name="siglip2-base",
        repository="google/siglip2-base-patch16-224",
        licence="apache-2.0",
        megabytes=1502,
        gflop=35.0,
        good_for="as clip-base, newer, at four times the work; the file holds a text tower too",
    ),
)
"""The first one is what the documents and the messages tell people to begin with."""
FIRST = KNOWN[0]


def backbone_named(asked: str) -> KnownBackbone | None:
    """Return the backbone of a name or of owner/name. Return None for what is a file.

    Raise WrongUsage, which names the nearest ones, for a word that is neither.
    """
    known = {one.shown: one for one in KNOWN}
    if Path(asked).is_file() or asked.lower().endswith(_FILE_ENDINGS):
        return None
    if asked in known:
        return known[asked]
    if _REPOSITORY.fullmatch(asked):
        same = (one for one in KNOWN if one.repository == asked)
        return next(same, KnownBackbone(repository=asked))
    if "/" in asked or asked.startswith((".", "~")):
        return None
    near = difflib.get_close_matches(asked.lower(), known, n=3, cutoff=0.4) or list(known)
    raise WrongUsage(
        f"`pretrained={asked}` is neither a file nor a known backbone: did you mean "
        f"{' or '.join(near[:3])}? `dne-train backbones` lists all; owner/name takes any other of "
        "the Hugging Face Hub"
    )
