"""Choose the sizes of the network: by preset or one by one for the first task, fixed after it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import partial

from model_store.errors import WrongUsage
from model_store.spec import MAX_PLACES, MAX_TASKS, NetworkSpec
from trainer.options import option

HEADS_FROM_IMAGES = ((10_000, 4), (4_000, 2), (0, 1))
"""A later expert's heads, from this many images of its task on; see ADR 26."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    image_size: int
    patch_size: int
    depth: int
    heads: int


PRESETS = {
    "tiny": Preset(image_size=16, patch_size=4, depth=2, heads=4),
    "small": Preset(image_size=64, patch_size=8, depth=5, heads=6),
    "paper": Preset(image_size=32, patch_size=4, depth=5, heads=12),
}
DEFAULT_PRESET = "small"


_size = partial(option, group="the network (fixed by the first task)")


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkShape:
    """The sizes that the command line asks of the network. None: not asked."""

    preset: str | None = _size(None, "sizes to start from (small)", choices=list(PRESETS))
    image_size: int | None = _size(None, "pixels of an image's side", metavar="N")
    patch_size: int | None = _size(None, "pixels of a patch's side", metavar="N")
    depth: int | None = _size(None, "patch blocks", metavar="N")
    head_width: int | None = _size(None, "channels of an attention head", metavar="N")
    heads: int | None = option(
        None,
        "attention heads of the new expert (later tasks: 1, 2 or 4 by the number of images)",
        metavar="K",
    )

    def __post_init__(self) -> None:
        if self.preset is not None and self.preset not in PRESETS:
            raise WrongUsage(f"preset {self.preset!r} is not one of {', '.join(PRESETS)}")

    def first_network(self) -> NetworkSpec:
        """Describe the network before its first task: a preset's sizes, and those given instead."""
        sizes = {**_sizes(self.preset or DEFAULT_PRESET), **self._given()}
        plain = NetworkSpec(**sizes)  # type: ignore[arg-type]
        if MAX_TASKS * plain.depth * plain.patches**2 > MAX_PLACES:
            return plain  # gated, it could not grow to all its tasks, with one head in each
        return replace(plain, attention="gated", qkv_bias=False)

    def check_agrees(self, lineage: NetworkSpec) -> None:
        """Refuse sizes that differ from the fixed ones; a later task may only repeat them."""
        preset = {} if self.preset is None else _sizes(self.preset)
        for name, asked in {**preset, **self._given()}.items():
            fixed = getattr(lineage, name)
            if asked != fixed:
                option = f"--{name.replace('_', '-')} {asked}"
                if name not in self._given():
                    option = f"--preset {self.preset} ({option})"
                raise WrongUsage(
                    f"{option} does not fit: the first task has fixed {name} {fixed} for this model"
                )

    def heads_of_first(self) -> int:
        preset = PRESETS[self.preset or DEFAULT_PRESET]
        return preset.heads if self.heads is None else self.heads

    def heads_of_later(self, *, images: int) -> int:
        """Choose the heads for a task of this many images, unless a number was asked for."""
        return heads_for(images) if self.heads is None else self.heads

    def _given(self) -> dict[str, int]:
        asked = asdict(self)
        del asked["preset"], asked["heads"]
        return {name: value for name, value in asked.items() if value is not None}


def heads_for(images: int) -> int:
    return next(heads for least, heads in HEADS_FROM_IMAGES if images >= least)


def _sizes(preset: str) -> dict[str, int]:
    sizes = asdict(PRESETS[preset])
    del sizes["heads"]
    return sizes
