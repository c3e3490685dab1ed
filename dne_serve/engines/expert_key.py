"""How an expert in memory is known: by its digest and by whom it reads."""

from __future__ import annotations

from model_store.records.manifest import Manifest

Path = tuple[object, ...]
"""The geometry, and the digest and shape of every expert up to the last one."""


def paths_of(manifest: Manifest) -> list[Path]:
    """Of every expert. By its ancestors too: a digest alone does not say whom it reads."""
    path: Path = (manifest.spec.until(0),)
    paths = []
    for task, spec in zip(manifest.tasks, manifest.spec.tasks, strict=True):
        path = (*path, (task.expert.sha256, spec.expert))
        paths.append(path)
    return paths
