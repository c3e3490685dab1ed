"""Define the errors that a client may meet, as a tree.

ClientError
├── BadInput            an image that cannot be read here, or an argument that makes no sense
├── Unreachable         no server answers, or the connection broke
├── NotUnderstood       not a dne-serve response
└── Refused             the server answered with a problem document
    ├── BadRequest      400, 405, 406, 408, 415, 421, 431
    ├── NotAllowed      401, 403: a token is needed, is wrong or lacks the scope
    ├── NotFound        404: no such version or route
    ├── Conflict        409: the channel moved at the same time, or cannot be moved so
    ├── TooLarge        413: the body, an image or the number of images
    ├── BadImage        422: bytes that are not an accepted image
    ├── Busy            429, 503: try again later
    └── ServerFault     any other status from 500 on
"""

from __future__ import annotations


class ClientError(Exception):
    """Any error of this package."""


class BadInput(ClientError, ValueError):
    """An image that cannot be read here, or an argument that makes no sense."""


class Unreachable(ClientError):
    """No server answers, or the connection broke."""


class NotUnderstood(ClientError):
    """Not a dne-serve response."""


class Refused(ClientError):
    """The server answered with a problem document. `instance` finds the answer in its log."""

    def __init__(
        self, status: int, *, detail: str, instance: str = "", retry_after_s: float | None = None
    ) -> None:
        super().__init__(f"{status}: {detail}")
        self.status = status
        self.detail = detail
        self.instance = instance
        self.retry_after_s = retry_after_s


class BadRequest(Refused):
    """The request is malformed."""


class NotAllowed(Refused):
    """A token is needed, is wrong or lacks the scope."""


class NotFound(Refused):
    """No such version or route."""


class Conflict(Refused):
    """The channel moved at the same time, or cannot be moved so."""


class TooLarge(Refused):
    """The body, an image or the number of images is over the server's limit."""


class BadImage(Refused):
    """Bytes that are not an accepted image."""


class Busy(Refused):
    """The server asks to try again later."""


class ServerFault(Refused):
    """A fault of the server."""


_BY_STATUS: dict[int, type[Refused]] = {
    401: NotAllowed,
    403: NotAllowed,
    404: NotFound,
    409: Conflict,
    413: TooLarge,
    422: BadImage,
    429: Busy,
    503: Busy,
}


def error_for(status: int) -> type[Refused]:
    """Choose the class of a status."""
    return _BY_STATUS.get(status, ServerFault if status >= 500 else BadRequest)
