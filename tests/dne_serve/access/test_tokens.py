from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from dne_serve.access.permission import (
    Permission,
    TokenSource,
    digest_of,
    find,
    new_token,
    parse_line,
    parse_lines,
    read_tokens,
)
from dne_serve.settings import load_settings
from model_store.errors import WrongUsage
from tests.dne_serve.fake_engine import Clock

HASH = "sha256:" + "ab" * 32


def write(path: Path, text: str) -> None:
    """As an editor would: a new file in place of the old one."""
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").replace(path)


def test_a_new_token_is_let_in_by_its_line_and_is_not_in_it() -> None:
    made = new_token("shop=predict,read")
    token = parse_line(made.line)
    assert (token.name, token.permissions) == ("shop", {Permission.PREDICT, Permission.READ})
    assert find([token], digest_of(made.secret)) is token
    assert made.secret not in made.line
    assert len(made.secret) > 40
    assert new_token("shop=predict").secret != made.secret


def test_a_line_may_give_a_rate_and_comments_say_nothing() -> None:
    [one, two] = parse_lines(
        f"# who\n\na.b read {HASH} rate=0.5\n  # more\nx predict,admin {HASH}\n", source="a test"
    )
    assert (one.name, one.rate, two.rate) == ("a.b", 0.5, None)
    assert two.permissions == {Permission.PREDICT, Permission.ADMIN}


@pytest.mark.parametrize(
    "line",
    [
        "shop predict",
        "shop predict sha256:abc",
        f"shop predict {HASH.upper()}",
        "shop predict dne_secret",
        f"shop write {HASH}",
        f"shop open {HASH}",
        f"shop predict, {HASH}",
        f"shop predict, read {HASH}",
        f"../shop predict {HASH}",
        f"shöp predict {HASH}",
        f"shop predict {HASH} rate=0",
        f"shop predict {HASH} rate=fast",
        f"shop predict {HASH} rate=1 rate=2",
    ],
)
def test_a_line_that_makes_no_sense_is_named_and_not_repeated(line: str) -> None:
    with pytest.raises(WrongUsage, match=r"^line 2 of a test: ") as refused:
        parse_lines(f"# tokens\n{line}\n", source="a test")
    assert "dne_secret" not in str(refused.value)


@pytest.mark.parametrize("wanted", ["shop", "shop=", "shop=write", "=read", "a b=read", "a=open"])
def test_a_token_without_a_name_or_scopes_is_wrong_usage(wanted: str) -> None:
    with pytest.raises(WrongUsage):
        new_token(wanted)


def test_tokens_of_the_file_and_the_admin_token_add_up(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text(f"one read {HASH}\ntwo predict {HASH}\n")
    settings = load_settings(token_file=str(tmp_path / "tokens"), admin_token="secret")
    assert [token.name for token in read_tokens(settings)] == ["", "one", "two"]
    assert read_tokens(load_settings()) == []


def test_a_token_file_that_cannot_be_read_is_wrong_usage(tmp_path: Path) -> None:
    with pytest.raises(WrongUsage, match="token file"):
        TokenSource(load_settings(token_file=str(tmp_path / "absent")))


def test_a_file_that_changes_counts_within_two_seconds(tmp_path: Path) -> None:
    path, clock = tmp_path / "tokens", Clock()
    write(path, f"old predict {HASH}\n")
    source = TokenSource(load_settings(token_file=str(path)), clock=clock)
    write(path, f"old predict {HASH}\nnew predict {HASH}\n")
    clock.now += 2
    assert [token.name for token in source()] == ["old", "new"]
    write(path, f"new predict {HASH}\n")
    clock.now += 2
    assert [token.name for token in source()] == ["new"]


def test_a_file_rewritten_in_place_with_the_same_length_is_seen(tmp_path: Path) -> None:
    path, clock = tmp_path / "tokens", Clock()
    path.write_text(f"old predict {HASH}\n")
    source = TokenSource(load_settings(token_file=str(path)), clock=clock)
    path.write_text(f"new predict {HASH}\n")
    os.utime(path, ns=(time.time_ns(), time.time_ns() + 10**9))
    clock.now += 2
    assert [token.name for token in source()] == ["new"]


@pytest.mark.parametrize("content", ["nonsense\n", None])
def test_a_file_that_goes_bad_leaves_the_tokens_as_they_were(
    tmp_path: Path, content: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    path, clock = tmp_path / "tokens", Clock()
    write(path, f"old predict {HASH}\n")
    source = TokenSource(load_settings(token_file=str(path)), clock=clock)
    if content is None:
        path.unlink()
    else:
        write(path, content)
    clock.now += 2
    assert [token.name for token in source()] == ["old"]
    assert "stay as they were" in caplog.text
    write(path, f"better predict {HASH}\n")
    clock.now += 2
    assert [token.name for token in source()] == ["better"]
