"""Caches belong to one user: others may neither write nor read them."""

from __future__ import annotations

import ast
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from dne_serve.engines.candidates import CANDIDATES, Request, remember_choice, remembered
from model_store.errors import NotPrivate
from model_store.host import private
from model_store.host.private import is_sealed, private_folder, read_private, replace_file, seal
from model_store.precision import Trial, remember_trial, remembered_trial
from model_store.records.manifest import Geometry

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("DNE_STATE", str(tmp_path / "state"))
    return tmp_path / "cache"


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_folders_are_made_for_this_user_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        made = private_folder(tmp_path / "above" / "cache")
    finally:
        os.umask(before)
    assert (mode(made), mode(made.parent)) == (0o700, 0o700)


def test_a_folder_that_others_may_read_is_closed(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir(mode=0o755)
    assert mode(private_folder(tmp_path / "cache")) == 0o700


@pytest.mark.parametrize("bits", [0o770, 0o707, 0o777])
def test_a_folder_that_others_may_write_is_refused(tmp_path: Path, bits: int) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(bits)
    with pytest.raises(NotPrivate, match=r"others may write it; .*chmod 700"):
        private_folder(tmp_path / "cache")


def test_a_folder_that_another_user_owns_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(NotPrivate, match="another user owns it"):
        private_folder(tmp_path / "cache")


def test_a_link_is_not_a_private_folder(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir(mode=0o700)
    (tmp_path / "cache").symlink_to(tmp_path / "theirs")
    with pytest.raises(NotPrivate, match="not a folder"):
        private_folder(tmp_path / "cache")


def test_a_file_that_others_may_write_is_not_read(tmp_path: Path) -> None:
    replace_file(tmp_path / "one", b"ours")
    assert mode(tmp_path / "one") == 0o600
    assert read_private(tmp_path / "one", max_bytes=9) == b"ours"
    (tmp_path / "one").chmod(0o620)
    with pytest.raises(NotPrivate):
        read_private(tmp_path / "one", max_bytes=9)


def test_a_seal_fits_one_name_one_content_and_one_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = seal("name", b"data")
    assert is_sealed("name", b"data", by=ours)
    assert not is_sealed("other", b"data", by=ours)
    assert not is_sealed("name", b"other", by=ours)
    assert mode(tmp_path / "state" / private.KEY_NAME) == 0o600
    monkeypatch.setenv("DNE_STATE", str(tmp_path / "theirs"))
    assert not is_sealed("name", b"data", by=ours)


def test_a_key_that_others_may_have_written_seals_nothing(tmp_path: Path) -> None:
    seal("name", b"data")
    (tmp_path / "state" / private.KEY_NAME).chmod(0o660)
    with pytest.raises(NotPrivate):
        seal("name", b"data")


ASKED = Request(
    network=Geometry(
        image_size=8,
        patch_size=4,
        depth=1,
        head_width=4,
        mlp_ratio=1,
        layer_norm_eps=1e-6,
        qkv_bias=True,
        token="class-attention",
    ),
    experts=(),
    candidates=CANDIDATES[:2],
    threads=1,
    max_batch=1,
)


@pytest.mark.parametrize(
    ("name", "write", "read"),
    [
        ("engine.json", lambda: remember_choice(ASKED, CANDIDATES[1]), lambda: remembered(ASKED)),
        (
            "precision.json",
            lambda: remember_trial("int8", Trial(runs=True, speedup=9.0)),
            lambda: remembered_trial("int8"),
        ),
    ],
)
def test_measurements_that_others_may_have_written_are_made_again(
    own_cache: Path, name: str, write: Callable[[], None], read: Callable[[], object]
) -> None:
    write()
    assert (mode(own_cache), mode(own_cache / name)) == (0o700, 0o600)
    assert read() is not None
    (own_cache / name).chmod(0o666)
    assert read() is None


def test_every_module_that_keeps_files_in_the_cache_keeps_the_rule() -> None:
    """One that asks for a cache folder writes through `private`, or through one that does."""
    by_rule = {
        "model_store.host.private",
        "model_store.host.machine",
        "trainer.learning.checkpoint",
    }
    bare: list[str] = []
    for package in ("model_store", "trainer", "dne_serve"):
        for path in sorted((ROOT / package).rglob("*.py")):
            found = list(ast.walk(ast.parse(path.read_text())))
            imports = [one for one in found if isinstance(one, ast.ImportFrom)]
            asks = any(
                name.name in ("cache_folder", "runs_folder")
                for one in imports
                for name in one.names
            )
            if asks and not {one.module for one in imports} & by_rule:
                bare.append(str(path.relative_to(ROOT)))
    assert not bare
