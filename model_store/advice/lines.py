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
"""Lines for them, so that a confusion has one too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A sentence, and the images that it is about."""

    text: str
    images: tuple[AdvisedImage, ...] = ()


def lines(advice: Advice) -> tuple[Line, ...]:
    """Say at most five things: labels and copies first, for they spoil all other figures."""
    gains = [one for one in advice.classes if one.gain is not None and one.gain >= LEAST_GAIN]
    said = [*_suspects(advice), *_copies(advice)]
    said += [Line(text=_gain(one)) for one in gains[:MOST_GAINS]]
    said += _confused(advice)
    if not gains:
        said += _nothing_gains(advice.classes)
    said += [Line(text=note) for note in advice.notes]
    return tuple((said + _unsaid(advice.classes))[:MOST_LINES])


def in_full(advice: Advice) -> list[str]:
    """Say everything, one thing a line."""
    told = [_class(one) for one in advice.classes]
    told += [_pair(one, named=_names(one.images)) for one in advice.confused]
    told += [
        f"{one.image.name} is labelled {one.class_name} and looks like {one.likelier}."
        for one in advice.suspects
    ]
    told += [f"{one.judged.name} is nearly a copy of {one.learnt.name}." for one in advice.copies]
    return [*told, *advice.notes]


def _names(images: Sequence[AdvisedImage]) -> str:
    return ", ".join(image.name for image in images)


def _class(one: ClassAdvice) -> str:
    if one.gain is None:
        return f"{one.class_name}: nothing can be said; {one.why}."
    return f"{_gain(one)[:-1]} ({percent(one.accuracy)} of {counted(one.images, 'image')} now)."


def described(advice: Advice | None) -> dict[str, Any] | None:
    """Describe the advice as plain data, with its lines."""
    if advice is None:
        return None
    told = [
        {"text": line.text, "images": [one.model_dump() for one in line.images]}
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
            images=tuple(one.image for one in advice.suspects),
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
            images=tuple(image for one in advice.copies for image in (one.judged, one.learnt)),
        )
    ]


def _gain(one: ClassAdvice) -> str:
    points = round(100 * (one.gain or 0.0))
    more = counted(one.more, "more image")
    return f"About {more} of {one.class_name}: + {counted(points, 'point')}."


def _confused(advice: Advice) -> list[Line]:
    if not advice.confused:
        return []
    first = advice.confused[0]
    return [Line(text=_pair(first, named=_told(first.images)), images=first.images)]


def _pair(one: Confused, *, named: str) -> str:
    how_many = counted(one.count, "image")
    return f"{one.class_name} is confused with {one.taken_for} ({how_many}): look at {named}."


def _told(images: Sequence[AdvisedImage]) -> str:
    """Name images. Ids of the inbox tell people nothing: pages show the pictures."""
    names = [image.name for image in images if image.item is None]
    items = len(images) - len(names)
    return ", ".join([*names, *([counted(items, "image") + " of the inbox"] if items else [])])


def _nothing_gains(classes: Sequence[ClassAdvice]) -> list[Line]:
    known = [one for one in classes if one.gain is not None]
    if not known:
        return []
    more = counted(max(one.more for one in known), "more image")
    return [Line(text=f"No class gains a point from {more}.")]


def _unsaid(classes: Sequence[ClassAdvice]) -> list[Line]:
    """Say of how many classes nothing can be said, and why of the first."""
    without = [one for one in classes if one.why is not None]
    if not without:
        return []
    many = counted(len(without), "class", "classes")
    return [Line(text=f"Nothing can be said of {many}. {without[0].class_name}: {without[0].why}.")]
