"""Name the errors of the server. `dne_serve.http.problems` maps each to an HTTP answer."""

from __future__ import annotations

from model_store import errors


class Refused(errors.DneError):
    """A request or a version that the server turns down by its own rules."""


class Malformed(Refused):
    """The request cannot be understood."""


class TokenMissing(Refused):
    """The route needs a token."""


class TokenRefused(Refused):
    """The token is unknown or lacks the permission."""


class OriginRefused(Refused):
    """A page of another site asks through a browser."""


class NotOffered(Refused):
    """The server has nothing of that name."""


def no_model(name: str) -> NotOffered:
    """Make the refusal for a model that is not there, or that a token may not see."""
    return NotOffered(f"there is no model {name[:100]!r} here")


class NotInMemory(Refused):
    """A version that is not ready: the Open Inference Protocol says so with a 4xx."""


class NotAcceptable(Refused):
    """The client does not accept JSON."""


class TooLarge(Refused):
    """The request is larger than allowed."""


class TypeNotAccepted(Refused):
    """The body has another type."""


class HostUnknown(Refused):
    """The Host header does not name this server."""


class RateExceeded(Refused):
    """The client asks too often."""

    def __init__(self, message: str, *, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class WaitedTooLong(Refused):
    """The deadline of the request has passed."""


class QueueFull(Refused):
    """Too many images or answers are waiting."""


class TooManyListeners(Refused):
    """Too many live views are open."""


class StoreBusy(Refused):
    """Too many requests are waiting for the store."""


class Stopped(Refused):
    """The server stops before it comes to the request."""


class DecoderUnavailable(Refused):
    """A decoding process that cannot be started, or was killed from outside. Neither the image nor
    the version has a part in it."""


class NotReady(Refused):
    """No version is served."""


class TooOld(Refused):
    """The client asks for a younger version than the served one."""


class NotKept(Refused):
    """A picture that a client wants in the inbox, and that is not taken."""


class ModelsUnread(Refused):
    """The place of the models cannot be read."""


class NotMoved(Refused):
    """The channel stays, because its new version cannot be loaded."""


class NotServed(Refused):
    """The channel was moved, and this server cannot follow."""


class NoRoom(Refused):
    """The version does not fit beside those that have to stay."""


class NotEnoughMemory(Refused):
    """The machine has too little memory for the version."""


class StoreChanged(errors.StoreError):
    """The store has vanished, or another one is in its place."""


class ChannelWentBack(errors.StoreError):
    """Records of the channel have vanished."""


class ModelUnusable(errors.StoreError):
    """The version gives logits that are not finite."""


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
        errors.ItemNotFound,
        errors.CorrectionRefused,
        errors.LabelConflict,
        errors.LabelsFull,
        errors.JobNotFound,
        errors.JobUnderWay,
        errors.ChannelMoved,
        errors.NothingToRollBack,
        errors.KeyMissing,
        errors.RecordInvalid,
        errors.ShardMissing,
        errors.KeptTooLarge,
        errors.ShardCorrupt,
        errors.StoreUnsupported,
    }
)
TOLD_INSTEAD: dict[type, str] = {
    errors.StoreNotFound: "there is no store yet",
    errors.ShardUnreachable: "an expert is in another store that cannot be read; the log says why",
    errors.WriteFailed: "the store refused the write; the server's log says why",
    errors.StoreError: "the store cannot be read; the server's log says why",
}
UNEXPECTED = "the server failed; its log says why"


def public_message(error: Exception) -> str:
    """Put an error into one sentence that may leave this machine."""
    for kind in type(error).__mro__:
        if kind in TOLD:
            return str(error)
        if kind in TOLD_INSTEAD:
            return TOLD_INSTEAD[kind]
    return UNEXPECTED
