"""Say the advice on a version in a few lines, in the same words everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from model_store.advice.record import Advice, AdvisedImage, ClassAdvice, Confused
from model_store.tables import counted, percent

MOST_LINES = 5
LEAST_GAIN = 0.01
"""A point: less is not worth a line."""
MOST_GAINS = 2
"""Lines on gains, so that a confusion has a line too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A sentence, and the images that it is about."""

    text: str
    images: tuple[AdvisedImage, ...] = ()


def lines(advice: Advice) -> tuple[Line, ...]:
    """Say at most five things: labels and copies first, because they spoil all other figures."""
    gains = [row for row in advice.classes if row.gain is not None and row.gain >= LEAST_GAIN]
    said = [*_suspects(advice), *_copies(advice)]
    said += [Line(text=_gain(row)) for row in gains[:MOST_GAINS]]
    said += _confused(advice)
    if not gains:
        said += _nothing_gains(advice.classes)
    said += [Line(text=note) for note in advice.notes]
    return tuple((said + _unsaid(advice.classes))[:MOST_LINES])


def in_full(advice: Advice) -> list[str]:
    """Say everything, one thing a line."""
    told = [_class(row) for row in advice.classes]
    told += [_pair(pair, named=_names(pair.images)) for pair in advice.confused]
    told += [
        f"{suspect.image.name} is labelled {suspect.class_name} and looks like {suspect.likelier}."
        for suspect in advice.suspects
    ]
    told += [
        f"{copy.judged.name} is nearly a copy of {copy.learnt.name}." for copy in advice.copies
    ]
    return [*told, *advice.notes]


def _names(images: Sequence[AdvisedImage]) -> str:
    return ", ".join(image.name for image in images)


def _class(row: ClassAdvice) -> str:
    if row.gain is None:
        return f"{row.class_name}: nothing can be said; {row.why}."
    return f"{_gain(row)[:-1]} ({percent(row.accuracy)} of {counted(row.images, 'image')} now)."


def described(advice: Advice | None) -> dict[str, Any] | None:
    """Describe the advice as plain data, with its lines."""
    if advice is None:
        return None
    told = [
        {"text": line.text, "images": [image.model_dump() for image in line.images]}
        for line in lines(advice)
    ]
    return {"lines": told, **advice.model_dump(mode="json", by_alias=True)}


def _suspects(advice: Advice) -> list[Line]:
    if not advice.suspects:
        return []
    first = advice.suspects[0]
    many = counted(advice.suspects_in_all, "label")
    return [
        Line(
            text=f"{many} may be wrong. Look first at {_told([first.image])}: it is labelled "
            f"{first.class_name} and looks like {first.likelier}.",
            images=tuple(suspect.image for suspect in advice.suspects),
        )
    ]


def _copies(advice: Advice) -> list[Line]:
    if not advice.copies:
        return []
    first, many = advice.copies[0], advice.copies_in_all
    told = "is nearly a copy" if many == 1 else "are nearly copies"
    return [
        Line(
            text=f"{counted(many, 'image')} to judge by {told} of images to learn from, so the "
            f"accuracy looks better than it is: {_told([first.judged])} and "
            f"{_told([first.learnt])}.",
            images=tuple(image for copy in advice.copies for image in (copy.judged, copy.learnt)),
        )
    ]


def _gain(row: ClassAdvice) -> str:
    points = round(100 * (row.gain or 0.0))
    more = counted(row.more, "more image")
    return f"About {more} of {row.class_name}: + {counted(points, 'point')}."


def _confused(advice: Advice) -> list[Line]:
    if not advice.confused:
        return []
    first = advice.confused[0]
    return [Line(text=_pair(first, named=_told(first.images)), images=first.images)]


def _pair(pair: Confused, *, named: str) -> str:
    how_many = counted(pair.count, "image")
    return f"{pair.class_name} is confused with {pair.taken_for} ({how_many}): look at {named}."


def _told(images: Sequence[AdvisedImage]) -> str:
    """Name images, and count those of the inbox: their ids mean nothing to people."""
    names = [image.name for image in images if image.item is None]
    items = len(images) - len(names)
    return ", ".join([*names, *([counted(items, "image") + " of the inbox"] if items else [])])


def _nothing_gains(classes: Sequence[ClassAdvice]) -> list[Line]:
    known = [row for row in classes if row.gain is not None]
    if not known:
        return []
    more = counted(max(row.more for row in known), "more image")
    return [Line(text=f"No class gains a point from {more}.")]


def _unsaid(classes: Sequence[ClassAdvice]) -> list[Line]:
    """Count the classes without a forecast, and give the reason of the first."""
    without = [row for row in classes if row.why is not None]
    if not without:
        return []
    many = counted(len(without), "class", "classes")
    return [Line(text=f"Nothing can be said of {many}. {without[0].class_name}: {without[0].why}.")]
