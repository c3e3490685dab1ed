"""Read what `config.json` and `preprocessor_config.json` beside a file say about its model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

from model_store.errors import DataRejected
from model_store.records.manifest import LARGEST_MEAN, SMALLEST_STD
from model_store.spec import Activation
from trainer.backbones.files import read_json

LARGEST = 1e30  # infinity and NaN do not count as numbers here
_SMALLEST = 1e-30  # less becomes 0 in float32
Triple = tuple[float, float, float]

ACTIVATIONS: Mapping[str, Activation] = {
    "gelu": "gelu",
    "quick_gelu": "quick-gelu",
    "gelu_pytorch_tanh": "tanh-gelu",
    "gelu_new": "tanh-gelu",
    "silu": "swiglu",
}
"""The activations of `transformers`. It names that of SwiGLU alone, and not its gate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSettings:
    """The facts that no tensor tells. None: the files do not say."""

    source: Path | None = None
    """The file that says most of it."""
    width: int | None = None
    attention_heads: int | None = None
    layer_norm_eps: float | None = None
    activation: Activation | None = None
    image_size: int | None = None
    rope_theta: float | None = None
    normalisation: tuple[Triple, Triple] | None = None


def read_settings(file: Path) -> FileSettings:
    """Read the settings beside a file. Raise DataRejected for values that make no sense."""
    config = file.parent / "config.json"
    settings = _model_settings(config) if config.is_file() else FileSettings()
    preprocessing = file.parent / "preprocessor_config.json"
    if not preprocessing.is_file():
        return settings
    said = _Said(preprocessing, read_json(preprocessing))
    normalisation = said.normalisation("image_mean", "image_std") or settings.normalisation
    return FileSettings(
        source=settings.source or preprocessing,
        width=settings.width,
        attention_heads=settings.attention_heads,
        layer_norm_eps=settings.layer_norm_eps,
        activation=settings.activation,
        image_size=settings.image_size,
        rope_theta=settings.rope_theta,
        normalisation=normalisation,
    )


def _model_settings(path: Path) -> FileSettings:
    whole = _Said(path, read_json(path))
    timm = whole.inner("pretrained_cfg")
    if timm is not None:
        architecture = whole.members.get("architecture")
        quick = isinstance(architecture, str) and "quickgelu" in architecture
        return FileSettings(
            source=path,
            width=whole.size("num_features"),
            activation="quick-gelu" if quick else None,
            image_size=timm.last_size("input_size"),
            normalisation=timm.normalisation("mean", "std"),
        )
    said = whole.inner("vision_config") or whole  # of a model of pictures and text
    return FileSettings(
        source=path,
        width=said.size("hidden_size"),
        attention_heads=said.size("num_attention_heads"),
        layer_norm_eps=said.between_0_and_1("layer_norm_eps"),
        activation=said.activation("hidden_act"),
        image_size=said.size("image_size"),
        rope_theta=said.positive("rope_theta"),
    )


@dataclass(frozen=True, slots=True)
class _Said:
    """The members of a JSON object in a file, which may be anything."""

    path: Path
    members: Mapping[str, object]

    def inner(self, name: str) -> _Said | None:
        found = self.members.get(name)
        return _Said(self.path, found) if isinstance(found, dict) else None

    def size(self, name: str) -> int | None:
        found = self.members.get(name)
        if found is None or isinstance(found, list):  # sides that may differ
            return None
        if not isinstance(found, int) or isinstance(found, bool) or not 1 <= found <= 1 << 16:
            raise self.senseless(name, "a size from 1 to 65536")
        return found

    def last_size(self, name: str) -> int | None:
        found = self.members.get(name)
        return _Said(self.path, {name: found[-1]}).size(name) if isinstance(found, list) else None

    def positive(self, name: str) -> float | None:
        found = self.members.get(name)
        if found is None:
            return None
        if not _is_number(found) or found < _SMALLEST:
            raise self.senseless(name, f"a number above 0, at least {_SMALLEST:g}")
        return float(found)

    def between_0_and_1(self, name: str) -> float | None:
        found = self.positive(name)
        if found is not None and found >= 1:
            raise self.senseless(name, "a number between 0 and 1")
        return found

    def activation(self, name: str) -> Activation | None:
        found = self.members.get(name)
        if found is None:
            return None
        if not isinstance(found, str) or found not in ACTIVATIONS:
            raise self.senseless(name, f"one of {', '.join(ACTIVATIONS)}")
        return ACTIVATIONS[found]

    def normalisation(self, mean: str, std: str) -> tuple[Triple, Triple] | None:
        if self.members.get(mean) is None or self.members.get(std) is None:
            return None
        means, deviations = self._triple(mean), self._triple(std)
        if max(map(abs, (*means, *deviations))) > LARGEST_MEAN:
            raise self.senseless(mean, f"three numbers, and {std} too, of at most {LARGEST_MEAN:g}")
        if min(deviations) < SMALLEST_STD:
            raise self.senseless(std, f"three numbers above 0, each at least {SMALLEST_STD:g}")
        return means, deviations

    def _triple(self, name: str) -> Triple:
        found = self.members[name]
        if not isinstance(found, list) or len(found) != 3 or not all(map(_is_number, found)):
            raise self.senseless(name, "three numbers")
        red, green, blue = (float(one) for one in found)
        return red, green, blue

    def senseless(self, name: str, expected: str) -> DataRejected:
        found = ascii(self.members.get(name))[:60]
        return DataRejected(f"{self.path}: expected {name} to be {expected}, found {found}")


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST
