"""Read the tensors of a safetensors file, or of several that an index names. Run no pickle."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from model_store.errors import DataRejected, WrongUsage
from model_store.spec import Shape
from model_store.store.shard import Stored, read_layout

MAX_FILE_BYTES = 8 << 30
_MAX_JSON_BYTES = 4 << 20
MAX_FILES = 100
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "U8": 1, "BOOL": 1}
"""Bytes of a number, of the types that are read and of others that a file may hold."""
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_PICKLED = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
"""First bytes of the files that `torch.save` and `pickle` write."""
INDEX = ".index.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFile:
    """The tensors of a file, or of all files of an index, by their names."""

    path: Path
    sha256: str
    """Of the file; of an index, of its bytes and of the digests of its files."""
    places: Mapping[str, tuple[bytes, Stored]]

    def shape(self, name: str) -> Shape | None:
        found = self.places.get(name)
        return None if found is None else found[1].shape

    def dtype(self, name: str) -> str:
        return self.places[name][1].dtype

    def tensor(self, name: str) -> Tensor:
        """Read a tensor in float32. Raise DataRejected if a value is not finite there."""
        data, stored = self.places[name]
        own = bytearray(data[stored.start : stored.end])  # aligned, unlike the file's offsets
        if not own:
            return torch.empty(stored.shape)
        read = torch.frombuffer(own, dtype=DTYPES[stored.dtype]).reshape(stored.shape)
        tensor = read.to(torch.float32)
        if not tensor.isfinite().all():
            raise DataRejected(
                f"{self.path}: {shown([name])} holds a value that is not finite in float32"
            )
        return tensor


def read_weight_file(path: Path) -> WeightFile:
    """Read a file or an index. Raise DataRejected for anything but safetensors."""
    if not path.is_file():
        raise WrongUsage(f"`pretrained={path}` is not a file")
    if path.name.endswith(INDEX):
        return _read_indexed(path)
    data = _read(path, most=MAX_FILE_BYTES)
    layout = _layout(path, data)
    return WeightFile(
        path=path,
        sha256=hashlib.sha256(data).hexdigest(),
        places={name: (data, stored) for name, stored in layout.items()},
    )


def _read_indexed(path: Path) -> WeightFile:
    """Read the files that the `weight_map` of an index names, which lie beside it."""
    index = _read(path, most=_MAX_JSON_BYTES)
    files = _weight_map(path, index)
    digest = hashlib.sha256(index)
    places: dict[str, tuple[bytes, Stored]] = {}
    left = MAX_FILE_BYTES
    for name in sorted(set(files.values())):
        beside = path.parent / name
        if not beside.is_file():
            raise DataRejected(f"{path} names {shown([name])}, and there is no such file beside it")
        data = _read(beside, most=left)
        left -= len(data)
        digest.update(hashlib.sha256(data).digest())
        layout = _layout(beside, data)
        for tensor in (one for one, file in files.items() if file == name):
            if tensor not in layout:
                raise DataRejected(f"{path}: {shown([tensor])} is not in {shown([name])}")
            places[tensor] = (data, layout[tensor])
    return WeightFile(path=path, sha256=digest.hexdigest(), places=places)


def _weight_map(path: Path, index: bytes) -> dict[str, str]:
    files = read_json(path, index).get("weight_map")
    if not isinstance(files, dict) or not files:
        raise DataRejected(f"{path} is not an index of safetensors files: it has no weight_map")
    for name in files.values():
        if not isinstance(name, str) or name != Path(name).name or name in (".", ".."):
            raise DataRejected(f"{path} names {ascii(name)[:60]}, which is not a file beside it")
        _refuse_pickle(path.parent / name)
    if len(set(files.values())) > MAX_FILES:
        raise DataRejected(f"{path} names more than {MAX_FILES} files")
    return files


def _layout(path: Path, data: bytes) -> dict[str, Stored]:
    _refuse_pickle(path, data)
    try:
        return read_layout(data, item_bytes=ITEM_BYTES)
    except ValueError as error:
        raise DataRejected(f"{path} is not a safetensors file of weights: {error}") from error


def _refuse_pickle(path: Path, data: bytes = b"") -> None:
    if path.suffix.lower() in _PICKLES or data.startswith(_PICKLED):
        raise DataRejected(
            f"{path} is a pickle, which can run programs when it is read, so it is not read: "
            "give the safetensors file of the same model, or convert it elsewhere"
        )


def _read(path: Path, *, most: int) -> bytes:
    try:
        if path.stat().st_size > most:
            raise DataRejected(f"{path} is larger than {most / (1 << 30):.2g} GiB")
        return path.read_bytes()
    except OSError as error:
        raise WrongUsage(f"`pretrained={path}`: {error.strerror}") from error


def read_json(path: Path, data: bytes | None = None) -> dict[str, object]:
    """Read a JSON object. Raise DataRejected for anything else."""
    try:
        read = json.loads(_read(path, most=_MAX_JSON_BYTES) if data is None else data)
    except (ValueError, RecursionError) as error:
        raise DataRejected(f"{path} is not JSON") from error
    if not isinstance(read, dict):
        raise DataRejected(f"{path} is not a JSON object")
    return read


def shown(names: Iterable[str]) -> str:
    """List the first names harmlessly, whatever characters they have."""
    listed = sorted(names)
    some = ", ".join(ascii(name)[1:-1][:60] for name in listed[:4])
    return f"{some} and {len(listed) - 4} more" if len(listed) > 4 else some or "no tensors"
