"""Sign records with Ed25519, check signatures, and keep the trust file.

`cryptography` is imported when a key is used: commands that sign and check nothing start without.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import Field, ValidationError

from model_store.errors import KeyMissing, SignatureRefused, WrongUsage
from model_store.layout import version_name
from model_store.names import check_name
from model_store.records.manifest import Manifest
from model_store.records.sealing import (
    Record,
    Signature,
    SignedRecord,
    canonical,
    first_reason,
    parse_object,
    signed_bytes,
)

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

MAX_FILE_BYTES = 1 << 20
_FORM_1 = b"dne-serve manifest\n"
"""The first bytes that a signature of form 1 covers. The rest is the manifest, and no store."""
_SIGN_AGAIN = (
    "`dne-store copy --to STORE --sign KEYFILE` signs versions again, for the store at STORE"
)
_PublicKey = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
_Signable = Manifest | SignedRecord
S = TypeVar("S", bound=SignedRecord)


class Signer:
    """Sign records with one private key, which never leaves this object."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.public = key.public_key().public_bytes_raw().hex()

    def sign(self, body: dict[str, Any], *, kind: str, store: str) -> Signature:
        """Sign a record for the store with the id `store`, and for no other."""
        value = self._key.sign(signed_bytes(body, kind=kind, store=store)).hex()
        return Signature(form=2, key=self.public, store=store, value=value)


def new_signer(path: Path) -> Signer:
    """Make a key and write it to a new file that only its owner can read."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
    )

    key = Ed25519PrivateKey.generate()
    text = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError as error:
        raise WrongUsage(f"{path} is there already; a key is never overwritten") from error
    with open(file, "wb") as writer:
        writer.write(text)
        writer.flush()
        os.fsync(file)
    return Signer(key)


def load_signer(path: Path) -> Signer:
    """Read the key in `path`: PEM, PKCS #8, not encrypted. Raise WrongUsage for anything else."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        key = load_pem_private_key(_read(path, what="key file"), password=None)
    except TypeError as error:
        raise WrongUsage(f"the key in {path} is encrypted, which is not supported") from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise WrongUsage(f"{path} holds no private key in PEM form") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise WrongUsage(f"the key in {path} is not an Ed25519 key")
    return Signer(key)


def check_public_key(text: str) -> str:
    """Raise WrongUsage for text that is not a public key."""
    if not re.fullmatch(r"[0-9a-f]{64}", text):
        raise WrongUsage(f"{text[:80]!r} is not a public key: 64 hexadecimal digits, small letters")
    return text


def check_signature(record: _Signable, *, name: str) -> None:
    """Raise SignatureRefused where a signature does not fit its record and key."""
    signature = record.signature
    if signature is None:
        return
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    covered = _FORM_1 + canonical(_body(record))
    if signature.store is not None:
        covered = signed_bytes(_body(record), kind=record.signed_kind, store=signature.store)
    try:
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(signature.key))
        key.verify(bytes.fromhex(signature.value), covered)
    except (InvalidSignature, ValueError) as error:
        raise SignatureRefused(name, "its signature does not fit it") from error


def _body(record: _Signable) -> dict[str, Any]:
    return record.model_dump(mode="json", by_alias=True, exclude={"digest", "signature"})


class TrustFile(Record):
    """The JSON of the trust file. Names are for people; only the keys decide."""

    format: Literal[1] = 1
    trusted: dict[str, _PublicKey]


@dataclass(frozen=True, slots=True)
class Trust:
    """The names that may publish and their public keys, no key under two names."""

    keys: Mapping[str, str]

    def __post_init__(self) -> None:
        if len(set(self.keys.values())) != len(self.keys):
            raise WrongUsage("two names are trusted with the same key")
        for name in self.keys:
            check_name(name, what="the name")

    def name_of(self, key: str) -> str | None:
        return next((name for name, trusted in self.keys.items() if trusted == key), None)

    def check(self, manifest: Manifest, *, store: str, also_form_1: bool = False) -> str:
        """Return the name of the signer. Raise SignatureRefused unless the signer is trusted, and
        has signed for the store with the id `store` a version that may be served."""
        name = version_name(manifest.version)
        signer = self.check_record(manifest, name=name, store=store, also_form_1=also_form_1)
        gate = manifest.metrics.gate
        if gate is not None and not gate.passed and not gate.forced:
            raise SignatureRefused(name, "the gate refused it, and nobody forced it")
        return signer

    def check_record(
        self, record: _Signable, *, name: str, store: str, also_form_1: bool = False
    ) -> str:
        """Return the name of the signer of a record. Raise SignatureRefused unless the signer is
        trusted, and has signed this record for the store with the id `store`."""
        signature = record.signature
        if signature is None:
            raise SignatureRefused(name, "it is not signed, and signatures are required")
        signer = self.name_of(signature.key)
        if signer is None:
            raise SignatureRefused(
                name, f"it is signed with key {signature.key}, which is not trusted"
            )
        check_signature(record, name=name)
        if not (also_form_1 and signature.form == 1):
            _check_store(signature, name=name, store=store)
        return signer


def _check_store(signature: Signature, *, name: str, store: str) -> None:
    if signature.store is None:
        reason = "its signature has form 1, which fits any store"
    elif signature.store != store:
        reason = f"it is signed for store {signature.store}, and this is store {store}"
    else:
        return
    raise SignatureRefused(name, f"{reason}; {_SIGN_AGAIN}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """The key that signs records and the keys that are trusted, for the store with the id `store`.
    Without a trust file every record is taken, and without a key none is signed."""

    signer: Signer | None = None
    trust: Trust | None = None
    store: str = ""

    def __post_init__(self) -> None:
        """Refuse a key that is not trusted: its records would be refused by their own writer."""
        if self.signer is None or self.trust is None:
            return
        if self.trust.name_of(self.signer.public) is None:
            raise WrongUsage(
                f"the trust file does not name the key {self.signer.public} that is to sign; "
                f"`dne-store keys trust NAME {self.signer.public} --trust FILE` adds it"
            )

    @property
    def can_write(self) -> bool:
        """Return whether records can be written as their own writer would trust them."""
        return self.trust is None or self.signer is not None

    def check_can_write(self) -> None:
        """Raise KeyMissing where records have to be signed and cannot be."""
        if not self.can_write:
            raise KeyMissing

    def signed(self, record: S) -> S:
        """Return the record with a signature for this store, or as it is where there is no key."""
        self.check_can_write()
        if self.signer is None:
            return record
        signature = self.signer.sign(_body(record), kind=record.signed_kind, store=self.store)
        return record.model_copy(update={"signature": signature})

    def check(self, record: S, *, name: str) -> S:
        """Return the record. Raise SignatureRefused where it has to be trusted and is not."""
        if self.trust is not None:
            self.trust.check_record(record, name=name, store=self.store)
        return record

    def check_version(self, manifest: Manifest) -> Manifest:
        """Return the manifest. Raise SignatureRefused where it has to be trusted and is not."""
        if self.trust is not None:
            self.trust.check(manifest, store=self.store)
        return manifest


NO_KEYS = Keys()


def load_trust(path: Path | None) -> Trust:
    """Read the trust file. Raise WrongUsage where it is missing or wrong."""
    if path is None:
        raise WrongUsage("no trust file is named; give --trust FILE or set DNE_TRUST")
    data = _read(path, what="trust file")
    try:
        return Trust(TrustFile.model_validate(parse_object(data)).trusted)
    except ValidationError as error:
        raise WrongUsage(f"the trust file {path} is wrong: {first_reason(error)}") from error
    except (ValueError, WrongUsage) as error:
        raise WrongUsage(f"the trust file {path} is wrong: {error}") from error


def save_trust(path: Path, trust: Trust) -> None:
    """Replace the trust file at once: a server that starts reads the old or the new one, whole."""
    text = TrustFile(trusted=dict(trust.keys)).model_dump_json(indent=2) + "\n"
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(fresh, "x", encoding="utf-8") as writer:
            writer.write(text)
            writer.flush()
            os.fsync(writer.fileno())
        os.replace(fresh, path)
    finally:
        fresh.unlink(missing_ok=True)


def _read(path: Path, *, what: str) -> bytes:
    try:
        with open(path, "rb") as file:
            # A named pipe or a device could go on for ever.
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise WrongUsage(f"the {what} {path} is not a regular file")
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise WrongUsage(f"the {what} {path} cannot be read: {error.strerror}") from error
    if len(data) > MAX_FILE_BYTES:
        raise WrongUsage(f"the {what} {path} is larger than {MAX_FILE_BYTES} bytes")
    return data
