"""Export a version as ONNX files into a folder, where versions share the files of experts."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import onnx

from model_store.codec import load_doubt, load_network
from model_store.errors import WriteFailed
from model_store.inference.doubt import none_of_these
from model_store.onnx.model import OnnxPrecision, onnx_model, weights_of
from model_store.onnx.weights import DataFile, pack
from model_store.records.manifest import Manifest
from model_store.records.quality import Unknown
from model_store.store.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """An exported version.

    `path` is the graph. `total_bytes` counts the graph and its data files, `written_bytes` those
    that were written.
    """

    path: Path
    written_bytes: int
    total_bytes: int


def export_onnx(
    store: Store, version: int, *, out: Path, precision: OnnxPrecision = "fp32"
) -> Exported:
    """Write the data files, then `out/version-NNNNNNNN.onnx` (8 bits: `….int8.onnx`).

    A file is either complete or absent. The hash of an existing data file is checked.
    """
    manifest = store.manifest(version)
    weights = weights_of(
        load_network(store.read_shard, manifest),
        precision=precision,
        doubt=load_doubt(store.read_shard, manifest),
    )
    files = {part: pack(arrays) for part, arrays in weights.parts.items()}
    model = onnx_model(
        weights,
        files=files,
        metadata={**_metadata(manifest), "precision": precision},
        places=manifest.places,
    )
    ending = "onnx" if precision == "fp32" else f"{precision}.onnx"
    path = out / f"version-{version:08d}.{ending}"
    try:
        out.mkdir(parents=True, exist_ok=True)
        written = [_keep(out / file.name, file) for file in files.values()]
        graph_bytes = _write_graph(path, model)
    except OSError as error:
        raise WriteFailed(f"cannot write {path}: {error.strerror}") from error
    return Exported(
        path=path,
        written_bytes=sum(written) + graph_bytes,
        total_bytes=sum(len(file.data) for file in files.values()) + graph_bytes,
    )


def _keep(path: Path, file: DataFile) -> int:
    """Write a data file unless it exists with the right bytes, and count the bytes written."""
    if path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == path.stem:
        return 0
    with _replacing(path) as temporary:
        temporary.write_bytes(file.data)
    return len(file.data)


def _write_graph(path: Path, model: onnx.ModelProto) -> int:
    data = model.SerializeToString(deterministic=True)
    with _replacing(path) as temporary:
        temporary.write_bytes(data)
        onnx.checker.check_model(temporary)  # by its path, because it reads the data files too
    return len(data)


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Give a temporary file, and rename it to `path` if all went well."""
    handle, name = tempfile.mkstemp(dir=path.parent)
    temporary = Path(name)
    try:
        os.close(handle)
        yield temporary
        temporary.chmod(0o644)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _metadata(manifest: Manifest) -> dict[str, str]:
    return {
        "version": str(manifest.version),
        "digest": manifest.digest,
        "classes": json.dumps(manifest.classes, ensure_ascii=False),
        "preprocessing": manifest.preprocessing.model_dump_json(),
        "temperature": repr(manifest.calibration.temperature),
        **_unknown(manifest.unknown),
    }


def _unknown(unknown: Unknown | None) -> dict[str, str]:
    """Tell the rule for unknown images by what the graph gives: `unknown_score` or the logits."""
    if unknown is None:
        return {}
    if unknown.score == "log-odds":
        fitted = {"unknown_above": repr(none_of_these(unknown.threshold))}
        own = {name: one.above for name, one in unknown.by_class.items()}
        by_class = json.dumps(own, ensure_ascii=False)
        return {**fitted, "unknown_above_by_class": by_class} if own else fitted
    return {"unknown_below": repr(unknown.threshold)}
