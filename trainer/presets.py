"""Choose the sizes of the network: by preset or one by one for the first task, fixed after it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from model_store.errors import WrongUsage
from model_store.spec import MAX_PLACES, MAX_TASKS, NetworkSpec

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


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkShape:
    """The sizes that are asked of the network. None: not asked."""

    preset: str | None = None
    image_size: int | None = None
    """Pixels of an image's side."""
    patch_size: int | None = None
    """Pixels of a patch's side."""
    depth: int | None = None
    head_width: int | None = None
    """Channels of an attention head."""
    heads: int | None = None
    """Attention heads of the new expert. A later task's are chosen by the number of its images."""

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
                setting = f"`{name}={asked}`"
                if name not in self._given():
                    setting = f"`preset={self.preset}` ({setting})"
                raise WrongUsage(
                    f"{setting} does not fit: the first task has fixed {name} {fixed} for this "
                    "model"
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
