"""Fetch the weights of a backbone from the Hugging Face Hub, or find them on this machine.

`huggingface_hub` is imported where it is used, and keeps its own cache; it reads HF_ENDPOINT,
HF_TOKEN, HF_HOME and HF_HUB_OFFLINE. Whatever it brings is checked here: safetensors only, with the
digest that is known or that the Hub has named.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from model_store.errors import DneError, WeightsMissing
from model_store.host.private import private_folder
from model_store.store.cache import cache_folder
from trainer.backbones.known import KnownBackbone, backbone_named

WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
SETTINGS = ("config.json", "preprocessor_config.json")
SHA256 = re.compile(r"[0-9a-f]{64}")
ANSWER_S = 10.0
_MAX_INDEX_BYTES = 4 << 20
MAX_FILES = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsFile:
    """A file of weights on this machine, and where it came from."""

    file: Path
    repository: str | None = None
    revision: str | None = None
    licence: str | None = None


def find_weights(asked: str, *, note: Callable[[str], None]) -> WeightsFile:
    """Find or fetch what was asked for, and say where it comes from and under which licence."""
    backbone = backbone_named(asked)
    if backbone is None:
        return WeightsFile(file=Path(asked))
    weights = here(backbone) if backbone.revision else _placed_by_hand(backbone)
    weights = weights or _of_hub(backbone, note=note)
    for file in _parts(weights.file, backbone):
        _refuse_damaged(weights.file.parent / file, backbone.sha256)
    commit = f" at {weights.revision}" if weights.revision else ""
    licence = weights.licence or f"not stated; read https://huggingface.co/{backbone.repository}"
    note(f"weights: {weights.repository}{commit}; licence: {licence}")
    return weights


def here(backbone: KnownBackbone) -> WeightsFile | None:
    """Find the weights on this machine, where no network is needed. Their bytes are not checked."""
    return _placed_by_hand(backbone) or _in_cache(backbone)


def place_for(backbone: KnownBackbone) -> Path:
    """Return the folder where a person may put the files of a backbone."""
    return cache_folder() / "backbones" / backbone.shown.replace("/", "--")


def _placed_by_hand(backbone: KnownBackbone) -> WeightsFile | None:
    folder = place_for(backbone)
    if folder.is_dir():
        private_folder(folder)
    for file in (folder / WEIGHTS, folder / INDEX):
        if file.is_file():
            return WeightsFile(file=file, repository=backbone.repository, licence=backbone.licence)
    return None


def _of_hub(backbone: KnownBackbone, *, note: Callable[[str], None]) -> WeightsFile:
    with _told(backbone):
        try:
            return _fetched(backbone, note=note)
        except _no_answer():
            weights = _in_cache(backbone)
            if weights is None:
                raise
            note(f"the Hub does not answer: {backbone.repository} is taken from the cache")
            return weights


def _fetched(backbone: KnownBackbone, *, note: Callable[[str], None]) -> WeightsFile:
    from huggingface_hub import HfApi

    about = HfApi().model_info(
        backbone.repository, revision=backbone.revision, timeout=ANSWER_S, token=None
    )
    names = [one.rfilename for one in about.siblings or ()]
    chosen = _chosen(backbone, names)
    if not isinstance(revision := about.sha, str):
        raise ValueError("the Hub names no commit")
    size = f", about {backbone.megabytes} MB" if backbone.megabytes else ""
    note(f"fetching {backbone.repository}{size}")
    for name in SETTINGS:
        if name in names:
            _download(backbone, name, revision)
    file = _download(backbone, chosen, revision)
    licence = getattr(about.card_data, "license", None) if about.card_data else None
    return WeightsFile(
        file=file,
        repository=backbone.repository,
        revision=revision,
        licence=backbone.licence or (licence if isinstance(licence, str) else None),
    )


def _chosen(backbone: KnownBackbone, names: list[str]) -> str:
    """Choose the file of weights among the names of a repository."""
    top = [name for name in names if name.endswith(".safetensors") and "/" not in name]
    for name in (WEIGHTS, INDEX):
        if name in names:
            return name
    if len(top) == 1:
        return top[0]
    if top:
        found = f"{len(top)} files of safetensors and no {WEIGHTS}: fetch one, and give its path"
    elif any(name.endswith((".bin", ".pt", ".pth", ".ckpt", ".pkl")) for name in names):
        found = "pickles only, which can run programs when they are read, and no safetensors"
    else:
        found = "no safetensors"
    raise WeightsMissing(f"{backbone.repository} has {found}")


def _download(backbone: KnownBackbone, name: str, revision: str) -> Path:
    """Download a file and, if it is an index, the files that it names beside it."""
    from huggingface_hub import HfApi

    fetch = partial(HfApi().hf_hub_download, backbone.repository, revision=revision)
    path = Path(str(fetch(name)))
    if name == INDEX:
        for part in _parts(path, backbone):
            fetch(part)
    return path


def _parts(file: Path, backbone: KnownBackbone) -> list[str]:
    """List the files of weights: the file itself, or those that an index names beside it."""
    if not file.name.endswith(INDEX):
        return [file.name]
    if file.stat().st_size > _MAX_INDEX_BYTES:
        raise WeightsMissing(f"{backbone.repository}: {file.name} is too large for an index")
    try:
        names = set(json.loads(file.read_bytes())["weight_map"].values())
        whole = all(one == Path(one).name and one.endswith(".safetensors") for one in names)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise WeightsMissing(f"{backbone.repository}: {file.name} is not an index") from error
    if not whole or not 0 < len(names) <= MAX_FILES:
        raise WeightsMissing(
            f"{backbone.repository}: {file.name} names files that are not safetensors beside it"
        )
    return sorted(names)


def _in_cache(backbone: KnownBackbone) -> WeightsFile | None:
    """Find all files of a backbone in the cache of huggingface_hub."""
    folder = _snapshot(backbone, backbone.revision)
    if folder is None:
        return None
    single = [*folder.glob("*.safetensors")]
    for file in (folder / WEIGHTS, folder / INDEX, *(single if len(single) == 1 else ())):
        if file.is_file() and all((folder / one).is_file() for one in _parts(file, backbone)):
            return WeightsFile(
                file=file,
                repository=backbone.repository,
                revision=folder.name,
                licence=backbone.licence,
            )
    return None


def _snapshot(backbone: KnownBackbone, revision: str | None) -> Path | None:
    """Return the folder of a revision in the cache, or of the one that came last, without
    importing huggingface_hub."""
    own = _cache_of_hub() / f"models--{backbone.repository.replace('/', '--')}" / "snapshots"
    if revision is None:
        return max(own.glob("*/"), key=lambda folder: folder.stat().st_mtime, default=None)
    return own / revision if (own / revision).is_dir() else None


def _cache_of_hub() -> Path:
    """Return the folder that huggingface_hub keeps files in, as its variables say."""
    above = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or os.path.join(above, "huggingface")
    return Path(os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")).expanduser()


def _refuse_damaged(path: Path, known: str | None) -> None:
    """Raise WeightsMissing for a file that is not safetensors or has another digest, and delete it
    from the cache, which names the file that a link leads to by its digest."""
    blob = path.resolve()
    named = blob.name if SHA256.fullmatch(blob.name) else None
    with path.open("rb") as opened:
        begins = opened.read(9)
        opened.seek(0)
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    expected = {one for one in (known, named) if one is not None}
    if len(begins) < 9 or not begins.endswith(b"{"):
        found = f"is not safetensors: it begins with {ascii(begins)[2:-1]}"
    elif expected - {digest}:
        found = f"has the SHA-256 {digest[:12]}… and not {min(expected - {digest})[:12]}…"
    else:
        return
    then = "put the right one there"
    if _cache_of_hub().resolve() in blob.parents:
        blob.unlink()
        then = "it was deleted: check HF_ENDPOINT and the proxy, and try again"
    raise WeightsMissing(f"{path} {found}; {then}")


def _no_answer() -> tuple[type[Exception], ...]:
    """Return the errors of a Hub that cannot be reached."""
    import httpx
    from huggingface_hub.errors import LocalEntryNotFoundError

    return (ConnectionError, httpx.TransportError, LocalEntryNotFoundError)


def _broken_off() -> tuple[type[Exception], ...]:
    import httpx

    return (httpx.RemoteProtocolError, httpx.ReadError)


@contextmanager
def _told(backbone: KnownBackbone) -> Iterator[None]:
    """Say in one sentence what went wrong with the Hub, and what to do."""
    from huggingface_hub import errors

    page = f"https://huggingface.co/{backbone.repository}"
    try:
        yield
    except DneError:
        raise
    except errors.GatedRepoError as error:
        raise WeightsMissing(
            f"{backbone.repository} asks for a login: accept its licence on {page}, and set "
            "HF_TOKEN to a token of yours"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise WeightsMissing(
            f"the Hub has no {backbone.repository}, or hides it without the right HF_TOKEN; "
            "`dne-train backbones` lists known names, and this folder has no such file"
        ) from error
    except (errors.RevisionNotFoundError, errors.EntryNotFoundError) as error:
        if isinstance(error.__cause__, errors.FileMetadataError):
            raise WeightsMissing(_no_hub(backbone)) from error
        if isinstance(error, errors.LocalEntryNotFoundError):
            raise WeightsMissing(_unreachable(backbone)) from error
        raise WeightsMissing(f"{backbone.repository} on the Hub lacks a file or commit") from error
    except _broken_off() as error:
        raise WeightsMissing(
            f"the download of {backbone.repository} broke off: try again, or {_by_hand(backbone)}"
        ) from error
    except _no_answer() as error:
        raise WeightsMissing(_unreachable(backbone)) from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        raise WeightsMissing(f"the Hub answered {status} for {backbone.repository}") from error
    except OSError as error:
        why = "the disk is full" if error.errno == errno.ENOSPC else str(error).partition("\n")[0]
        raise WeightsMissing(f"{backbone.repository} could not be fetched: {why}") from error
    except (ValueError, TypeError, KeyError) as error:
        raise WeightsMissing(_no_hub(backbone)) from error


def _no_hub(backbone: KnownBackbone) -> str:
    return (
        f"what answered for {backbone.repository} does not answer as the Hugging Face Hub does: "
        "check HF_ENDPOINT and the proxy"
    )


def _unreachable(backbone: KnownBackbone) -> str:
    from huggingface_hub import constants

    why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the Hub does not answer"
    return f"{why}, and {backbone.repository} is not in the cache: {_by_hand(backbone)}"


def _by_hand(backbone: KnownBackbone) -> str:
    at = backbone.revision or "main"
    return (
        f"put {WEIGHTS}, {' and '.join(SETTINGS)} of "
        f"https://huggingface.co/{backbone.repository}/tree/{at} into {place_for(backbone)}"
    )
