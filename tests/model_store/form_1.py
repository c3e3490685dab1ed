"""Seal manifests that someone without the key has changed, or that older software has signed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from model_store.records.manifest import Manifest, decode, encode
from model_store.records.sealing import canonical, seal


def changed(manifest: Manifest, **members: Any) -> Manifest:
    """The same manifest with other members, sealed anew by someone without the key."""
    signature = manifest.signature and manifest.signature.model_dump()
    body = json.loads(encode(manifest, version=manifest.version))
    body = {**body, "signature": signature, **members}
    del body["digest"]
    return decode("x", seal(body), version=body["version"])


def with_form_1(manifest: Manifest, key: Path) -> Manifest:
    """Sign a manifest as software before form 2 did."""
    private = load_pem_private_key(key.read_bytes(), password=None)
    assert isinstance(private, Ed25519PrivateKey)
    body = json.loads(encode(manifest, version=manifest.version))
    del body["digest"], body["signature"]
    value = private.sign(b"dne-serve manifest\n" + canonical(body)).hex()
    public = private.public_key().public_bytes_raw().hex()
    return changed(manifest, signature={"key": public, "value": value})
