"""Define each setting once: every field is a long option of `dne-serve` and a `DNE_` variable."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    Field,
    PrivateAttr,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_settings import BaseSettings, SettingsConfigDict

from dne_serve.rules.collect import parse_collect_rules
from dne_serve.rules.guard import parse_rules
from dne_serve.rules.webhooks import check_endpoint, check_urls
from model_store.errors import WrongUsage
from model_store.machine import usable_cores
from model_store.precision import Asked
from model_store.records.channel import ChannelName
from model_store.records.fields import MAX_VERSION, first_reason
from model_store.records.signing import Trust, load_trust

Positive = Annotated[int, Field(ge=1, le=1 << 40)]
Seconds = Annotated[float, Field(gt=0, le=3600)]


def _not_stats(name: str) -> str:
    if name == "stats":
        raise ValueError("'stats' is where the protocol has the statistics of all models")
    return name


ModelName = Annotated[
    str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"), AfterValidator(_not_stats)
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Canary:
    """A version that answers a share of the requests."""

    version: int
    share: float

    @classmethod
    def parse(cls, text: str) -> Canary:
        """Read `7=5%`: version 7 answers five of a hundred requests."""
        found = re.fullmatch(r"([0-9]{1,10})=([0-9]{1,3}(?:\.[0-9]{1,6})?)%", text, re.ASCII)
        if found is None:
            raise WrongUsage(f"canary {text!r} is not of the form VERSION=SHARE%, such as 7=5%")
        version, percent = int(found[1]), float(found[2])
        if not 1 <= version <= MAX_VERSION or not 0 < percent <= 100:
            raise WrongUsage(f"canary {text!r} names no version, or no share of the requests")
        return cls(version=version, share=percent / 100)


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedLimits:
    """Limits and intervals that no option changes. Tests run servers with others."""

    header_seconds: float = 10.0
    """Time for a request's headers to arrive."""
    body_seconds: float = 60.0
    """Time for a request's body to arrive."""
    send_seconds: float = 30.0
    """Time for a client to take an answer."""
    keep_alive_seconds: int = 75
    """Time that a connection may wait for its next request."""
    max_header_bytes: int = 32 << 10
    """Bytes of a request's headers and trailers."""
    max_buffered_bytes: int = 512 << 20
    """Bytes of all request bodies at a time; a stalled body makes room, else 503."""
    decode_seconds: float = 5.0
    """Time to decode an image."""
    decode_threads: int = field(default_factory=lambda: max(2, usable_cores() // 4))
    """Threads, and processes of each lane, that decode images."""
    idle_seconds: float = 600.0
    """Time after which a version that nobody asks for leaves the memory."""
    guard_least: int = 50
    """Requests, or images, before the guard judges their share."""


class Settings(BaseSettings):
    """Arguments win over the environment. Nothing is read from files of its own accord."""

    model_config = SettingsConfigDict(
        env_prefix="DNE_", env_ignore_empty=True, extra="ignore", frozen=True
    )

    store: str = Field("./models", description="directory or s3://bucket/prefix of the store")
    channel: ChannelName = Field("production", description="the channel whose head is served")
    model_name: ModelName = Field(
        "dne", description="name of the model for Open Inference Protocol clients"
    )
    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    backend: Literal["auto", "torch", "onnx"] = Field(
        "auto",
        description="library that runs the network; auto measures at the start, for 5 s at most, "
        "which one is fastest here, and remembers it",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="device that runs the network"
    )
    precision: Asked = Field(
        "auto",
        description="auto, fp32, bf16 or int8; a reduced one computes only versions whose answers "
        "it was found to leave as they are",
    )
    threads: Annotated[int, Field(ge=1, le=1024)] | None = Field(
        None, description="threads of the engine (default: as many as there are cores)"
    )
    max_batch: Positive = Field(16, description="images in a batch at most")
    max_queue: Positive = Field(256, description="images that may wait; more are answered with 503")
    max_resident: Annotated[int, Field(ge=1, le=1000)] = Field(
        4, description="versions kept in memory besides the served one; they share their experts"
    )
    max_model_bytes: Positive | None = Field(
        None,
        description="bytes of experts and classifiers in memory at most; the version used least "
        "leaves, and a version that cannot fit is answered with 503 (default: no limit)",
    )
    canary: str | None = Field(
        None, description="VERSION=SHARE%: a version that answers a share of the requests"
    )
    shadow: Annotated[int, Field(ge=1, le=MAX_VERSION)] | None = Field(
        None, description="a version that is compared with the served one, and answers nobody"
    )
    poll_seconds: Seconds = Field(
        0.25, description="time between two looks at the channel; object storage bills each of them"
    )
    settle_seconds: Annotated[float, Field(ge=0, le=300)] = Field(
        0.0,
        description="age of a channel record at which every server switches to its version, loaded "
        "before; longer than a poll and a load; a rollback does not wait",
    )
    grace_seconds: Annotated[int, Field(ge=0, le=3600)] = Field(
        15, description="time that requests under way get when the server is told to stop"
    )
    drain_seconds: Annotated[float, Field(ge=0, le=3600)] = Field(
        0.0,
        description="time between SIGTERM, from which on GET /readyz is 503, and the end of taking "
        "requests; longer than a load balancer needs to notice",
    )
    max_body_bytes: Positive = Field(32 << 20, description="bytes of a request body at most")
    max_images: Positive = Field(64, description="images in a request at most")
    max_pixels: Positive = Field(40_000_000, description="pixels of an image at most")
    max_connections: Annotated[int, Field(ge=1, le=1_000_000)] = Field(
        1000, description="open connections at most; the slowest makes room for a new one"
    )
    max_wait_seconds: Seconds = Field(
        10.0,
        description="time that a request may wait for the engine, or for a version to be loaded; "
        "then 503",
    )
    admin_token: SecretStr | None = Field(
        None,
        description="opens the admin routes; not an option, as arguments are for all to see",
    )
    admin_token_file: Path | None = Field(
        None, description="file that holds the admin token; wins over DNE_ADMIN_TOKEN"
    )
    token_file: Path | None = Field(
        None, description="file of hashed tokens with their scopes; read again when it changes"
    )
    rate_limit: Annotated[float, Field(gt=0, le=1e6)] | None = Field(
        None, description="requests a second that a token may make (default: as many as it likes)"
    )
    allow_open: bool = Field(
        False, description="listen on an address that others reach although there is no token"
    )
    allowed_hosts: str = Field(
        "",
        description="names besides localhost and this machine's own that requests may be sent to, "
        "separated by commas; *.example.org and * are names too",
    )
    allowed_origins: str = Field(
        "",
        description="web pages besides this server's own that may ask, as https://name, "
        "separated by commas",
    )
    tls_cert: Path | None = Field(None, description="certificate chain (PEM), to speak HTTPS")
    tls_key: Path | None = Field(None, description="private key (PEM) of that certificate")
    audit_log: Path | None = Field(
        None, description="file that gets a line for every admin request, besides the log"
    )
    guard: str = Field(
        "",
        description="roll the channel back when a version does badly after its promotion: "
        "errors>1% or unknown>30%, or both separated by commas",
    )
    guard_seconds: Annotated[float, Field(gt=0, le=7 * 86400)] = Field(
        600.0, description="time after a promotion for which the guard watches"
    )
    collect: str = Field(
        "",
        description="keep pictures in the store's inbox, to be labelled: unknown, score<0.6, "
        "margin<0.1, disagrees (a shadow or canary gives another label), sample=1%, or several "
        "separated by commas; without it no picture is kept",
    )
    collect_per_hour: Annotated[int, Field(ge=1, le=1_000_000)] = Field(
        200, description="pictures that this server keeps in an hour at most"
    )
    collect_total: Annotated[int, Field(ge=1, le=1_000_000)] = Field(
        10_000, description="pictures in the inbox at which this server keeps no more"
    )
    collect_days: Annotated[float, Field(gt=0, le=3650)] = Field(
        30.0,
        description="days after which this server deletes a picture of the inbox; one with a "
        "label that no version has used stays",
    )
    with_trainer: bool = Field(
        False,
        description="run `dne-train worker` beside the server, for the jobs that the label page "
        "asks for; it gives way to the server, and ends with it",
    )
    webhook: Annotated[SecretStr, AfterValidator(check_urls)] | None = Field(
        None,
        description="URL that gets a post when a version is promoted, refused, rolled back or "
        "cannot be loaded; several are separated by commas",
    )
    webhook_secret: SecretStr | None = Field(
        None,
        description="signs these posts: whsec_ and base64; not an option, as arguments are for all "
        "to see",
    )
    webhook_secret_file: Path | None = Field(
        None, description="file that holds that secret; wins over DNE_WEBHOOK_SECRET"
    )
    webhook_inbox: Positive | None = Field(
        None, description="post to --webhook too when so many pictures wait in the inbox"
    )
    require_signatures: bool = Field(
        False, description="serve only versions signed by someone whom the trust file names"
    )
    trust: Path | None = Field(None, description="file that names who may publish, for the above")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="least level of the log; debug has a line for every request"
    )
    log_format: Literal["text", "json"] = Field(
        "text", description="form of the log: lines for people, or a JSON object a line"
    )

    otlp_endpoint: Annotated[SecretStr, AfterValidator(check_endpoint)] | None = Field(
        None,
        description="URL of an OpenTelemetry collector that gets traces by OTLP over HTTP, such as "
        "http://127.0.0.1:4318; needs the extra otel (default: no traces)",
    )
    otlp_sample: Annotated[float, Field(ge=0, le=1)] = Field(
        1.0,
        description="share of the requests that are traced; a client's traceparent decides for its "
        "own requests",
    )

    _fixed: FixedLimits = PrivateAttr(default_factory=FixedLimits)

    @property
    def fixed(self) -> FixedLimits:
        return self._fixed

    @model_validator(mode="after")
    def _a_request_fits_the_queue(self) -> Self:
        if self.max_queue < self.max_images:
            raise ValueError(
                f"max_queue ({self.max_queue}) is less than max_images ({self.max_images}): "
                "a full request could never be queued"
            )
        return self

    @model_validator(mode="after")
    def _tls_is_whole(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key are given together")
        return self

    @model_validator(mode="after")
    def _somebody_hears_of_the_inbox(self) -> Self:
        if self.webhook_inbox is not None and self.webhook is None:
            raise ValueError("webhook_inbox needs webhook: the URL that gets the post")
        return self

    @field_validator("guard")
    @classmethod
    def _guards_make_sense(cls, guard: str) -> str:
        parse_rules(listed(guard))
        return guard

    @field_validator("collect")
    @classmethod
    def _rules_make_sense(cls, collect: str) -> str:
        parse_collect_rules(listed(collect))
        return collect

    def read_admin_token(self) -> str | None:
        """Read the admin token, or None; WrongUsage for one that no client could send."""
        token = self._token_from_file()
        if token is None and self.admin_token is not None:
            token = self.admin_token.get_secret_value()
        if token is not None and not re.fullmatch(r"[!-~]+", token):
            raise WrongUsage("the admin token must be ASCII text without spaces")
        return token

    def read_canary(self) -> Canary | None:
        return Canary.parse(self.canary) if self.canary is not None else None

    def read_trust(self) -> Trust | None:
        """Read who may publish; None when anybody may. A change counts from the next start."""
        return load_trust(self.trust) if self.require_signatures else None

    def _token_from_file(self) -> str | None:
        if self.admin_token_file is None:
            return None
        try:
            return self.admin_token_file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise WrongUsage(
                f"the admin token file {self.admin_token_file} cannot be read"
            ) from error


def listed(text: str) -> tuple[str, ...]:
    """Split a setting that holds several entries."""
    return tuple(entry.strip() for entry in text.split(",") if entry.strip())


def load_settings(**given: Any) -> Settings:
    """Take `given`, else the environment, else the defaults; WrongUsage names the wrong one."""
    try:
        return Settings(**given)
    except ValidationError as error:
        raise WrongUsage(f"a setting cannot be used: {first_reason(error)}") from error
