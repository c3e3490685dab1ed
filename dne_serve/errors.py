"""Name the errors of the server. `dne_serve.http.problems` maps each to an HTTP answer.

DneError
├── Refused
│   ├── Malformed            the request cannot be understood
│   ├── TokenMissing         the route needs a token
│   ├── TokenRefused         the token is unknown or lacks the permission
│   ├── OriginRefused        a page of another site asks through a browser
│   ├── NotOffered           the server has nothing of that name
│   ├── NotInMemory          the version is not ready
│   ├── NotAcceptable        the client does not accept JSON
│   ├── TooLarge             the request is larger than allowed
│   ├── TypeNotAccepted      the body has another type
│   ├── HostUnknown          the Host header does not name this server
│   ├── RateExceeded         the client asks too often
│   ├── WaitedTooLong        the deadline of the request has passed
│   ├── QueueFull            too many images or answers are waiting
│   ├── StoreBusy            too many requests are waiting for the store
│   ├── Stopped              the server stops before it comes to the request
│   ├── DecoderUnavailable   no process can decode images
│   ├── NotReady             no version is served
│   ├── NotMoved             the channel stays, because its new version cannot be loaded
│   ├── NotServed            the channel was moved, and this server cannot follow
│   ├── NoRoom               the version does not fit beside those that have to stay
│   └── NotEnoughMemory      the machine has too little memory for the version
└── StoreError
    ├── StoreChanged         the store has vanished, or another one is in its place
    ├── ChannelWentBack      records of the channel have vanished
    └── ModelUnusable        the version gives logits that are not finite
"""

from __future__ import annotations

from model_store import errors


class Refused(errors.DneError):
    """A request or a version that the server turns down by its own rules."""


class Malformed(Refused):
    pass


class TokenMissing(Refused):
    pass


class TokenRefused(Refused):
    pass


class OriginRefused(Refused):
    pass


class NotOffered(Refused):
    pass


class NotInMemory(Refused):
    """A version that is not ready: the Open Inference Protocol says so with a 4xx."""


class NotAcceptable(Refused):
    pass


class TooLarge(Refused):
    pass


class TypeNotAccepted(Refused):
    pass


class HostUnknown(Refused):
    pass


class RateExceeded(Refused):
    def __init__(self, message: str, *, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class WaitedTooLong(Refused):
    pass


class QueueFull(Refused):
    pass


class StoreBusy(Refused):
    pass


class Stopped(Refused):
    pass


class DecoderUnavailable(Refused):
    """A decoding process that cannot be started, or was killed from outside. Neither the image nor
    the version has a part in it."""


class NotReady(Refused):
    pass


class NotMoved(Refused):
    pass


class NotServed(Refused):
    pass


class NoRoom(Refused):
    pass


class NotEnoughMemory(Refused):
    pass


class StoreChanged(errors.StoreError):
    pass


class ChannelWentBack(errors.StoreError):
    pass


class ModelUnusable(errors.StoreError):
    pass


# The nearest base class counts. Other messages of the store name files of this machine.
TOLD = frozenset(
    {
        Refused,
        StoreChanged,
        ChannelWentBack,
        ModelUnusable,
        errors.WrongUsage,
        errors.ImageRejected,
        errors.VersionNotFound,
        errors.ChannelNotFound,
        errors.ChannelMoved,
        errors.NothingToRollBack,
        errors.RecordInvalid,
        errors.ShardMissing,
        errors.ShardCorrupt,
        errors.StoreUnsupported,
    }
)
TOLD_INSTEAD: dict[type, str] = {
    errors.StoreNotFound: "there is no store yet",
    errors.WriteFailed: "the store refused the write; the server's log says why",
    errors.StoreError: "the store cannot be read; the server's log says why",
}
UNEXPECTED = "the server failed; its log says why"


def tell(error: Exception) -> str:
    """Put an error into one sentence that may leave this machine."""
    for kind in type(error).__mro__:
        if kind in TOLD:
            return str(error)
        if kind in TOLD_INSTEAD:
            return TOLD_INSTEAD[kind]
    return UNEXPECTED
