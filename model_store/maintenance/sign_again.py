"""Sign versions and channel records again, for the store that they are copied to.

A signature is part of its record's digest, and a child names the digest of its parent. So versions
are signed from the oldest on, and each names the new digest of its parent.
"""

from __future__ import annotations

from dataclasses import replace

from model_store.errors import SignatureRefused
from model_store.layout import record_name, version_name
from model_store.records.channel import ChannelRecord
from model_store.records.manifest import Manifest, decode, encode
from model_store.records.signing import Keys
from model_store.records.tombstone import DeletedVersion
from model_store.store.publish import signer_of


class Renewal:
    """Records of a source as they are to be in the target. Without a key they stay as they are."""

    def __init__(self, keys: Keys, *, source: str, target: str) -> None:
        """`source` and `target` are the ids of the stores. With a trust file only records that are
        trusted in the source are signed; without one, all but versions that the gate refused."""
        self._signs = replace(keys, trust=None, store=target)
        self._trust = keys.trust
        self._source = source
        self._digests: dict[str, str] = {}
        """New digests of versions by their old ones."""

    def version(self, manifest: Manifest) -> Manifest:
        """Renew a version, whose parent was renewed before."""
        if self._signs.signer is None:
            return manifest
        parent = manifest.parent_digest
        sealed = encode(
            manifest.model_copy(update={"parent_digest": parent and self._digest(parent)}),
            version=manifest.version,
            store=self._signs.store,
            signer=signer_of(manifest, self._signs.signer) if self._is_trusted(manifest) else None,
        )
        renewed = decode(version_name(manifest.version), sealed, version=manifest.version)
        self._digests[manifest.digest] = renewed.digest
        return renewed

    def record(self, record: ChannelRecord) -> ChannelRecord:
        if self._signs.signer is None:
            return record
        changed = {"target_digest": self._digest(record.target_digest), "signature": None}
        renewed = record.model_copy(update=changed)
        return self._signs.signed(renewed) if self._is_trusted(record) else renewed

    def deleted(self, tombstone: DeletedVersion) -> DeletedVersion:
        """Let a tombstone name the new digest of its parent. Its own version is gone, so that has
        no other digest."""
        parent = tombstone.parent_digest
        return tombstone.model_copy(update={"parent_digest": parent and self._digest(parent)})

    def _digest(self, old: str) -> str:
        return self._digests.get(old, old)

    def _is_trusted(self, record: Manifest | ChannelRecord) -> bool:
        """Return whether the source's readers trust a record, or a version of form 1."""
        if self._trust is None:
            return True
        try:
            if isinstance(record, Manifest):
                self._trust.check(record, store=self._source, also_form_1=True)
            else:
                name = record_name(record.channel, record.number)
                self._trust.check_record(record, name=name, store=self._source)
        except SignatureRefused:
            return False
        return True
