from __future__ import annotations

import hashlib
import json
from contextlib import suppress

import pytest

from model_store.errors import RecordInvalid, StoreUnsupported
from model_store.records.sealing import DIGEST_FIELD_BYTES, MAX_RECORD_BYTES, seal, unseal

BODY = {"format": 1, "b": [1.5, "é"], "a": None}


def test_a_sealed_body_comes_back_with_its_digest() -> None:
    body = unseal("x", seal(BODY))
    digest = body.pop("digest")
    assert body == BODY
    assert len(digest) == 64


def test_the_digest_is_that_of_the_bytes_without_the_digest_field() -> None:
    sealed = seal(BODY)
    bare = sealed[:-DIGEST_FIELD_BYTES] + b"}"
    assert json.loads(sealed)["digest"] == hashlib.sha256(bare).hexdigest()


def test_the_order_of_the_fields_does_not_change_the_bytes() -> None:
    assert seal(BODY) == seal(dict(reversed(BODY.items())))


def test_every_single_flipped_bit_is_refused() -> None:
    sealed = seal(BODY)
    for bit in range(8 * len(sealed)):
        flipped = bytearray(sealed)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises((RecordInvalid, StoreUnsupported)):
            unseal("x", bytes(flipped))


def test_every_truncation_is_refused() -> None:
    sealed = seal(BODY)
    for length in range(len(sealed)):
        with pytest.raises(RecordInvalid):
            unseal("x", sealed[:length])


def _resealed(bare: bytes) -> bytes:
    return bare[:-1] + f',"digest":"{hashlib.sha256(bare).hexdigest()}"}}'.encode()


@pytest.mark.parametrize(
    "sealed",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"[1]", id="not an object"),
        pytest.param(b"\xff\xfe", id="not UTF-8"),
        pytest.param(_resealed(b'{"format":1,"a":NaN}'), id="NaN"),
        pytest.param(_resealed(b'{"format":1,"a":1e999}'), id="infinite"),
        pytest.param(_resealed(b'{"a":1,"a":2,"format":1}'), id="duplicate key"),
        pytest.param(_resealed(b'{"format":1,"a":1}'), id="keys not sorted"),
        pytest.param(_resealed(b'{"a": 1,"format":1}'), id="white space"),
        pytest.param(_resealed(b'{"a":1.50,"format":1}'), id="another spelling of a number"),
        pytest.param(_resealed(b'{"a":"\\u00e9","format":1}'), id="needless escape"),
        pytest.param(_resealed(b'{"a":"\\ud800","format":1}'), id="lone surrogate"),
        pytest.param(_resealed(b'{"a":' + b"9" * 5000 + b',"format":1}'), id="huge number"),
        pytest.param(
            _resealed(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b',"format":1}'), id="deep"
        ),
        pytest.param(seal(BODY) + b"\n", id="newline at the end"),
        pytest.param(b" " * (MAX_RECORD_BYTES + 1), id="too large"),
    ],
)
def test_bytes_that_are_not_canonical_are_refused(sealed: bytes) -> None:
    with pytest.raises(RecordInvalid, match=r"^x cannot be trusted: "):
        unseal("x", sealed)


@pytest.mark.parametrize(("opened", "closed"), [(b"[", b"]"), (b'{"a":', b"}")])
def test_deep_json_is_refused_or_read_but_never_breaks_the_reader(
    opened: bytes, closed: bytes
) -> None:
    """At every depth: at one of them reading just works, and writing it again does not."""
    for depth in range(500, 1100):
        deep = opened * depth + b"1" + closed * depth
        with suppress(RecordInvalid):
            unseal("x", _resealed(b'{"a":' + deep + b',"format":1}'))


@pytest.mark.parametrize("number", [0, 2, "1", True, None])
def test_another_format_number_is_judged_before_anything_else(number: object) -> None:
    with pytest.raises(StoreUnsupported, match="reads format 1 only"):
        unseal("x", json.dumps({"format": number, "digest": "nonsense"}).encode())
