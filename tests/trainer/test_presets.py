from __future__ import annotations

import pytest

from model_store.errors import SpecInvalid, WrongUsage
from model_store.spec import ExpertSpec, NetworkSpec, TaskSpec
from trainer.request import NetworkShape


def lineage(shape: NetworkShape) -> NetworkSpec:
    spec = shape.first_network()
    heads = ExpertSpec(heads=shape.heads_of_first())
    return spec.expand(TaskSpec(name="first", classes=("a",), expert=heads))


@pytest.mark.parametrize(
    ("preset", "sizes"),
    [("tiny", (16, 4, 2, 4)), ("small", (64, 8, 5, 6)), ("paper", (32, 4, 5, 12))],
)
def test_presets_are_those_of_the_design(preset: str, sizes: tuple[int, ...]) -> None:
    spec = lineage(NetworkShape(preset=preset))
    heads = spec.experts[0].heads
    assert (spec.image_size, spec.patch_size, spec.depth, heads) == sizes
    assert spec.stem == ("patches" if preset == "paper" else "convolutions")
    assert spec.head_width == 32


def test_small_is_the_default_and_each_number_can_be_given_instead() -> None:
    assert lineage(NetworkShape()) == lineage(NetworkShape(preset="small"))
    spec = lineage(NetworkShape(preset="tiny", depth=3, heads=2))
    assert (spec.depth, spec.image_size, spec.experts[0].heads) == (3, 16, 2)


@pytest.mark.parametrize(("side", "attention"), [(8, "gated"), (15, "gated"), (16, "plain")])
def test_a_new_network_is_gated_if_it_can_grow_so(side: int, attention: str) -> None:
    spec = NetworkShape(preset="small", image_size=8 * side).first_network()
    assert (spec.patches, spec.attention) == (side**2, attention)
    assert spec.qkv_bias == (attention == "plain")


@pytest.mark.parametrize(
    ("images", "heads"),
    [(5, 1), (3_999, 1), (4_000, 2), (9_999, 2), (10_000, 4), (1_000_000, 4)],
)
def test_a_later_task_has_heads_by_its_images_unless_told(images: int, heads: int) -> None:
    assert NetworkShape(preset="tiny").heads_of_later(images=images) == heads
    assert NetworkShape(heads=3).heads_of_later(images=images) == 3


def test_a_later_task_may_repeat_the_sizes() -> None:
    spec = lineage(NetworkShape(preset="tiny"))
    for same in (
        NetworkShape(),
        NetworkShape(preset="tiny"),
        NetworkShape(image_size=16, depth=2),
        NetworkShape(head_width=32),
    ):
        same.check_agrees(spec)


@pytest.mark.parametrize(
    ("shape", "sentence"),
    [
        (NetworkShape(preset="paper"), r"`preset=paper` \(`image_size=32`\) does not fit"),
        (NetworkShape(depth=5), "`depth=5` does not fit: the first task has fixed depth 2"),
        (NetworkShape(preset="tiny", patch_size=8), "`patch_size=8` does not fit"),
    ],
)
def test_a_later_task_may_not_change_the_sizes(shape: NetworkShape, sentence: str) -> None:
    with pytest.raises(WrongUsage, match=sentence):
        shape.check_agrees(lineage(NetworkShape(preset="tiny")))


def test_a_lineage_keeps_its_stem() -> None:
    old = lineage(NetworkShape(preset="tiny", stem="patches"))
    for asked in (NetworkShape(), NetworkShape(preset="tiny"), NetworkShape(stem="patches")):
        asked.check_agrees(old)
    with pytest.raises(WrongUsage, match="fixed stem patches for this model"):
        NetworkShape(stem="convolutions").check_agrees(old)
    with pytest.raises(WrongUsage, match="fixed stem convolutions for this model"):
        NetworkShape(stem="patches").check_agrees(lineage(NetworkShape(preset="tiny")))


@pytest.mark.parametrize(("image", "patch"), [(30, 6), (2048, 64), (8, 1)])
def test_patches_that_no_halving_makes_are_embedded_one_by_one_unless_asked(
    image: int, patch: int
) -> None:
    assert NetworkShape(image_size=image, patch_size=patch).first_network().stem == "patches"
    with pytest.raises(SpecInvalid, match="a stem of convolutions halves an image"):
        NetworkShape(image_size=image, patch_size=patch, stem="convolutions").first_network()


def test_sizes_that_make_no_network_are_refused_with_the_reason() -> None:
    with pytest.raises(SpecInvalid, match="cannot be cut into patches"):
        NetworkShape(image_size=30, patch_size=8).first_network()
    with pytest.raises(WrongUsage, match="not one of tiny, small, paper"):
        NetworkShape(preset="huge")
