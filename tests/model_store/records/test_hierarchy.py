"""Groups above the classes: what is a hierarchy, and when a group answers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from model_store.records.hierarchy import Hierarchy, Levels

CATS = {"puma": "cat", "lynx": "cat", "cat": "mammal", "wolf": "dog", "dog": "mammal"}
LABELS = ("puma", "lynx", "wolf", "eagle")


def test_the_groups_of_a_name_are_listed_from_the_nearest_on() -> None:
    hierarchy = Hierarchy(parents=CATS)
    assert hierarchy.above("puma") == ("cat", "mammal")
    assert hierarchy.above("eagle") == ()
    hierarchy.check_names(LABELS)


@pytest.mark.parametrize(
    ("parents", "reason"),
    [
        ({"a": "b", "b": "a"}, "form a cycle"),
        ({"a": "a"}, "form a cycle"),
        ({f"n{i}": f"n{i + 1}" for i in range(25)}, "more than 20 levels"),
        ({"a": "b\n"}, "printable"),
        ({}, "at least 1"),
    ],
)
def test_parents_that_make_no_hierarchy_are_refused(parents: dict[str, str], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        Hierarchy(parents=parents)


def test_names_that_are_neither_classes_nor_groups_are_refused() -> None:
    hierarchy = Hierarchy(parents=CATS)
    with pytest.raises(ValueError, match="'wolf' is neither a class nor a group"):
        hierarchy.check_names(("puma", "lynx"))
    with pytest.raises(ValueError, match="'cat' is a class, and cannot be a group"):
        hierarchy.check_names((*LABELS, "cat"))


@pytest.mark.parametrize(
    ("scores", "answer"),
    [
        ([0.9, 0.05, 0.03, 0.02], None),
        ([0.4, 0.35, 0.15, 0.1], ("cat", 0.75, 1)),
        ([0.35, 0.2, 0.4, 0.05], ("mammal", 0.95, 2)),
        ([0.3, 0.1, 0.1, 0.5], None),
        ([0.05, 0.05, 0.6, 0.3], ("mammal", 0.7, 2)),
    ],
)
def test_the_smallest_group_without_doubt_answers(
    scores: list[float], answer: tuple[str, float, int] | None
) -> None:
    found = Levels(Hierarchy(parents=CATS), LABELS).higher(scores)
    if answer is None:
        assert found is None
    else:
        assert found is not None
        assert (found.name, pytest.approx(found.score), found.level) == answer


@given(st.lists(st.floats(0.01, 1), min_size=4, max_size=4))
def test_a_higher_answer_is_a_group_that_reaches_the_least_score(weights: list[float]) -> None:
    scores = [one / sum(weights) for one in weights]
    hierarchy = Hierarchy(parents=CATS)
    found = Levels(hierarchy, LABELS).higher(scores)
    groups = {
        group: sum(
            score
            for label, score in zip(LABELS, scores, strict=True)
            if group in hierarchy.above(label)
        )
        for group in ("cat", "dog", "mammal")
    }
    reached = [name for name, score in groups.items() if score >= hierarchy.least_score]
    if max(scores) >= hierarchy.least_score or not reached:
        assert found is None
    else:
        assert found is not None
        smallest = "cat" if "cat" in reached else reached[0]
        assert found.name == smallest
        assert found.score == pytest.approx(groups[smallest])


def test_a_class_is_renamed_and_keeps_its_group() -> None:
    assert Hierarchy(parents=CATS).renamed("puma", "cougar").above("cougar") == ("cat", "mammal")
