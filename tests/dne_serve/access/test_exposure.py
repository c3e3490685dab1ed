"""What must be said before others can reach the server, and TLS."""

from __future__ import annotations

import datetime
import ipaddress
import json
import ssl
from pathlib import Path

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from dne_serve.access.auth import check_exposure, check_tls
from dne_serve.access.permission import TokenSource, digest_of, is_loopback, parse_line, read_tokens
from dne_serve.cli import main
from dne_serve.settings import load_settings
from model_store.errors import WrongUsage
from model_store.records.manifest import Manifest
from model_store.store.store import Store
from tests.dne_serve.test_cli import running
from tests.live_server import live_server, png

EVERYWHERE = ("0.0.0.0", "::", "192.168.1.7", "example.org", "")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_this_machine_alone_needs_no_token(host: str) -> None:
    assert is_loopback(host)
    check_exposure(load_settings(host=host), tokens=[])


@pytest.mark.parametrize("host", EVERYWHERE)
def test_another_address_needs_a_token_or_a_word(host: str) -> None:
    with pytest.raises(WrongUsage, match="--allow-open"):
        check_exposure(load_settings(host=host), tokens=[])
    check_exposure(load_settings(host=host, allow_open="true"), tokens=[])
    settings = load_settings(host=host, admin_token="a-secret-of-twenty-2")
    check_exposure(settings, tokens=read_tokens(settings))


@pytest.mark.parametrize("host", EVERYWHERE)
def test_a_short_admin_token_is_refused_where_others_reach_the_server(
    host: str, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text("x" * 15 + "\n")
    for given in ({"admin_token": "x" * 15}, {"admin_token_file": str(tmp_path / "token")}):
        with pytest.raises(WrongUsage, match="fewer than 16 characters"):
            read_tokens(load_settings(host=host, allow_open="true", **given))
    (tmp_path / "token").write_text("x" * 16 + "\n")
    assert read_tokens(load_settings(host=host, admin_token_file=str(tmp_path / "token")))


def test_the_command_refuses_a_short_admin_token_with_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DNE_ADMIN_TOKEN", "story-token")
    assert main(["--host", "0.0.0.0", "--port", "0"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: the admin token has fewer than 16 characters")
    assert "openssl rand" in said
    assert "story-token" not in said


def test_a_short_admin_token_is_enough_on_this_machine_and_the_log_warns(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    settings = load_settings(admin_token="story-token")
    check_exposure(settings, tokens=read_tokens(settings))
    assert "fewer than 16 characters" in caplog.text
    assert "story-token" not in caplog.text
    with live_server(tmp_path / "absent", admin_token="story-token") as live:
        assert live.admin("/resume", token="story-token").status_code == 503


def test_a_token_file_that_becomes_too_short_leaves_the_token_as_it_was(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "token"
    path.write_text("a" * 16)
    now = [0.0]
    settings = load_settings(host="0.0.0.0", admin_token_file=str(path))
    source = TokenSource(settings, clock=lambda: now[0])
    path.write_text("b" * 15)
    now[0] = 5.0
    assert [token.digest for token in source()] == [digest_of("a" * 16)]
    assert "stay as they were" in caplog.text


def test_what_stays_open_to_others_is_told(caplog: pytest.LogCaptureFixture) -> None:
    settings = load_settings(host="0.0.0.0")
    reader = parse_line(f"x read,admin sha256:{'ab' * 32}")
    check_exposure(settings, tokens=[reader])
    assert "predict routes are open" in caplog.text
    caplog.clear()
    check_exposure(settings, tokens=[parse_line(f"x predict,read sha256:{'ab' * 32}")])
    assert "routes are open" not in caplog.text


def test_the_command_refuses_with_a_sentence_and_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--host", "0.0.0.0", "--port", "0"]) == 2
    assert capsys.readouterr().err.startswith("error: everyone who reaches 0.0.0.0 could use")


def test_a_new_token_is_printed_once_with_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--new-token", "shop=predict", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["line"].startswith("shop predict sha256:")
    assert made["token"] not in made["line"]
    assert main(["--new-token", "shop=predict"]) == 0
    assert "shop predict sha256:" in capsys.readouterr().out
    assert main(["--new-token", "shop=everything"]) == 2


def test_hosts_may_be_given_several_times(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[str] = []

    def caught(settings: object, *, as_json: bool) -> int:
        given.append(settings.allowed_hosts)  # type: ignore[attr-defined]
        return 0

    monkeypatch.setattr("dne_serve.cli.serve", caught)
    assert main(["--allowed-hosts", "a.example", "--allowed-hosts", "b.example,c.example"]) == 0
    assert given == ["a.example,b.example,c.example"]


def certificate(folder: Path) -> tuple[Path, Path]:
    """For 127.0.0.1, signed by itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(address, critical=False)
        .sign(key, hashes.SHA256())
    )
    (folder / "cert.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    (folder / "key.pem").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return folder / "cert.pem", folder / "key.pem"


@pytest.mark.long
def test_with_a_certificate_it_speaks_https(store: Store, digits: Manifest, tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    trust = ssl.create_default_context(cafile=str(cert))
    given = ("--store", store.location, "--tls-cert", str(cert), "--tls-key", str(key))
    with running(*given, trust=trust) as (_, url), httpx.Client(verify=trust) as http:
        assert url.startswith("https://127.0.0.1:")
        answer = http.post(f"{url}/predict", files={"files": png()})
        assert answer.json()["version"] == 2


def test_a_certificate_without_its_key_is_wrong_usage(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    with pytest.raises(WrongUsage, match="together"):
        load_settings(tls_cert=str(cert))
    with pytest.raises(WrongUsage, match="certificate"):
        check_tls(load_settings(tls_cert=str(cert), tls_key=str(tmp_path / "absent")))
    with pytest.raises(WrongUsage, match="certificate"):
        check_tls(load_settings(tls_cert=str(key), tls_key=str(cert)))


def test_an_audit_log_that_cannot_be_written_is_wrong_usage(tmp_path: Path) -> None:
    code = main(["--port", "0", "--audit-log", str(tmp_path / "no" / "audit"), "--store", "x"])
    assert code == 2
