from __future__ import annotations

import pytest

from dne_serve.cli import build_parser
from dne_serve.loop.writer import GivenAnswer, broken_rules
from dne_serve.setting_values import parse_collect
from dne_serve.settings import Settings, listed, load_settings
from model_store.errors import WrongUsage


def given(score: float = 0.9, *, margin: float = 0.8, unknown: bool = False) -> GivenAnswer:
    top = (("a", score), ("b", score - margin))
    return GivenAnswer(version=1, top=top, margin=margin, is_unknown=unknown, unknown_score=None)


def kept_by(rules: str, answer: GivenAnswer, *, draw: float = 0.5) -> tuple[str, ...]:
    return broken_rules(parse_collect(listed(rules)).rules, answer, draw=draw)


def test_each_rule_keeps_what_it_says() -> None:
    assert kept_by("unknown", given(unknown=True)) == ("unknown",)
    assert kept_by("unknown", given()) == ()
    assert kept_by("score<0.6", given(0.59)) == ("score<0.6",)
    assert kept_by("score<0.6", given(0.6)) == ()
    assert kept_by("margin < 0.1", given(margin=0.05)) == ("margin<0.1",)
    assert kept_by("margin<0.1", given(margin=0.1)) == ()
    assert kept_by("sample=1%", given(), draw=0.009) == ("sample=1%",)
    assert kept_by("sample=1%", given(), draw=0.01) == ()
    assert kept_by("sample=0%", given(), draw=0.0) == ()
    assert kept_by("unknown,score<0.6", given(0.5, unknown=True)) == ("unknown", "score<0.6")


@pytest.mark.parametrize(
    "rule", ["", "score", "score>0.5", "score<1.5", "score<0", "sample=1", "sample=101%", "x<0.1"]
)
def test_anything_else_is_wrong_usage(rule: str) -> None:
    with pytest.raises(WrongUsage, match="is not a rule for collecting"):
        parse_collect([rule])


def test_nothing_is_collected_unless_it_is_asked_for() -> None:
    assert Settings().collect == ""
    with pytest.raises(WrongUsage, match="collect"):
        load_settings(collect="unknown,often")


def test_a_rule_may_be_given_several_times() -> None:
    options = build_parser().parse_args(["--collect", "unknown", "--collect", "score<0.6"])
    assert options.collect == ["unknown", "score<0.6"]
