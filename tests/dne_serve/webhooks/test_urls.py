"""URLs and secrets that cannot be used end the command, and are not repeated."""

from __future__ import annotations

from pathlib import Path

import pytest

from dne_serve.cli import main
from dne_serve.settings import load_settings
from model_store.errors import WrongUsage
from tests.dne_serve.webhooks.test_outbox import SECRET


@pytest.mark.parametrize(
    ("webhook", "says"),
    [
        ("ftp://hush/", "webhook 1 cannot be used: it is not of the form https://host/path"),
        ("file:///hush", "it is not of the form"),
        ("hush", "it is not of the form"),
        ("http://a/x?hush=1,2", "webhook 2 .* written as %2C"),
        ("http://hush:99999/", "its host or port is not valid"),
        ("http://[hush/", "its host or port is not valid"),
        ("http://ann:hush@a/ b", "without spaces"),
        ("https://a/#hush", "after # is never sent"),
        ("http://a/" + "hush" * 600, "more than 2048 characters"),
        (",".join(f"http://hush/{n}" for n in range(9)), "9 webhooks, and at most 8 are allowed"),
    ],
)
def test_a_url_that_cannot_be_used_is_wrong_usage_and_is_not_repeated(
    webhook: str, says: str
) -> None:
    with pytest.raises(WrongUsage, match=says) as raised:
        load_settings(webhook=webhook)
    assert "hush" not in str(raised.value)


@pytest.mark.parametrize("secret", ["hush", "whsec_hush", "whsec_", f"{SECRET}?", " ", SECRET[6:]])
def test_a_secret_that_cannot_be_used_is_wrong_usage_and_is_not_repeated(
    secret: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "secret").write_text(secret)
    given = ["--webhook", f"http://127.0.0.1:9/,secret-file={tmp_path / 'secret'}"]
    assert main([*given, "--port", "0"]) == 2
    said = capsys.readouterr().err
    assert "webhook secret" in said
    assert "hush" not in said


def test_wrong_webhooks_end_the_command_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--webhook", "http://a/", "--webhook", "gopher://b/"]) == 2
    assert "webhook 2 cannot be used" in capsys.readouterr().err
    assert (
        main(["--port", "0", "--webhook", f"http://127.0.0.1:9/,secret-file={tmp_path / 'none'}"])
        == 2
    )
    assert "cannot be read" in capsys.readouterr().err
