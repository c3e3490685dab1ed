"""The log-odds of a doubt shard, against a computation of its own; shards that are not trusted."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from model_store.codec import decode_doubt, encode_doubt, load_doubt
from model_store.errors import RecordInvalid, ShardCorrupt
from model_store.inference.doubt import none_of_these
from model_store.records.manifest import Draft, decode, encode
from model_store.records.quality import Unknown
from model_store.records.sealing import seal
from model_store.store.shard import shard_ref
from tests.model_store.drafts import prepare

DETECTOR = Unknown(score="log-odds", threshold=-1.0, rate=0.05, images=20)


def tensors_of(width: int, classes: int, *, seed: int = 0) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    shapes = {
        "shift": (width,),
        "project": (width, width),
        "bias": (width,),
        "prototypes": (classes, width),
        "offsets": (classes,),
    }
    return {
        f"doubt.{name}": draw.normal(size=shape).astype(np.float32)
        for name, shape in shapes.items()
    }


def by_hand(tensors: dict[str, np.ndarray], token: np.ndarray, *, places: list[int]) -> float:
    """The formula of FORMAT.md for one image, in double precision."""
    shift, project, bias, prototypes, offsets = (one.astype(np.float64) for one in tensors.values())
    moved = token[: len(shift)].astype(np.float64) - shift
    z = moved / math.sqrt(sum(moved**2)) @ project + bias
    return max(float(z @ prototypes[y] + offsets[y]) for y in places) - float(sum(z**2)) / 2


def version(**others: Any) -> tuple[Draft, dict[str, bytes]]:
    """A version with a doubt shard, and the bytes of the shard."""
    draft = prepare().draft
    data = encode_doubt(tensors_of(draft.spec.doubt_width, len(draft.spec.classes)))
    doubt = shard_ref("doubt", data)
    changed = {"doubt": doubt, "unknown": DETECTOR, **others}
    fields = {name: getattr(draft, name) for name in Draft.model_fields}
    return Draft.model_validate({**fields, **changed}), {doubt.sha256: data}


@pytest.mark.parametrize("places", [[0, 1, 2], [0, 2]])
def test_the_log_odds_are_those_of_the_format(places: list[int]) -> None:
    tensors = tensors_of(6, 3)
    tokens = np.random.default_rng(1).normal(size=(20, 9)).astype(np.float32)
    found = decode_doubt(encode_doubt(tensors), places=places).log_odds(tokens)
    expected = [by_hand(tensors, token, places=places) for token in tokens]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_a_token_without_length_gives_finite_log_odds() -> None:
    tensors = tensors_of(6, 3)
    doubt = decode_doubt(encode_doubt(tensors), places=[0, 1, 2])
    assert np.isfinite(doubt.log_odds(tensors["doubt.shift"][None])).all()


def test_the_probability_is_between_0_and_1_whatever_the_odds() -> None:
    assert none_of_these(0.0) == 0.5
    assert none_of_these(2.0) == pytest.approx(1 - none_of_these(-2.0))
    assert none_of_these(3e38) == pytest.approx(0.0, abs=1e-300)
    assert none_of_these(-3e38) == 1.0


def test_doubt_is_written_where_there_is_one_and_nowhere_else() -> None:
    draft, _ = version()
    sealed = encode(draft, version=3)
    assert json.loads(sealed)["doubt"]["kind"] == "doubt"
    assert decode("x", sealed, version=3).model_shards[-1] == draft.doubt
    body = json.loads(encode(prepare().draft, version=3))
    assert "doubt" not in body
    del body["digest"]
    with pytest.raises(RecordInvalid, match="spelt in another way"):
        decode("x", seal({**body, "doubt": None}), version=3)


@pytest.mark.parametrize(
    "changed",
    [
        {"unknown": None},
        {"unknown": DETECTOR.model_copy(update={"score": "max-logit"})},
        {"doubt": None},
        {"doubt": shard_ref("classifier", b"")},
    ],
)
def test_a_score_and_a_shard_that_do_not_fit_are_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="doubt shard"):
        version(**changed)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda one: {**one, "doubt.bias": one["doubt.bias"][1:]}, "instead of F32"),
        (lambda one: {**one, "doubt.more": one["doubt.bias"]}, "not expected"),
        (lambda one: {**one, "doubt.bias": one["doubt.bias"] * np.float32(np.inf)}, "not finite"),
    ],
)
def test_a_doubt_shard_is_checked_before_it_is_read(spoil: Any, reason: str) -> None:
    draft, _ = version()
    data = encode_doubt(spoil(tensors_of(draft.spec.doubt_width, len(draft.spec.classes))))
    spoilt, _ = version(doubt=shard_ref("doubt", data))
    with pytest.raises(ShardCorrupt, match=reason):
        load_doubt(lambda ref: data, spoilt)


def test_a_version_without_the_shard_has_no_doubt() -> None:
    assert load_doubt(lambda ref: b"", prepare().draft) is None
