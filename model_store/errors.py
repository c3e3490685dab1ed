"""Define the errors that users may meet, as a tree. One table translates them to exit codes
(`model_store.cli.command`), another one to HTTP statuses (`dne_serve.http.problems`).

DneError
├── WrongUsage               the command line or a setting asks for something that makes no sense
│   ├── SpecInvalid          a network that cannot be built
│   ├── LabelInvalid         text that cannot name a class
│   ├── LabelConfigInvalid   a Label Studio project that gives an image no class
│   └── NothingToLearn       no label waits, or none that can be learnt from
├── DataRejected             a folder of images that cannot be learnt from
├── ImageRejected            bytes that are not an accepted image
│   └── ImageTooLarge        more pixels than allowed
├── Interrupted              the user stopped the run; the message tells what was published
├── JobCancelled             somebody does not want the job any more
├── NotPrivate               a folder or a file that others own or may write
├── WeightsMissing           pre-trained weights that cannot be had, or are damaged
├── PicturesGone             pictures that a run has learnt from were deleted meanwhile
└── StoreError
    ├── StoreNotFound        there is no store at that location
    ├── StoreUnsupported     another format number, or a backend without create-if-absent
    ├── VersionNotFound      no such version
    │   └── VersionDeleted   there was one, and a tombstone says so
    ├── VersionNeeded        a version that cannot be deleted
    ├── CopyRefused          two stores that were filled separately
    ├── AlternateRefused     a store that cannot lend experts to another one
    ├── StillBorrows         a store that cannot be released: it may need what it borrows
    ├── ItemNotFound         an item that is not in the inbox
    ├── LabelConflict        someone else labelled the item first
    ├── LabelsFull           an item with as many label records as it may have
    ├── JobNotFound          there is no such job
    ├── JobUnderWay          a job of the channel has not ended
    ├── ClaimLost            the job has ended, or another worker has it
    ├── ChannelNotFound      a channel that names nothing
    ├── ChannelMoved         someone else moved the channel first
    ├── NothingToRollBack    the channel has no earlier version, or was never rolled back
    ├── KeyMissing           a record that has to be signed, and no key to sign it with
    ├── RecordInvalid        a manifest, channel record or store.json that cannot be trusted
    │   ├── SignatureRefused a version or record that nobody we trust has signed for this store
    │   └── ChannelBroken    a head after a gap that is not a record, or that no record can follow
    ├── ShardMissing         a manifest names a shard that is not there
    │   ├── ShardForgotten   images that someone asked to forget
    │   └── ShardUnreachable an expert that no alternate of the store gives
    ├── KeptTooLarge         the kept images of a class take too much memory to show a few
    ├── ShardCorrupt         bytes that are not what the manifest says
    └── WriteFailed          the backend refused a write (disk full, I/O error)
        └── OutcomeUnknown   the backend did not say whether the write happened
"""

from __future__ import annotations

from collections.abc import Sequence


class DneError(Exception):
    """An error whose message is one clear sentence for the user."""


class WrongUsage(DneError): ...


class SpecInvalid(WrongUsage): ...


class LabelInvalid(WrongUsage): ...


class LabelConfigInvalid(WrongUsage): ...


class NothingToLearn(WrongUsage): ...


class DataRejected(DneError): ...


class CorrectionRefused(DataRejected):
    """A correction of an image that is not kept, or of a class that is not answered."""


class ImageRejected(DneError): ...


class ImageTooLarge(ImageRejected): ...


class Interrupted(DneError): ...


class JobCancelled(DneError):
    def __init__(self, job: str) -> None:
        super().__init__(f"job {job} was cancelled")
        self.job = job


class NotPrivate(DneError):
    def __init__(self, path: object, reason: str, next_step: str) -> None:
        super().__init__(f"{path} is not used, because {reason}; {next_step}")


class WeightsMissing(DneError): ...


class PicturesGone(DneError): ...


class StoreError(DneError): ...


class StoreNotFound(StoreError): ...


class StoreUnsupported(StoreError): ...


class VersionNotFound(StoreError):
    def __init__(self, version: int, *, hint: str = "") -> None:
        super().__init__(f"there is no version {version}{hint and f'; {hint}'}")
        self.version = version


class VersionDeleted(VersionNotFound):
    def __init__(self, version: int) -> None:
        StoreError.__init__(self, f"version {version} was deleted")
        self.version = version


class VersionNeeded(StoreError): ...


class CopyRefused(StoreError): ...


class AlternateRefused(StoreError): ...


class StillBorrows(StoreError):
    def __init__(self, store: str, location: str, why: str) -> None:
        super().__init__(
            f"store {store} at {location} is not released: {why}; make a whole copy of it with "
            "`dne-store copy`, and delete it first"
        )


class BundleRefused(CopyRefused):
    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path} is not a whole bundle: {reason}; nothing was taken")


class ItemNotFound(StoreError):
    def __init__(self, item: str) -> None:
        super().__init__(
            f"there is no item {item!r} in the inbox: it was not kept, or it is deleted"
        )
        self.item = item


class LabelConflict(StoreError):
    """`number` is that of the item's newest label record, 0 for none, and `said` its content."""

    def __init__(self, item: str, *, after: int, number: int, said: str, actor: str) -> None:
        newest = f"{actor} has written {said!r} as record {number}" if number else "it has none now"
        super().__init__(f"the label of item {item} has changed since record {after}: {newest}")
        self.item = item
        self.number = number
        self.said = said
        self.actor = actor


class LabelledOtherwise(StoreError):
    """The same picture has another label already."""


class LabelsFull(StoreError):
    def __init__(self, item: str, *, most: int) -> None:
        super().__init__(
            f"item {item} has {most} label records, and an item may have no more: its newest label "
            "stands; delete the item to be rid of it"
        )
        self.item = item


class JobNotFound(StoreError):
    def __init__(self, job: str) -> None:
        super().__init__(f"there is no job {job!r}")
        self.job = job


class JobUnderWay(StoreError):
    def __init__(self, job: str) -> None:
        super().__init__(f"job {job} is under way: wait for its end, or cancel it")
        self.job = job


class ClaimLost(StoreError):
    def __init__(self, job: str) -> None:
        super().__init__(f"job {job} has ended, or another worker has taken it over")
        self.job = job


class ChannelNotFound(StoreError): ...


class ChannelMoved(StoreError): ...


class NothingToRollBack(StoreError): ...


class KeyMissing(StoreError):
    def __init__(self) -> None:
        super().__init__(
            "nothing was written: a server that requires signatures signs channel records and "
            "jobs, and this one has no key; start it with --sign-key KEYFILE, or move the channel "
            "with `dne-store` and --sign KEYFILE where the key is"
        )


class RecordInvalid(StoreError):
    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name} cannot be trusted: {reason}")
        self.name = name
        self.reason = reason


class SignatureRefused(RecordInvalid): ...


class ChannelBroken(RecordInvalid):
    def __init__(self, name: str, reason: str, *, channel: str) -> None:
        super().__init__(
            name, f"{reason}; `dne-store mend-channel --channel {channel}` tells how to mend it"
        )


class ShardMissing(StoreError):
    def __init__(self, sha256: str) -> None:
        super().__init__(f"shard {sha256} is missing from the store")
        self.sha256 = sha256


class ShardForgotten(ShardMissing):
    def __init__(self, sha256: str, *, class_name: str) -> None:
        StoreError.__init__(self, f"shard {sha256} was forgotten: it held images of {class_name}")
        self.sha256 = sha256


class ShardUnreachable(ShardMissing):
    def __init__(self, sha256: str, reasons: Sequence[str]) -> None:
        StoreError.__init__(
            self,
            f"expert {sha256} is borrowed and cannot be read: {'; '.join(reasons)}; where both "
            "stores are within reach, `dne-store copy --to STORE` makes a whole copy",
        )
        self.sha256 = sha256


class KeptTooLarge(StoreError): ...


class ShardCorrupt(StoreError):
    def __init__(self, sha256: str, reason: str) -> None:
        super().__init__(f"shard {sha256} is corrupt: {reason}")
        self.sha256 = sha256
        self.reason = reason


class WriteFailed(StoreError): ...


class OutcomeUnknown(WriteFailed): ...
