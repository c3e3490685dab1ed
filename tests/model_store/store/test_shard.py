from __future__ import annotations

import struct

import pytest

from model_store.errors import ShardCorrupt
from model_store.store.shard import FINITE_CHUNK_BYTES, check_shard, shard_ref
from tests.model_store.drafts import safetensors

COUNT = 2 * FINITE_CHUNK_BYTES // 4 + 5
IN_A_CHUNK = FINITE_CHUNK_BYTES // 4


def _check(position: int, value: float) -> None:
    payload = bytearray(4 * COUNT)
    struct.pack_into("<f", payload, 4 * position, value)
    data = safetensors({"weight": ("F32", (COUNT,), bytes(payload))})
    check_shard(shard_ref("expert", data), data, expected={"weight": (COUNT,)})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("position", [0, IN_A_CHUNK - 1, IN_A_CHUNK, 2 * IN_A_CHUNK, COUNT - 1])
def test_a_value_that_is_not_finite_is_refused_wherever_it_is(position: int, value: float) -> None:
    with pytest.raises(ShardCorrupt, match="not finite"):
        _check(position, value)


@pytest.mark.parametrize("position", [0, IN_A_CHUNK, COUNT - 1])
def test_the_largest_finite_values_are_accepted(position: int) -> None:
    _check(position, 3.4e38)
    _check(position, -3.4e38)
