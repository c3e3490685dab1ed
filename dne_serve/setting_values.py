"""Parse the values of settings that have a form of their own: rules, versions with shares, URLs."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal
from urllib.parse import SplitResult, unquote_to_bytes, urlsplit

from pydantic import SecretStr

from model_store.errors import WrongUsage
from model_store.records.sealing import MAX_VERSION

What = Literal["unknown", "score", "margin", "disagrees", "sample"]
_BELOW = re.compile(r"(score|margin)\s*<\s*([01](?:\.[0-9]{1,6})?|\.[0-9]{1,6})")
SAMPLE = re.compile(r"sample\s*=\s*([0-9]{1,3}(?:\.[0-9]{1,6})?)\s*%")


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectRule:
    """A reason to keep a picture. `bound` is the limit of a score, or the share of a sample."""

    text: str
    what: What
    bound: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectLimits:
    """Limits on the pictures that a server keeps in the inbox."""

    per_hour: int = 200
    total: int = 10_000
    free_bytes: int = 512 << 20
    """Free bytes on the disk of the store below which no picture is kept."""
    days: float = 30.0
    """Days after which a picture is deleted."""


LIMIT = re.compile(r"(per-hour|total|free-bytes|days)=([0-9]{1,19}(?:\.[0-9]{1,6})?)")
LARGEST = {"per-hour": 1_000_000, "total": 1_000_000, "free-bytes": 1 << 60, "days": 3650}


@dataclass(frozen=True, slots=True, kw_only=True)
class Collecting:
    """The value of `--collect`."""

    rules: tuple[CollectRule, ...]
    limits: CollectLimits


def parse_collect(texts: Sequence[str]) -> Collecting:
    """Parse rules, and limits such as `per-hour=200` or `days=30`."""
    limits: dict[str, Any] = {}
    rules = []
    for text in texts:
        match = LIMIT.fullmatch("".join(text.split()))
        if match is None:
            rules.append(text)
        else:
            limits[match[1].replace("-", "_")] = _limit(match[1], match[2])
    return Collecting(rules=tuple(map(_collect_rule, rules)), limits=CollectLimits(**limits))


def _limit(name: str, text: str) -> float:
    value = float(text) if name == "days" else _whole(name, text)
    least = 0 if name == "free-bytes" else 1e-6
    if not least <= value <= LARGEST[name]:
        raise WrongUsage(f"collect: {name}={text} is not above 0 and up to {LARGEST[name]}")
    return value


def _whole(name: str, text: str) -> int:
    if not text.isdigit():
        raise WrongUsage(f"collect: {name}={text} is not a whole number")
    return int(text)


def _collect_rule(text: str) -> CollectRule:
    bare = "".join(text.split())
    if bare == "unknown":
        return CollectRule(text=bare, what="unknown")
    if bare == "disagrees":
        return CollectRule(text=bare, what="disagrees")
    if (match := _BELOW.fullmatch(bare)) and 0 < float(match[2]) <= 1:
        what: What = "score" if match[1] == "score" else "margin"
        return CollectRule(text=bare, what=what, bound=float(match[2]))
    if (match := SAMPLE.fullmatch(bare)) and float(match[1]) <= 100:
        return CollectRule(text=bare, what="sample", bound=float(match[1]) / 100)
    raise WrongUsage(
        f"{text!r} is not a rule for collecting: write unknown, score<0.6, margin<0.1, disagrees "
        "or sample=1%, and limits as per-hour=200, total=10000, free-bytes=0 or days=30"
    )


GUARD = re.compile(r"(errors|unknown)\s*>\s*([0-9]{1,3}(?:\.[0-9]{1,4})?)\s*%")


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardRule:
    """Largest share that a version may reach after its promotion."""

    text: str
    what: str
    share: float


_MAX_GUARD_S = 7 * 86400


@dataclass(frozen=True, slots=True, kw_only=True)
class Guarding:
    """The value of `--guard`."""

    rules: tuple[GuardRule, ...]
    seconds: float = 600.0
    """Time after a promotion for which the guard watches."""


def parse_guard(texts: Sequence[str]) -> Guarding:
    """Parse rules, and `seconds=600`."""
    rules = [text for text in texts if not text.startswith("seconds=")]
    times = [text.partition("=")[2].strip() for text in texts if text not in rules]
    seconds = 600.0
    for text in times:
        seconds = float(text) if re.fullmatch(r"[0-9]{1,7}(\.[0-9]{1,6})?", text) else 0.0
        if not 0 < seconds <= _MAX_GUARD_S:
            raise WrongUsage(f"guard: seconds={text} is not above 0 and up to {_MAX_GUARD_S}")
    return Guarding(rules=tuple(map(_guard_rule, rules)), seconds=seconds)


def _guard_rule(text: str) -> GuardRule:
    match = GUARD.fullmatch(text)
    if match is None or float(match[2]) > 100:
        raise WrongUsage(f"{text!r} is not a guard rule: write errors>1% or unknown>30%")
    return GuardRule(text=text, what=match[1], share=float(match[2]) / 100)


@dataclass(frozen=True, slots=True, kw_only=True)
class Canary:
    """A version that answers a share of the requests."""

    version: int
    share: float
    step: int = 0
    """Requests after which the share is doubled, until the version is promoted; 0: it stays."""

    @classmethod
    def parse(cls, text: str) -> Canary:
        """Read `7=5%`: version 7 answers five of a hundred requests."""
        match = re.fullmatch(r"([0-9]{1,10})=([0-9]{1,3}(?:\.[0-9]{1,6})?)%", text, re.ASCII)
        if match is None:
            raise WrongUsage(f"canary {text!r} is not of the form VERSION=SHARE%, such as 7=5%")
        version, percent = int(match[1]), float(match[2])
        if not 1 <= version <= MAX_VERSION or not 0 < percent <= 100:
            raise WrongUsage(
                f"canary {text!r} needs a version, and a share above 0 % and up to 100 %"
            )
        return cls(version=version, share=percent / 100)


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedVersions:
    """The value of `--canary`: versions that are tried beside the served one."""

    canary: Canary | None = None
    shadow: int | None = None
    """A version that is compared with the served one, and answers nobody."""


def parse_canary(texts: Sequence[str]) -> TriedVersions:
    """Parse `7=5%`, perhaps with `promote=1000`, `shadow=8`, or both."""
    shadows = [text.partition("=")[2] for text in texts if text.startswith("shadow=")]
    steps = [text.partition("=")[2] for text in texts if text.startswith("promote=")]
    shares = [Canary.parse(text) for text in texts if not text.startswith(("shadow=", "promote="))]
    if steps:
        if len(steps) > 1 or not shares or not re.fullmatch("[1-9][0-9]{0,8}", steps[0]):
            raise WrongUsage(
                "canary: promote=N stands beside one VERSION=SHARE%, and N is a number of requests"
            )
        shares = [replace(one, step=int(steps[0])) for one in shares]
    if len(shadows) > 1 or len(shares) > 1:
        raise WrongUsage("canary names one version with a share, and one shadow, at most")
    if shadows and not (shadows[0].isdigit() and 1 <= int(shadows[0][:20]) <= MAX_VERSION):
        raise WrongUsage(f"canary: shadow={shadows[0][:20]} is not the number of a version")
    return TriedVersions(
        canary=shares[0] if shares else None, shadow=int(shadows[0]) if shadows else None
    )


_MOST_URLS = 8
"""Each URL has a thread and a queue of its own."""
_MAX_URL_CHARACTERS = 2048
SCHEMES = ("http", "https")
_TRACES = "/v1/traces"
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Webhook:
    """The value of `--webhook`: receivers, and what they are told."""

    urls: tuple[WebhookUrl, ...]
    inbox: int | None = None
    """Post an event when so many pictures wait in the inbox."""
    secret_file: Path | None = None
    """File that holds the secret which signs the posts."""


_MAX_INBOX = 1 << 40


def check_webhook(webhook: SecretStr) -> SecretStr:
    """Raise WrongUsage for a setting that `parse_webhook` refuses."""
    parse_webhook(webhook)
    return webhook


def parse_webhook(webhook: SecretStr) -> Webhook:
    """Parse URLs, and `inbox=50` or `secret-file=PATH`, separated by commas."""
    texts = [text.strip() for text in webhook.get_secret_value().split(",") if text.strip()]
    inboxes = [text.partition("=")[2] for text in texts if text.startswith("inbox=")]
    files = [text.partition("=")[2] for text in texts if text.startswith("secret-file=")]
    urls = [text for text in texts if not text.startswith(("inbox=", "secret-file="))]
    if not urls:
        raise WrongUsage("webhook names no URL; give the one that gets the posts")
    inbox = int(inboxes[-1]) if inboxes and re.fullmatch(r"[0-9]{1,13}", inboxes[-1]) else None
    if inboxes and (inbox is None or not 1 <= inbox <= _MAX_INBOX):
        raise WrongUsage("webhook: inbox is not a number of pictures, such as inbox=50")
    return Webhook(
        urls=_parse_urls(urls), inbox=inbox, secret_file=Path(files[-1]) if files else None
    )


def _parse_urls(texts: Sequence[str]) -> tuple[WebhookUrl, ...]:
    """Parse URLs, each once. WrongUsage names the wrong one by its place."""
    if len(texts) > _MOST_URLS:
        raise WrongUsage(f"there are {len(texts)} webhooks, and at most {_MOST_URLS} are allowed")
    urls = []
    for number, text in enumerate(texts, start=1):
        try:
            urls.append(parse_url(text))
        except ValueError as error:
            raise WrongUsage(f"webhook {number} cannot be used: {error}") from None
    return tuple(dict.fromkeys(urls))


@dataclass(frozen=True, slots=True, kw_only=True)
class Tracing:
    """The value of `--otlp-endpoint`."""

    url: WebhookUrl
    sample: float = 1.0
    """Share of the requests that are traced."""


def check_endpoint(endpoint: SecretStr) -> SecretStr:
    """Raise WrongUsage for a setting that `parse_endpoint` refuses."""
    parse_endpoint(endpoint)
    return endpoint


def parse_endpoint(endpoint: SecretStr) -> Tracing:
    """Parse the base URL of a collector, or the whole URL of its traces, and `sample=0.1`. As the
    convention has it, `/v1/traces` is added to a base URL."""
    text, comma, option = endpoint.get_secret_value().partition(",")
    name, _, share = option.strip().partition("=")
    sample = float(share) if re.fullmatch(r"[01](\.[0-9]{1,9})?", share) else -1.0
    if comma and (name != "sample" or not 0 <= sample <= 1):
        raise WrongUsage("otlp_endpoint: after the URL stands sample= and a share of 0 to 1")
    try:
        url = parse_url(text.strip())
    except ValueError as error:
        raise WrongUsage(f"otlp_endpoint cannot be used: {error}") from None
    path, mark, query = url.target.partition("?")
    if not path.endswith(_TRACES):
        path = path.rstrip("/") + _TRACES
    target = f"{path}{mark}{query}"
    return Tracing(url=replace(url, target=target), sample=sample if comma else 1.0)


def parse_url(text: str) -> WebhookUrl:
    """Parse one URL. ValueError says what is wrong, and repeats nothing of it."""
    if len(text) > _MAX_URL_CHARACTERS:
        raise ValueError(f"it has more than {_MAX_URL_CHARACTERS} characters")
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
    authorization = None
    if parts.username is not None:
        pair = unquote_to_bytes(parts.username) + b":" + unquote_to_bytes(parts.password or "")
        authorization = f"Basic {base64.b64encode(pair).decode()}"
    return WebhookUrl(
        scheme=parts.scheme,
        host=parts.hostname,
        port=parts.port,
        target=(parts.path or "/") + (f"?{parts.query}" if parts.query else ""),
        authorization=authorization,
    )


def _split(text: str) -> SplitResult:
    try:
        parts = urlsplit(text)
        _ = parts.port  # raises for a port that cannot be
    except ValueError:
        raise ValueError("its host or port is not valid") from None  # the reason repeats the URL
    return parts


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelsPlace:
    """The value of `--models`: where the models are, and the file of their limits."""

    location: str
    limits: Path | None = None


def parse_models(text: str) -> ModelsPlace:
    """Parse `DIR` or `s3://bucket/prefix`, perhaps with `,limits=FILE` after it."""
    location, *others = [part.strip() for part in text.split(",")]
    limits = None
    for other in others:
        name, _, value = other.partition("=")
        if name != "limits" or not value:
            raise ValueError(f"{other!r} is not known here: write DIR or DIR,limits=FILE")
        limits = Path(value)
    if not location:
        raise ValueError("it names no directory or bucket")
    return ModelsPlace(location=location, limits=limits)


def check_models(text: str | None) -> str | None:
    if text is not None:
        parse_models(text)
    return text
