"""Tokens that somebody else has written do not decide what a model learns."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load, save

from model_store.host import private
from tests.trainer.start.pretrained_start import first, run
from trainer.embeddings import cache as token_cache

AT = private.SEAL_BYTES + token_cache.TIME_BYTES
Tokens = dict[str, np.ndarray]


def turned(told: Tokens) -> Tokens:
    """Give every image the token of the image at the other end."""
    return {**told, "tokens": told["tokens"][::-1].copy()}


def not_numbers(told: Tokens) -> Tokens:
    return {**told, "tokens": np.full_like(told["tokens"], np.nan)}


def rewrite(path: Path, change: Callable[[Tokens], Tokens], *, seal: bool) -> None:
    """Change a file of tokens, with the seal of this user or the digest that anybody can make."""
    content = path.read_bytes()
    data = content[private.SEAL_BYTES : AT] + save(change(load(content[AT:])))
    proof = private.seal(path.name, data) if seal else hashlib.sha256(data).digest()
    path.write_bytes(proof + data)


@pytest.fixture(autouse=True)
def _in_single_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.versions.assess.agreement_of", lambda *_, **__: {})


@pytest.fixture
def tokens(tmp_path: Path, letters: Path, vit: Path) -> Path:
    folder = tmp_path / "tokens"
    run(first(tmp_path / "clean", letters, vit, readout="narrow", tokens=folder))
    (path,) = folder.iterdir()
    return path


@pytest.mark.parametrize(
    ("change", "seal", "says"),
    [
        pytest.param(turned, False, "not written by this user", id="without-the-key"),
        pytest.param(turned, True, "do not follow from the images", id="with-the-key"),
        pytest.param(not_numbers, True, "not numbers", id="nan"),
    ],
)
def test_forged_tokens_are_discarded_with_a_warning(
    tmp_path: Path,
    letters: Path,
    vit: Path,
    tokens: Path,
    change: Callable[[Tokens], Tokens],
    seal: bool,
    says: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    rewrite(tokens, change, seal=seal)
    poisoned = run(
        first(tmp_path / "again", letters, vit, readout="narrow", tokens=tokens.parent)
    ).manifest
    assert says in caplog.text
    assert (
        poisoned.shards
        == run(first(tmp_path / "third", letters, vit, readout="narrow")).manifest.shards
    )


def test_a_file_under_the_name_of_another_is_not_used(
    tokens: Path, caplog: pytest.LogCaptureFixture
) -> None:
    moved = tokens.rename(tokens.with_name(f"{'0' * 64}.tokens"))
    assert token_cache._read(moved, width=1) is None
    assert "not written by this user" in caplog.text
    assert not moved.exists()


def test_tokens_are_kept_for_this_user_alone(tokens: Path) -> None:
    assert tokens.stat().st_mode & 0o777 == 0o600
    assert tokens.parent.stat().st_mode & 0o777 == 0o700


def test_a_folder_that_others_may_write_is_neither_read_nor_written(
    tmp_path: Path, letters: Path, vit: Path, tokens: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = tokens.read_bytes()
    tokens.parent.chmod(0o770)
    run(first(tmp_path / "again", letters, vit, readout="narrow", tokens=tokens.parent))
    assert f"chmod 700 {tokens.parent}" in caplog.text
    assert [one.read_bytes() for one in tokens.parent.iterdir()] == [before]


def test_tokens_are_gone_after_their_time(tokens: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    later_s = time.time() + token_cache.MAX_AGE_S + 60
    monkeypatch.setattr("trainer.embeddings.cache.time.time", lambda: later_s)
    os.utime(tokens)  # use does not make them younger
    assert token_cache._read(tokens, width=1) is None
    assert not tokens.exists()
