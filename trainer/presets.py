"""The sizes that a first task may choose from, and what the first task has fixed for all others."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from model_store.errors import WrongUsage
from model_store.spec import NetworkSpec

HEADS_OF_A_LATER_TASK = 1


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
class Shape:
    """What the command line asks of the network. None: not asked."""

    preset: str | None = None
    image_size: int | None = None
    patch_size: int | None = None
    depth: int | None = None
    head_width: int | None = None
    heads: int | None = None

    def __post_init__(self) -> None:
        if self.preset is not None and self.preset not in PRESETS:
            raise WrongUsage(f"preset {self.preset!r} is not one of {', '.join(PRESETS)}")

    def first_network(self) -> NetworkSpec:
        """The network before its first task: the preset's sizes, and those given instead."""
        sizes = {**_sizes(self.preset or DEFAULT_PRESET), **self._given()}
        return NetworkSpec(**sizes)  # type: ignore[arg-type]

    def check_agrees(self, lineage: NetworkSpec) -> None:
        """Sizes may be repeated for a later task, and nothing else: they are fixed."""
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

    def heads_of_next(self, lineage: NetworkSpec) -> int:
        if self.heads is not None:
            return self.heads
        first = PRESETS[self.preset or DEFAULT_PRESET].heads
        return HEADS_OF_A_LATER_TASK if lineage.tasks else first

    def _given(self) -> dict[str, int]:
        asked = asdict(self)
        del asked["preset"], asked["heads"]
        return {name: value for name, value in asked.items() if value is not None}


def _sizes(preset: str) -> dict[str, int]:
    sizes = asdict(PRESETS[preset])
    del sizes["heads"]
    return sizes
