from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import SecretStr

from dne_serve.setting_values import (
    Canary,
    CollectLimits,
    parse_canary,
    parse_collect,
    parse_endpoint,
    parse_guard,
    parse_webhook,
)
from dne_serve.settings import MOVED, Settings, listed, load_settings
from model_store.errors import WrongUsage
from model_store.preprocess import MAX_PIXELS


def test_it_listens_on_this_machine_only_unless_told() -> None:
    settings = load_settings()
    assert (settings.host, settings.port) == ("127.0.0.1", 8000)
    assert (settings.store, settings.channel) == ("./models", "production")


def test_the_documented_limits_are_the_defaults() -> None:
    settings = load_settings()
    assert settings.max_body_bytes == 32 << 20
    assert settings.max_images == 64
    assert settings.max_pixels == MAX_PIXELS


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


def test_a_setting_with_several_parts_is_one_value() -> None:
    collecting = parse_collect(listed("unknown, score<0.6, per-hour=5, free-bytes=0, days=0.5"))
    assert [rule.text for rule in collecting.rules] == ["unknown", "score<0.6"]
    assert collecting.limits == CollectLimits(per_hour=5, total=10_000, free_bytes=0, days=0.5)
    guarding = parse_guard(listed("errors>1%,seconds=60"))
    assert ([rule.text for rule in guarding.rules], guarding.seconds) == (["errors>1%"], 60)
    tried = parse_canary(listed("7=5%,shadow=8"))
    assert (tried.canary, tried.shadow) == (Canary(version=7, share=0.05), 8)
    webhook = parse_webhook(SecretStr("http://a/,inbox=50,http://b/,secret-file=/run/secret"))
    assert [url.host for url in webhook.urls] == ["a", "b"]
    assert (webhook.inbox, webhook.secret_file) == (50, Path("/run/secret"))
    tracing = parse_endpoint(SecretStr("http://a:4318,sample=0.25"))
    assert (tracing.url.port, tracing.url.target, tracing.sample) == (4318, "/v1/traces", 0.25)


@pytest.mark.parametrize(
    "given",
    [
        {"collect": "unknown,per-hour=0"},
        {"collect": "unknown,total=1.5"},
        {"collect": "unknown,days=4000"},
        {"guard": "errors>1%,seconds=0"},
        {"guard": "errors>1%,seconds=nan"},
        {"canary": "7=5%,8=5%"},
        {"canary": "shadow=x"},
        {"canary": "shadow=1,shadow=2"},
        {"webhook": "http://a/,inbox=0"},
        {"log_level": "info,yaml"},
    ],
)
def test_a_part_of_a_setting_that_makes_no_sense_is_named(given: dict[str, str]) -> None:
    with pytest.raises(WrongUsage, match=next(iter(given))):
        load_settings(**given)


@pytest.mark.parametrize("name", sorted(MOVED))
def test_a_setting_of_an_earlier_version_is_refused_with_what_stands_in_its_place(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"DNE_{name.upper()}", "1")
    with pytest.raises(WrongUsage, match=f"{name} does not exist any more: "):
        load_settings()


def test_there_are_at_most_forty_settings() -> None:
    assert len(Settings.model_fields) <= 40
