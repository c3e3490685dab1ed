from __future__ import annotations

import pytest

from model_store.errors import NothingToRollBack, RecordInvalid, WrongUsage
from model_store.records.channel import (
    ChannelRecord,
    check_channel_name,
    decode_record,
    resume_target,
    rollback_target,
)
from model_store.records.sealing import seal, seal_record
from tests.model_store.drafts import record


def _history(*moves: str) -> list[ChannelRecord]:
    """`f3` follows version 3, `p1` pins version 1."""
    modes = {"f": "follow", "p": "pin"}
    return [
        record(number, int(move[1:]), modes[move[0]]) for number, move in enumerate(moves, start=1)
    ]


@pytest.mark.parametrize(
    ("moves", "target"),
    [
        (["f1", "f2"], 1),
        (["f1", "f2", "f3"], 2),
        (["f1", "f2", "f3", "p2"], 1),
        (["f1", "f2", "f3", "p1", "f4"], 1),
        (["f1", "f2", "f3", "p2", "f3"], 2),
        (["f1", "f2", "f3", "p2", "p1", "f3"], 2),
        (["f1", "f2", "f2"], 1),
        (["f1", "f2", "f3", "f1"], 3),
        (["f1", "f2", "f3", "f1", "f4", "p1"], 3),
        (["f5", "p2"], 5),
    ],
)
def test_rollback_goes_to_the_version_named_before(moves: list[str], target: int) -> None:
    assert rollback_target(_history(*moves)) == target


def test_rolling_back_twice_goes_two_back_and_then_there_is_nothing_left() -> None:
    moves = ["f1", "f2", "f3"]
    for expected in (2, 1):
        assert rollback_target(_history(*moves)) == expected
        moves.append(f"p{expected}")
    with pytest.raises(NothingToRollBack, match="--to"):
        rollback_target(_history(*moves))


@pytest.mark.parametrize(
    ("moves", "target"),
    [(["f1", "f2", "p1"], 2), (["f1", "f2", "f3", "p2", "p1"], 3), (["f1", "p7"], 1)],
)
def test_resume_goes_to_the_version_followed_last(moves: list[str], target: int) -> None:
    assert resume_target(_history(*moves)) == target


@pytest.mark.parametrize("moves", [[], ["f1"], ["f1", "p1", "f2"], ["p1"]])
def test_resume_needs_a_rollback_to_end(moves: list[str]) -> None:
    with pytest.raises(NothingToRollBack):
        resume_target(_history(*moves))


def test_a_record_survives_its_bytes() -> None:
    one = record(7, 3, "pin", channel="production")
    assert decode_record("x", seal_record(one), channel="production", number=7) == one


@pytest.mark.parametrize(("channel", "number"), [("other", 7), ("production", 8)])
def test_a_record_under_another_name_is_refused(channel: str, number: int) -> None:
    sealed = seal_record(record(7, 3, channel="production"))
    with pytest.raises(RecordInvalid, match="it says it is record 7 of production"):
        decode_record("x", sealed, channel=channel, number=number)


@pytest.mark.parametrize(
    "change",
    [
        {"mode": "drop"},
        {"target": 0},
        {"target": "1"},
        {"target_digest": "D" * 64},
        {"time": "yesterday"},
        {"more": 1},
        {"reason": "x" * 2001},
        {"channel": "../up"},
    ],
)
def test_a_sealed_record_with_odd_fields_is_refused(change: dict[str, object]) -> None:
    body = {**record(1, 1).model_dump(), **change}
    with pytest.raises(RecordInvalid):
        decode_record("x", seal(body), channel="c", number=1)


@pytest.mark.parametrize(
    "name", ["", "Up", "..", ".", "a/b", "a b", "-a", "é", "a" * 64, "production\n", "a\0"]
)
def test_a_channel_name_is_plain(name: str) -> None:
    with pytest.raises(WrongUsage):
        check_channel_name(name)
