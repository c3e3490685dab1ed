from __future__ import annotations

from pathlib import Path

import pytest

from dne_serve.settings import load_settings
from model_store.errors import WrongUsage


def test_it_listens_on_this_machine_only_unless_told() -> None:
    settings = load_settings()
    assert (settings.host, settings.port) == ("127.0.0.1", 8000)
    assert (settings.store, settings.channel) == ("./models", "production")


def test_the_documented_limits_are_the_defaults() -> None:
    settings = load_settings()
    assert settings.max_body_bytes == 32 << 20
    assert settings.max_images == 64
    assert settings.max_pixels == 40_000_000


def test_arguments_win_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DNE_PORT", "9001")
    monkeypatch.setenv("DNE_MAX_BATCH", "3")
    settings = load_settings(port="9002")
    assert (settings.port, settings.max_batch) == (9002, 3)


def test_an_empty_variable_counts_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DNE_ADMIN_TOKEN", "")
    monkeypatch.setenv("DNE_STORE", "")
    settings = load_settings()
    assert settings.read_admin_token() is None
    assert settings.store == "./models"


@pytest.mark.parametrize(
    "given",
    [
        {"port": "70000"},
        {"backend": "tensorflow"},
        {"channel": "../production"},
        {"max_batch": "0"},
        {"model_name": "a/b"},
        {"model_name": "stats"},
        {"poll_seconds": "0"},
        {"max_queue": "10", "max_images": "20"},
    ],
)
def test_a_setting_that_makes_no_sense_is_named(given: dict[str, str]) -> None:
    with pytest.raises(WrongUsage, match=next(iter(given))):
        load_settings(**given)


def test_the_admin_token_comes_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret\n")
    settings = load_settings(admin_token_file=str(tmp_path / "token"))
    assert settings.read_admin_token() == "secret"


@pytest.mark.parametrize("content", [None, " \n"])
def test_a_token_file_without_a_token_is_wrong_usage(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "token").write_text(content)
    with pytest.raises(WrongUsage, match="token"):
        load_settings(admin_token_file=str(tmp_path / "token")).read_admin_token()


@pytest.mark.parametrize("token", ["two words", "schlüssel", "line\n", "\x00"])
def test_a_token_that_no_header_can_carry_is_wrong_usage(token: str) -> None:
    with pytest.raises(WrongUsage, match="ASCII"):
        load_settings(admin_token=token).read_admin_token()


def test_the_token_does_not_show_in_the_settings() -> None:
    assert "hush" not in repr(load_settings(admin_token="hush"))
