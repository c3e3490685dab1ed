"""Parse the URLs that events and traces are posted to. No message repeats one."""

from __future__ import annotations

import base64
import re
from dataclasses import dataclass, field, replace
from urllib.parse import SplitResult, unquote_to_bytes, urlsplit

from pydantic import SecretStr

from model_store.errors import WrongUsage

MOST_URLS = 8
"""Each URL has a thread and a queue of its own."""
MAX_URL_CHARACTERS = 2048
SCHEMES = ("http", "https")
TRACES = "/v1/traces"
"""The path of a collector for traces, by the convention of OTLP."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookUrl:
    """One receiver. As text it shows scheme, host and port only: receivers have tokens in the
    path, the query and the user part."""

    scheme: str
    host: str
    port: int | None
    target: str = field(repr=False)
    """Path and query, as the request line has them."""
    authorization: str | None = field(repr=False)
    """Value of the header `Authorization`, from the user part of the URL."""

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}" + (f":{self.port}" if self.port is not None else "")


def check_urls(webhook: SecretStr) -> SecretStr:
    """Raise WrongUsage for a setting that `parse_urls` refuses."""
    parse_urls(webhook)
    return webhook


def parse_urls(webhook: SecretStr) -> tuple[WebhookUrl, ...]:
    """Parse URLs that are separated by commas, each once. WrongUsage says which one is wrong, by
    its place."""
    texts = [text.strip() for text in webhook.get_secret_value().split(",") if text.strip()]
    if len(texts) > MOST_URLS:
        raise WrongUsage(f"there are {len(texts)} webhooks, and {MOST_URLS} are the most")
    urls = []
    for number, text in enumerate(texts, start=1):
        try:
            urls.append(parse_url(text))
        except ValueError as error:
            raise WrongUsage(f"webhook {number} cannot be used: {error}") from None
    return tuple(dict.fromkeys(urls))


def check_endpoint(endpoint: SecretStr) -> SecretStr:
    """Raise WrongUsage for a setting that `parse_endpoint` refuses."""
    parse_endpoint(endpoint)
    return endpoint


def parse_endpoint(endpoint: SecretStr) -> WebhookUrl:
    """Parse the base URL of a collector, or the whole URL of its traces. As the convention has it,
    `/v1/traces` is added to a base URL."""
    try:
        url = parse_url(endpoint.get_secret_value())
    except ValueError as error:
        raise WrongUsage(f"otlp_endpoint cannot be used: {error}") from None
    path, mark, query = url.target.partition("?")
    if not path.endswith(TRACES):
        path = path.rstrip("/") + TRACES
    return replace(url, target=f"{path}{mark}{query}")


def parse_url(text: str) -> WebhookUrl:
    """Parse one URL. ValueError says what is wrong, and repeats nothing of it."""
    if len(text) > MAX_URL_CHARACTERS:
        raise ValueError(f"it has more than {MAX_URL_CHARACTERS} characters")
    if not re.fullmatch(r"[!-~]+", text):
        raise ValueError("a URL is ASCII text without spaces; write other characters as %XX")
    parts = _split(text)
    if parts.scheme not in SCHEMES or not parts.hostname:
        raise ValueError(
            "it is not of the form https://host/path or http://host/path; a comma inside a URL is "
            "written as %2C"
        )
    if parts.fragment:
        raise ValueError("a part after # is never sent; leave it out")
    return WebhookUrl(
        scheme=parts.scheme,
        host=parts.hostname,
        port=parts.port,
        target=(parts.path or "/") + (f"?{parts.query}" if parts.query else ""),
        authorization=_basic(parts),
    )


def _split(text: str) -> SplitResult:
    try:
        parts = urlsplit(text)
        _ = parts.port  # raises for a port that cannot be
    except ValueError:
        raise ValueError("its host or port is not valid") from None  # the reason repeats the URL
    return parts


def _basic(parts: SplitResult) -> str | None:
    if parts.username is None:
        return None
    pair = unquote_to_bytes(parts.username) + b":" + unquote_to_bytes(parts.password or "")
    return f"Basic {base64.b64encode(pair).decode()}"
