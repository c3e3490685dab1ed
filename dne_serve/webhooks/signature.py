"""Sign posts as the Standard Webhooks specification says: HMAC-SHA256 of id, time and body."""

from __future__ import annotations

import base64
import binascii
import hmac
from collections.abc import Sequence

from dne_serve.settings import Settings
from model_store.errors import WrongUsage

PREFIX = "whsec_"
FEWEST_BYTES, MOST_BYTES = 24, 64
MOST_SECRETS = 4


def read_secrets(settings: Settings) -> tuple[bytes, ...]:
    """Read the secrets of the settings; none for posts that are not signed."""
    path = settings.webhook_secret_file
    if path is not None:
        try:
            return parse_secrets(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise WrongUsage(f"the webhook secret file {path} cannot be read") from error
    if settings.webhook_secret is None:
        return ()
    return parse_secrets(settings.webhook_secret.get_secret_value())


def parse_secrets(text: str) -> tuple[bytes, ...]:
    """Parse secrets that are separated by white space: during a change there are two of them.
    WrongUsage does not repeat them."""
    words = text.split()
    if not 1 <= len(words) <= MOST_SECRETS:
        raise WrongUsage(f"there are {len(words)} webhook secrets, not 1 to {MOST_SECRETS}")
    return tuple(_parse(word) for word in words)


def sign(secrets: Sequence[bytes], *, id: str, timestamp: int, body: bytes) -> str:
    """Return the value of `webhook-signature`: a signature by each secret."""
    signed = f"{id}.{timestamp}.".encode() + body
    made = (base64.b64encode(hmac.digest(secret, signed, "sha256")).decode() for secret in secrets)
    return " ".join(f"v1,{one}" for one in made)


def _parse(word: str) -> bytes:
    try:
        secret = base64.b64decode(word.removeprefix(PREFIX), validate=True)
    except (binascii.Error, ValueError):
        secret = b""
    if not word.startswith(PREFIX) or not FEWEST_BYTES <= len(secret) <= MOST_BYTES:
        raise WrongUsage(
            f"a webhook secret is {PREFIX} and {FEWEST_BYTES} to {MOST_BYTES} bytes in base64; "
            f'make one with: echo "{PREFIX}$(openssl rand -base64 32)"'
        )
    return secret
