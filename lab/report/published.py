"""Hold the figures that the paper publishes: CIFAR-100, 50 classes and then steps of 10.

They come from 500 epochs, all images and larger networks. Only their order can be compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    last: float
    """Last accuracy in per cent."""
    average: float | None
    gflop: float | None = None


PUBLISHED: Mapping[str, Published] = {
    "dne": Published(last=68.04, average=73.68, gflop=2.68),
    "dne:k=2": Published(last=69.73, average=74.61, gflop=3.10),
    "dne:k=4": Published(last=70.04, average=74.86, gflop=4.02),
    "dne:network=independent": Published(last=58.22, average=67.63),
    "dne:network=dense-s": Published(last=63.80, average=70.67),
    "dne:network=dense-f": Published(last=67.08, average=73.22),
    "dne:network=sss": Published(last=64.44, average=71.17),
    "dne:network=ffs": Published(last=64.92, average=71.38),
    "dne:network=fff": Published(last=67.23, average=73.13),
    "dne:network=mhsa,attention=plain": Published(last=66.29, average=72.42),
    "dne:network=mhsa-mlp,attention=plain": Published(last=67.93, average=73.46),
    "dne:network=fc1": Published(last=66.82, average=73.07),
    "dne:network=fc2": Published(last=66.74, average=72.77),
    "dytox": Published(last=64.06, average=71.55, gflop=1.38),
    "der": Published(last=63.78, average=71.69, gflop=6.68),
    "foster": Published(last=63.31, average=72.20, gflop=1.12),
    "podnet": Published(last=52.46, average=66.41, gflop=1.12),
    "icarl": Published(last=44.72, average=59.32, gflop=1.12),
}
"""By method and variant, as the paper measures them on the backbone that it uses."""

JOINT: Mapping[str, Published] = {
    "transformer": Published(last=76.12, average=None, gflop=1.38),
    "ResNet-18": Published(last=80.41, average=None, gflop=1.12),
}


def published(method: str, variant: str, backbone: str) -> Published | None:
    """Find the paper's figures of a row. A variant that the paper lacks has none."""
    if method == "joint":
        return JOINT.get(backbone)
    options = [one for one in variant.split(",") if one and not one.startswith("backbone=")]
    return PUBLISHED.get(":".join(filter(None, (method, ",".join(options)))))
