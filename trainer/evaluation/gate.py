"""Decide whether a version may replace its parent, by images that neither was trained on."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from model_store.records.hierarchy import Hierarchy
from model_store.records.quality import ClassChange, Confusion, Flip, Gate, Side
from model_store.tables import counted, figure, percent
from trainer.evaluation.judged import Judged, fit_temperature
from trainer.evaluation.price import NO_PRICE, Price, taken, without
from trainer.request import GateLimits

SIGNIFICANCE = 0.05
LIKELY = 0.5
"""The chance of a gain up to which it counts where it costs no time."""
_BY_PROBABILITY = 0.8
"""The share of the significance that the test of probabilities has. The test of flips has the
rest."""
_SIGN_DRAWS = 4999
_SIGNS_AT_ONCE = 1_000_000
_HANDFUL = 5
"""The most flips that count as noise: the sign test reaches 5 % at five to none."""
_FEWEST_TO_CALL_A_GUESS = 12
"""The fewest new images that tell guesses from bad luck."""
FEWEST: dict[Side, int] = {"old": _HANDFUL + 1, "new": _FEWEST_TO_CALL_A_GUESS}
"""The fewest images by which a side is judged: fewer could not refuse a version."""
_NOTICED = {0: 0.0, 50: 0.14, 100: 0.62, 200: 0.90, 400: 0.97}
"""The share of falls of five points on old classes that are refused, by the number of their images;
see ADR 49."""
MAX_TOLD = 200
"""The most confusions and flips that a manifest keeps; the most frequent are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GateInput:
    """A version as the gate sees it. Both judgements are of the same images, in the same order."""

    judged: Judged
    parent: Judged | None
    older: tuple[str, ...]
    newest: tuple[str, ...]
    model_bytes: int
    deepens: bool = False
    """True for an expert that is added to classes which the parent answers without it."""
    served: Judged | None = None
    """The version that serves, where the parent was refused: answers of the classes that it has."""
    served_classes: tuple[str, ...] = ()
    slower: bool = True
    """False for an expert in the place of another: it costs no time, and is taken for any gain
    that is likelier than not."""
    latency_ms: float | None = None
    hierarchy: Hierarchy | None = None
    price: Price = NO_PRICE
    """The share of old images that fairly goes to new classes."""
    together: float = 1.0
    """The images of a group of images that belong together, on average."""

    @property
    def extends(self) -> bool:
        """Return whether no class is new: then every class is compared with the parent."""
        return set(self.newest) <= set(self.older)

    def images_of(self, side: Side) -> int:
        return int(self.judged.is_of(self.older if side == "old" else self.newest).sum())

    def not_judged(self) -> tuple[Side, ...]:
        """Name the sides that are asked about and have too few images for an answer."""
        asked: tuple[Side, ...] = ("old",) if self.parent is not None and self.older else ()
        if not self.extends:
            asked = ("new", *asked)
        return tuple(side for side in asked if self.images_of(side) < FEWEST[side])


def decide(candidate: GateInput, *, limits: GateLimits) -> Gate:
    """Return the verdict, every reason against the version, and the classes that got worse."""
    judged = candidate.judged
    old_images = candidate.images_of("old")
    flips, p_value = (0, 0), None
    if candidate.parent is not None and old_images:
        old = np.flatnonzero(judged.is_of(candidate.older))
        before, after = candidate.parent.take(old), judged.take(old)
        flips, p_value = count_flips(before, after), chance_of_a_fall(before, after)
    reasons = (
        *_old_reasons(candidate, limits=limits, p_value=p_value, flips=flips),
        *(() if candidate.deepens else _new_reasons(candidate, limits=limits)),
        *(_earning_reasons(candidate, limits=limits) if candidate.deepens else ()),
        *_serving_reasons(candidate, limits=limits),
        *_budget_reasons(candidate, limits=limits),
    )
    return Gate(
        passed=not reasons,
        forced=bool(reasons) and limits.force,
        reasons=reasons,
        notes=_notes(candidate),
        not_judged=candidate.not_judged(),
        old_images=old_images,
        new_images=candidate.images_of("new"),
        got_worse=flips[0],
        got_better=flips[1],
        p_value=p_value,
        latency_ms=candidate.latency_ms,
        worse=_worse_classes(candidate),
        confused=_confusions(judged),
        flipped=_flips(candidate),
    )


def noticed(old_images: int) -> float:
    """Estimate how often a fall of five points on old classes is refused."""
    return float(np.interp(old_images, list(_NOTICED), list(_NOTICED.values())))


def chance_of_a_fall(before: Judged, after: Judged) -> float:
    """Return the chance that answers look as much worse as these although nothing fell.

    Two tests share the significance. One is on the calibrated probabilities that the right class
    beats its best rival: it weighs how sure an answer was, where a flip counts the same whether
    it was near or far. The other is on the flips.
    """
    worse, better = count_flips(before, after)
    fall_N = _beats_its_rival(before) - _beats_its_rival(after)
    by_probability = sign_flip_test(fall_N) / _BY_PROBABILITY
    by_flips = sign_test(worse=worse, better=better) / (1 - _BY_PROBABILITY)
    return min(1.0, by_probability, by_flips)


def count_flips(before: Judged, after: Judged) -> tuple[int, int]:
    """Count the answers that got worse, and those that got better."""
    worse_N, better_N = before.right_N & ~after.right_N, ~before.right_N & after.right_N
    return int(worse_N.sum()), int(better_N.sum())


def _beats_its_rival(judged: Judged) -> NDArray[np.float64]:
    """Return the probability of each image's class between itself and the likeliest other one.

    Unlike the probability among all classes, it does not fall because there are more of them.
    """
    scaled = judged.logits_NC.astype(np.float64) / fit_temperature(judged)
    rows = np.arange(len(scaled))
    own_N = scaled[rows, judged.labels_N]
    scaled[rows, judged.labels_N] = -np.inf
    # Without another class there is no rival, and the answer is certain.
    margin_N = own_N - scaled.max(axis=1)
    return np.asarray(0.5 * (1 + np.tanh(margin_N / 2)))


def sign_flip_test(fall_N: NDArray[np.float64]) -> float:
    """Return the chance of at least this sum if the sign of each difference were a coin toss."""
    draw = np.random.default_rng(0)
    # Sums that are equal but for rounding count as equal.
    least = float(fall_N.sum()) - 1e-9 * float(np.abs(fall_N).sum())
    reached, left = 1, _SIGN_DRAWS
    while left:
        draws = min(left, 1 + _SIGNS_AT_ONCE // len(fall_N))
        signs = draw.integers(0, 2, size=(draws, len(fall_N)), dtype=np.int8) * np.int8(2) - 1
        reached += int((signs @ fall_N >= least).sum())
        left -= draws
    return reached / (1 + _SIGN_DRAWS)


def sign_test(*, worse: int, better: int) -> float:
    """Return the chance of at least this many wrong flips if each flip were a coin toss."""
    return at_least(worse, of=worse + better, chance=0.5)


def at_least(count: int, *, of: int, chance: float) -> float:
    """Return P(X ≥ count) for X binomial."""
    if count <= 0:
        return 1.0

    def term(one: int) -> float:  # in logarithms: thousands of images are beyond a float's range
        ways = math.lgamma(of + 1) - math.lgamma(one + 1) - math.lgamma(of - one + 1)
        return math.exp(ways + one * math.log(chance) + (of - one) * math.log1p(-chance))

    return min(1.0, math.fsum(term(one) for one in range(count, of + 1)))


def no_better_than_guessing(right: int, *, of: int, classes: int) -> bool:
    """Return whether answers look like guesses among `classes`, and not like bad luck.

    Guesses are not better than chance at 5 %, and are worse at 5 % than an accuracy half way
    between chance and 1.
    """
    if classes < 2 or of < _FEWEST_TO_CALL_A_GUESS:
        return False
    guessing = 1 / classes
    halfway = (1 + guessing) / 2
    as_guesses = at_least(right, of=of, chance=guessing)
    as_learnt = at_least(of - right, of=of, chance=1 - halfway)
    return as_guesses > SIGNIFICANCE and as_learnt <= SIGNIFICANCE


def _points(share: float) -> str:
    return f"{100 * share:g} point{'' if share == 0.01 else 's'}"


def _old_reasons(
    candidate: GateInput, *, limits: GateLimits, p_value: float | None, flips: tuple[int, int]
) -> tuple[str, ...]:
    after = candidate.judged.accuracy(candidate.older)
    before = candidate.parent.accuracy(candidate.older) if candidate.parent else None
    if before is None or after is None or p_value is None:
        return ()
    # Accuracies are counts over counts: a drop of exactly the limit must not fail by rounding.
    if before - after <= limits.max_drop + 1e-9:
        return ()
    if p_value > SIGNIFICANCE or flips[0] <= _HANDFUL or _is_price(candidate):
        return ()
    return (
        f"accuracy on old classes fell from {percent(before)} to {percent(after)}, more than "
        f"the {_points(limits.max_drop)} allowed ({counted(flips[0], 'image')} got worse, "
        f"{flips[1]} better, p = {p_value:.2g})",
    )


def _serving_reasons(candidate: GateInput, *, limits: GateLimits) -> tuple[str, ...]:
    """Compare with the version that serves, too, where the parent was refused."""
    if candidate.served is None:
        return ()
    older = candidate.served_classes
    beside = replace(
        candidate,
        parent=candidate.served,
        older=older,
        newest=tuple(name for name in candidate.newest if name not in older),
    )
    reasons = _new_reasons(beside, limits=limits)
    old = np.flatnonzero(candidate.judged.is_of(older))
    if not len(old):
        return reasons
    before, after = candidate.served.take(old), candidate.judged.take(old)
    flips, p_value = count_flips(before, after), chance_of_a_fall(before, after)
    return (*_old_reasons(beside, limits=limits, p_value=p_value, flips=flips), *reasons)


def _is_price(candidate: GateInput) -> bool:
    """Return whether a fall may be the price of more classes to choose among, and chance.

    Two things must hold: among the old classes alone nothing fell, and new classes do not take more
    old images than the price, beyond chance. The two tests share the significance.
    """
    parent, judged, price = candidate.parent, candidate.judged, candidate.price
    if parent is None or not price.share:
        return False
    old = np.flatnonzero(judged.is_of(candidate.older))
    among_old = without(judged, candidate.newest).take(old)
    worse, _ = count_flips(parent.take(old), among_old)
    fell = worse > _HANDFUL and chance_of_a_fall(parent.take(old), among_old) <= SIGNIFICANCE / 2
    count = int(taken(judged, newest=candidate.newest)[old].sum())
    mine = Price(taken=count, images=len(old)).each_counting(1 / candidate.together)
    return not fell and price.chance_of(mine.taken, of=mine.images) > SIGNIFICANCE / 2


def _earning_reasons(candidate: GateInput, *, limits: GateLimits) -> tuple[str, ...]:
    """Refuse an expert that does not make the version better, beyond chance.

    One that costs no time is judged by probabilities: a few points of accuracy are one or two of
    a hundred images, and chance moves as many.
    """
    before, judged = candidate.parent, candidate.judged
    if before is None or not len(judged.labels_N):
        return ("the expert was not judged, so nothing shows that it earns its cost",)

    def measured(one: Judged) -> float:
        return float((one.right_N if candidate.slower else _beats_its_rival(one)).mean())

    old, new = measured(before), measured(judged)
    p_value = chance_of_a_fall(judged, before)
    asked = SIGNIFICANCE if candidate.slower else LIKELY
    if new - old >= limits.min_gain - 1e-9 and p_value <= asked:
        return ()
    worse, better = count_flips(before, judged)
    told = "accuracy"
    if not candidate.slower:
        told = "the mean probability of the right class beside its best rival"
    return (
        f"the expert does not earn its cost: {told} went from {percent(old)} to {percent(new)}, "
        f"and {_points(limits.min_gain)} more, beyond chance, are needed "
        f"({counted(better, 'image')} got better, {worse} worse, p = {p_value:.2g})",
    )


def _new_reasons(candidate: GateInput, *, limits: GateLimits) -> tuple[str, ...]:
    rights_N = candidate.judged.right_N[candidate.judged.is_of(candidate.newest)]
    right, of = int(rights_N.sum()), len(rights_N)
    if limits.min_new is not None:
        return _least_reasons(right, of=of, least=limits.min_new)
    if candidate.parent and no_better_than_guessing(
        right, of=of, classes=_to_guess_among(candidate)
    ):
        return (
            f"accuracy on new classes is {percent(right / of)} ({right} of {counted(of, 'image')})"
            ", no better than guessing: are the images in the right folders? (a least "
            "accuracy of your own replaces this check)",
        )
    return ()


def _least_reasons(right: int, *, of: int, least: float) -> tuple[str, ...]:
    """Compare with the least accuracy that is asked for. It needs evidence; 0 asks for nothing."""
    if not least:
        return ()
    if of < FEWEST["new"]:
        return (
            f"a least accuracy of {percent(least)} cannot be judged by {counted(of, 'image')} of "
            f"new classes: {FEWEST['new']} are needed; give more validation images",
        )
    if right / of >= least - 1e-9:
        return ()
    return (
        f"accuracy on new classes is {percent(right / of)}, less than the {percent(least)} "
        "asked for",
    )


def _to_guess_among(candidate: GateInput) -> int:
    """Count the answers of which a guess is one: the new classes or, where one class is new, all
    classes."""
    lone = len(candidate.newest) == 1 and not candidate.extends
    return len(candidate.older) + 1 if lone else len(candidate.newest)


def _budget_reasons(candidate: GateInput, *, limits: GateLimits) -> tuple[str, ...]:
    reasons = []
    latency_ms, size = candidate.latency_ms, candidate.model_bytes
    if limits.max_latency_ms and latency_ms and latency_ms > limits.max_latency_ms:
        reasons.append(
            f"an image takes {figure(latency_ms)} ms here, more than the "
            f"{limits.max_latency_ms:g} ms allowed"
        )
    if limits.max_bytes and size > limits.max_bytes:
        reasons.append(f"it has {size} bytes, more than the {limits.max_bytes} allowed")
    return tuple(reasons)


def _notes(candidate: GateInput) -> tuple[str, ...]:
    few = candidate.not_judged()
    notes = [_too_few(candidate, side) for side in few]
    if candidate.parent is not None and "old" not in few:
        judged = candidate.judged
        missing = [name for name in candidate.older if not judged.is_of([name]).any()]
        if missing:
            notes.append(f"not judged, for want of images to judge by: {_named(missing)}")
    return (*notes, *_price_notes(candidate), *_group_notes(candidate))


def _price_notes(candidate: GateInput) -> tuple[str, ...]:
    """Say how many old images went to new classes, and how many were to be expected."""
    if not candidate.price.share or candidate.parent is None:
        return ()
    old_N = candidate.judged.is_of(candidate.older)
    count = int((taken(candidate.judged, newest=candidate.newest) & old_N).sum())
    return (
        f"{counted(count, 'image')} of old classes went to new ones that look like them; "
        f"cross-validation of the images to learn from expects "
        f"{candidate.price.share * int(old_N.sum()):.0f}",
    )


def _group_notes(candidate: GateInput) -> tuple[str, ...]:
    """Say how many of the images that got worse are still answered in a group of their class.

    The verdict is on classes alone: a group makes no version look better than it is.
    """
    judged, parent, hierarchy = candidate.judged, candidate.parent, candidate.hierarchy
    if parent is None or hierarchy is None:
        return ()
    worse_N = judged.is_of(candidate.older) & parent.right_N & ~judged.right_N
    answers = [answer for answer, worse in zip(_answers(judged), worse_N, strict=True) if worse]
    if not answers:
        return ()
    inside = sum(
        not set(hierarchy.above(label)).isdisjoint(hierarchy.above(guess))
        for label, guess in answers
    )
    return (
        f"{counted(len(answers), 'image')} of old classes got worse, {inside} of them inside a "
        "group of their class",
    )


def _too_few(candidate: GateInput, side: Side) -> str:
    count = candidate.images_of(side)
    found = "there was no image of them to judge by"
    if count:
        found = f"{counted(count, 'image')} to judge by, and {FEWEST[side]} are needed"
    return f"{side} classes were not judged: {found}; give more validation images"


def _worse_classes(candidate: GateInput) -> tuple[ClassChange, ...]:
    """List the old classes that the parent answered better, the largest drop first."""
    if candidate.parent is None:
        return ()
    changes = []
    for name in candidate.older:
        before, after = candidate.parent.accuracy([name]), candidate.judged.accuracy([name])
        if before is not None and after is not None and after < before:
            images = int(candidate.judged.is_of([name]).sum())
            changes.append(ClassChange(class_name=name, before=before, after=after, images=images))
    return tuple(sorted(changes, key=lambda one: one.after - one.before))


def _confusions(judged: Judged) -> tuple[Confusion, ...]:
    pairs = Counter(
        (label, guess) for label, guess in _answers(judged) if label != guess
    ).most_common(MAX_TOLD)
    return tuple(
        Confusion(class_name=label, taken_for=guess, count=count) for (label, guess), count in pairs
    )


def _flips(candidate: GateInput) -> tuple[Flip, ...]:
    """Count predictions for images of old classes that differ from the parent's."""
    if candidate.parent is None:
        return ()
    older: Collection[str] = set(candidate.older)
    both = zip(_answers(candidate.judged), _answers(candidate.parent), strict=True)
    flips = Counter(
        (label, before, after)
        for (label, after), (_, before) in both
        if label in older and before != after
    ).most_common(MAX_TOLD)
    return tuple(
        Flip(class_name=label, before=before, after=after, count=count)
        for (label, before, after), count in flips
    )


def _answers(judged: Judged) -> list[tuple[str, str]]:
    """List the class and the answer of every image."""
    guesses = np.argmax(judged.logits_NC, axis=1)
    return [
        (judged.classes[label], judged.classes[guess])
        for label, guess in zip(judged.labels_N.tolist(), guesses.tolist(), strict=True)
    ]


def _named(names: list[str], *, most: int = 10) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(repr, names[:most])) + more
