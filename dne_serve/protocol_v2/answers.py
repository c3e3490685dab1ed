"""Compute the outputs of the model from its logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dne_serve.engines.base import Floats, Resident
from dne_serve.engines.scored import Scored
from dne_serve.errors import Malformed
from dne_serve.inference.answers import best_of
from dne_serve.protocol_v2.images import Output
from dne_serve.protocol_v2.schemas import MAX_JSON_VALUES, Datatype, RequestOutput


class Answers:
    """Logits of a request's images, and values that are computed when they are asked for."""

    def __init__(self, resident: Resident, scored: Sequence[Scored]) -> None:
        self.resident = resident
        self._scored = scored

    @cached_property
    def logits_NC(self) -> Floats:
        return np.stack([image.logits for image in self._scored]).astype(np.float32, copy=False)

    @cached_property
    def exact_NC(self) -> NDArray[np.float64]:
        return np.stack([image.probabilities for image in self._scored])

    @property
    def probabilities_NC(self) -> Floats:
        return self.exact_NC.astype(np.float32)

    @cached_property
    def best_N(self) -> list[int]:
        return [int(index) for index in self.exact_NC.argmax(axis=1)]

    @property
    def labels(self) -> list[str]:
        return [self.resident.labels[index] for index in self.best_N]

    @property
    def tasks(self) -> list[str]:
        return [self.resident.tasks[index] for index in self.best_N]

    @property
    def scores_N(self) -> Floats:
        return np.asarray(self.exact_NC.max(axis=1), dtype=np.float32)

    @property
    def unknown_N(self) -> NDArray[np.bool_]:
        return np.array([image.is_unknown for image in self._scored], dtype=np.bool_)

    @property
    def unknown_scores_N(self) -> Floats:
        """Not a number where the version tells no probability."""
        scores = [image.unknown_score for image in self._scored]
        return np.array([np.nan if p is None else p for p in scores], dtype=np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """An output that may be asked for."""

    name: str
    datatype: Datatype
    content: str
    by_class: bool = False
    """[N, classes]; otherwise [N]."""
    read: Callable[[Answers], NDArray[Any] | Sequence[str]]

    def shape(self, images: int, classes: int) -> tuple[int, ...]:
        return (images, classes) if self.by_class else (images,)


OUTPUTS: dict[str, Offer] = {
    offer.name: offer
    for offer in (
        Offer(
            name="label",
            datatype="BYTES",
            content="the likeliest class",
            read=lambda answers: answers.labels,
        ),
        Offer(
            name="score",
            datatype="FP32",
            content="its calibrated probability",
            read=lambda answers: answers.scores_N,
        ),
        Offer(
            name="task",
            datatype="BYTES",
            content="the task that the class was learnt in",
            read=lambda answers: answers.tasks,
        ),
        Offer(
            name="unknown",
            datatype="BOOL",
            content="whether the image is probably of none of the classes",
            read=lambda answers: answers.unknown_N,
        ),
        Offer(
            name="unknown_score",
            datatype="FP32",
            content="the probability of none of the classes; not a number (null in JSON) where the "
            "version tells none",
            read=lambda answers: answers.unknown_scores_N,
        ),
        Offer(
            name="probabilities",
            datatype="FP32",
            content="of every class, calibrated, in the order of the classes",
            by_class=True,
            read=lambda answers: answers.probabilities_NC,
        ),
        Offer(
            name="logits",
            datatype="FP32",
            content="of every class, as the network gives them, in the order of the classes",
            by_class=True,
            read=lambda answers: answers.logits_NC,
        ),
    )
}

EVERY_OUTPUT = tuple(RequestOutput(name=name) for name in OUTPUTS)


def check_requested(outputs: Sequence[RequestOutput]) -> None:
    """Refuse outputs that cannot be answered, before any image is decoded."""
    names = [output.name for output in outputs]
    if len(set(names)) != len(names):
        raise Malformed("an output is asked for twice")
    for output in outputs:
        offer = OUTPUTS.get(output.name)
        if offer is None:
            raise Malformed(f"no output {output.name[:64]!r}: there are {', '.join(OUTPUTS)}")
        if output.parameters.shared_memory_region is not None:
            raise Malformed("shared memory is not offered: outputs come in the answer")
        if output.parameters.classification and not offer.by_class:
            raise Malformed(
                f"output {offer.name!r} has no value for each class: classification is of "
                f"{' or '.join(name for name, one in OUTPUTS.items() if one.by_class)}"
            )


def is_binary(output: RequestOutput, *, otherwise: bool) -> bool:
    """Return whether an output travels as binary; `otherwise` is the word of the whole request."""
    given = output.parameters.binary_data
    return otherwise if given is None else given


def count_json_values(
    outputs: Sequence[RequestOutput], *, images: int, classes: int, binary: bool
) -> int:
    """Count the values in the JSON of an answer, and refuse too many before they are computed.
    `binary`: outputs travel as binary unless they say otherwise."""
    in_json = [output for output in outputs if not is_binary(output, otherwise=binary)]
    values = images * sum(
        min(output.parameters.classification or classes, classes)
        if OUTPUTS[output.name].by_class
        else 1
        for output in in_json
    )
    if values > MAX_JSON_VALUES:
        raise Malformed(
            f"the answer would hold {values} values in JSON, and {MAX_JSON_VALUES} are the most: "
            "ask for fewer outputs or images, or for binary_data"
        )
    return values


def output_of(answers: Answers, *, name: str, classification: int = 0) -> Output:
    """Make an output. `classification` > 0 asks for that many likeliest classes instead of all
    values."""
    offer = OUTPUTS[name]
    values = offer.read(answers)
    if classification and isinstance(values, np.ndarray):
        return _classified(name, values, labels=answers.resident.labels, count=classification)
    images, classes = len(answers.best_N), len(answers.resident.labels)
    return Output(
        name=name, datatype=offer.datatype, shape=offer.shape(images, classes), values=values
    )


def _classified(name: str, values_NC: NDArray[Any], *, labels: Sequence[str], count: int) -> Output:
    """Write `value:index:label`, the highest value first, as the classification extension does."""
    order_NK = np.stack([best_of(row, count) for row in values_NC])
    texts = [
        f"{row[index]:.6f}:{index}:{labels[index]}"
        for row, order in zip(values_NC, order_NK, strict=True)
        for index in order
    ]
    return Output(name=name, datatype="BYTES", shape=order_NK.shape, values=texts)
