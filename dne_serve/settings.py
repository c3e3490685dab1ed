"""Define each setting once: every field is a long option of `dne-serve` and a `DNE_` variable."""

from __future__ import annotations

import os
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
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_settings import BaseSettings, SettingsConfigDict

from dne_serve.setting_values import (
    check_endpoint,
    check_models,
    check_webhook,
    parse_canary,
    parse_collect,
    parse_guard,
)
from model_store.errors import WrongUsage
from model_store.host.machine import usable_cores
from model_store.precision import Asked
from model_store.records.channel import ChannelName
from model_store.records.sealing import first_reason
from model_store.records.signing import NO_KEYS, Keys, load_signer, load_trust

Positive = Annotated[int, Field(ge=1, le=1 << 40)]
Seconds = Annotated[float, Field(gt=0, le=3600)]
_LOG_LEVEL = r"^(debug|info|warning|error)(,(text|json))?$"


def _not_stats(name: str) -> str:
    if name == "stats":
        raise ValueError("'stats' is where the protocol has the statistics of all models")
    return name


NO_MODEL = "dne"
"""The name of the model of a server with one store. With many it is the name of none."""
ModelName = Annotated[
    str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"), AfterValidator(_not_stats)
]


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedLimits:
    """Limits and intervals that no option changes. Tests run servers with others."""

    header_seconds: float = 10.0
    """Time for a request's headers to arrive, from its first byte or from connecting."""
    body_seconds: float = 60.0
    """Time from the end of the headers to the end of the body."""
    send_seconds: float = 30.0
    """Time that a client may leave an answer unread."""
    keep_alive_seconds: int = 75
    """Time that a connection may wait for its next request."""
    max_header_bytes: int = 32 << 10
    """Bytes of a request's headers and trailers."""
    max_buffered_bytes: int = 512 << 20
    """Bytes of all request bodies at a time; a stalled body makes room, else 503."""
    decode_seconds: float = 5.0
    """Time to decode an image."""
    decode_threads: int = field(default_factory=lambda: max(2, usable_cores() // 4))
    """Threads, and processes for each kind of image, that decode images."""
    idle_seconds: float = 600.0
    """Time after which a version that nobody asks for leaves the memory."""
    guard_least: int = 50
    """Requests, or images, before the guard judges their share."""
    max_connections: int = 1000
    """Open connections; the slowest makes room for a new one."""
    max_models: int = 4000
    """Models in memory. Each takes about a hundred kilobytes beside its classifier."""
    max_resident: int = 4
    """Versions in memory besides the served one. They share their experts."""


def listed(text: str) -> tuple[str, ...]:
    """Split a setting that holds several entries."""
    return tuple(entry.strip() for entry in text.split(",") if entry.strip())


PARSERS = {"guard": parse_guard, "collect": parse_collect, "canary": parse_canary}


class Settings(BaseSettings):
    """Arguments win over the environment. No file is read unless a setting names it."""

    model_config = SettingsConfigDict(
        env_prefix="DNE_", env_ignore_empty=True, extra="ignore", frozen=True
    )

    store: str = Field("./models", description="directory or s3://bucket/prefix of the store")
    models: Annotated[str | None, AfterValidator(check_models)] = Field(
        None,
        description="instead of one store, a directory or s3://bucket/prefix of many: every store "
        "in it is a model, named by its folder, below /models/NAME; --model-name is the one that "
        "routes without a name ask; DIR,limits=FILE gives each model its limits",
    )
    channel: ChannelName = Field("production", description="the channel whose head is served")
    model_name: ModelName = Field(
        NO_MODEL, description="name of the model for Open Inference Protocol clients"
    )
    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    backend: Literal["auto", "torch", "onnx"] = Field(
        "auto",
        description="library that runs the network; auto begins with a safe one, measures beside "
        "the server which one is fastest here, switches to it, and remembers it",
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
    max_model_bytes: Positive | None = Field(
        None,
        description="bytes of experts and classifiers in memory at most; the version used least "
        "leaves, and a version that cannot fit is answered with 503 (default: no limit)",
    )
    canary: str = Field(
        "",
        description="versions beside the served one: VERSION=SHARE% answers a share of the "
        "requests, shadow=VERSION is compared and answers nobody; one or both, separated by commas."
        " With promote=N the share doubles after each N of its requests, until the version is "
        "promoted; a broken rule of guard takes it away",
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
    max_body_bytes: Positive = Field(
        32 << 20,
        description="bytes of a request body at most; bodies without images have smaller limits",
    )
    max_images: Positive = Field(64, description="images in a request at most")
    max_pixels: Positive = Field(51_000_000, description="pixels of an image at most")
    max_wait_seconds: Seconds = Field(
        10.0,
        description="time that a request may wait for the engine, for a version to be loaded, or "
        "for its turn at the store; then 503",
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
    allow_open: bool = Field(
        False, description="listen on an address that others reach although there is no token"
    )
    allowed_hosts: str = Field(
        "",
        description="names besides localhost and this machine's own that requests may be sent to, "
        "separated by commas; *.example.org and * are names too; https://name lets web pages of "
        "that site ask",
    )
    tls_cert: Path | None = Field(None, description="certificate chain (PEM), to speak HTTPS")
    tls_key: Path | None = Field(None, description="private key (PEM) of that certificate")
    audit_log: Path | None = Field(
        None,
        description="file that gets a line for every request that changes something, besides the "
        "log",
    )
    guard: str = Field(
        "",
        description="roll the channel back when a version does badly after its promotion: "
        "errors>1% or unknown>30%, or both separated by commas; seconds=600 is the time for which "
        "a version is watched",
    )
    collect: str = Field(
        "",
        description="keep pictures in the store's inbox, to be labelled: unknown, score<0.6, "
        "margin<0.1, disagrees (a shadow or canary gives another label), sample=1%, or several "
        "separated by commas; without a rule no picture is kept. Limits stand beside the rules: "
        "per-hour=200 pictures of this server, total=10000 in the inbox, free-bytes=536870912 on "
        "the disk of the store, and days=30 after which a picture is deleted",
    )
    with_trainer: bool = Field(
        False,
        description="run `dne-train worker` beside the server, for the jobs that the label page "
        "asks for; it gives way to the server, and ends with it",
    )
    webhook: Annotated[SecretStr, AfterValidator(check_webhook)] | None = Field(
        None,
        description="URL that gets a post when a version is promoted, refused, rolled back or "
        "cannot be loaded; several are separated by commas, and so are secret-file=PATH, which "
        "signs the posts (else DNE_WEBHOOK_SECRET), and inbox=50, which posts when so many "
        "pictures wait",
    )
    webhook_secret: SecretStr | None = Field(
        None,
        description="signs these posts: whsec_ and base64; not an option, as arguments are for all "
        "to see",
    )
    require_signatures: bool = Field(
        False,
        description="serve only versions that someone whom the trust file names has signed, and "
        "follow only channel records that are signed so",
    )
    trust: Path | None = Field(None, description="file that names who may publish, for the above")
    sign_key: Path | None = Field(
        None,
        description="private key that signs moves of the channel, jobs, and versions of "
        "--with-trainer where signatures are required",
    )
    log_level: Annotated[str, Field(pattern=_LOG_LEVEL)] = Field(
        "info",
        description="least level of the log: debug, info, warning or error; debug has a line for "
        "every request. info,json writes a JSON object a line instead of lines for people",
    )

    otlp_endpoint: Annotated[SecretStr, AfterValidator(check_endpoint)] | None = Field(
        None,
        description="URL of an OpenTelemetry collector that gets traces by OTLP over HTTP, such as "
        "http://127.0.0.1:4318, or http://127.0.0.1:4318,sample=0.1 for one request of ten; a "
        "client's traceparent decides for its own requests; needs the extra otel (default: no "
        "traces)",
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
            raise ValueError("tls_cert and tls_key must be given together")
        return self

    @model_validator(mode="after")
    def _what_writes_can_sign(self) -> Self:
        writers = [name for name in ("guard", "with_trainer") if getattr(self, name)]
        if self.require_signatures and self.sign_key is None and writers:
            raise ValueError(
                f"{writers[0]} writes records, and require_signatures refuses those without a "
                "signature; give sign_key too"
            )
        return self

    @model_validator(mode="after")
    def _many_models_share_one_server(self) -> Self:
        alone = [name for name in ("canary", "with_trainer") if getattr(self, name)]
        if self.models is not None and alone:
            raise ValueError(
                f"{alone[0]} is for one store: serve the model that needs it with --store, or run "
                "`dne-train worker` beside its store"
            )
        return self

    @model_validator(mode="after")
    def _a_canary_that_rises_is_judged(self) -> Self:
        canary = parse_canary(listed(self.canary)).canary
        if canary is not None and canary.step:
            if not parse_guard(listed(self.guard)).rules:
                raise ValueError("canary: promote= needs a rule of guard, which would object")
            if canary.step < self.fixed.guard_least:
                raise ValueError(
                    f"canary: promote={canary.step} is less than the {self.fixed.guard_least} "
                    "requests that a rule judges by"
                )
        return self

    @field_validator(*PARSERS)
    @classmethod
    def _can_be_parsed(cls, value: str, info: ValidationInfo) -> str:
        PARSERS[str(info.field_name)](listed(value))
        return value

    @property
    def origins(self) -> tuple[str, ...]:
        """Return the web pages of other sites that may ask."""
        return tuple(name for name in listed(self.allowed_hosts) if "://" in name)

    @property
    def hosts(self) -> tuple[str, ...]:
        """Return the names besides the usual ones that requests may be sent to."""
        return tuple(name for name in listed(self.allowed_hosts) if "://" not in name)

    def read_admin_token(self) -> str | None:
        """Read the admin token, or None; WrongUsage for one that no client could send."""
        token = self._token_from_file()
        if token is None and self.admin_token is not None:
            token = self.admin_token.get_secret_value()
        if token is not None and not re.fullmatch(r"[!-~]+", token):
            raise WrongUsage("the admin token must be ASCII text without spaces")
        return token

    def read_keys(self) -> Keys:
        """Read who may publish and the key that signs; neither where signatures are not
        required. A change counts from the next start."""
        if not self.require_signatures:
            return NO_KEYS
        signer = load_signer(self.sign_key) if self.sign_key else None
        return Keys(signer=signer, trust=load_trust(self.trust))

    def _token_from_file(self) -> str | None:
        if self.admin_token_file is None:
            return None
        try:
            return self.admin_token_file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise WrongUsage(
                f"the admin token file {self.admin_token_file} cannot be read"
            ) from error


MOVED = {
    "allowed_origins": "allowed_hosts takes https://name too",
    "collect_days": "write days=30 into collect",
    "collect_free_bytes": "write free-bytes=0 into collect",
    "collect_per_hour": "write per-hour=200 into collect",
    "collect_total": "write total=10000 into collect",
    "guard_seconds": "write seconds=600 into guard",
    "max_connections": "the limit is fixed",
    "max_resident": "the limit is fixed; max_model_bytes limits the memory",
    "log_format": "write json into log_level, as in info,json",
    "otlp_sample": "write ,sample=0.1 after the URL of otlp_endpoint",
    "rate_limit": "write rate=100 behind each token of the token file",
    "shadow": "write shadow=8 into canary",
    "webhook_inbox": "write inbox=50 into webhook",
    "webhook_secret_file": "write secret-file=PATH into webhook",
}
"""Settings of earlier versions, and what stands in their place."""


SECRETS = frozenset(
    name for name, field in Settings.model_fields.items() if "SecretStr" in str(field.annotation)
)
"""Names of the settings that nobody else may see."""


def load_settings(**given: Any) -> Settings:
    """Take `given`, else the environment, else the defaults. WrongUsage names the wrong one."""
    if "store" in given and given.get("models") is not None:
        raise WrongUsage("give --store or --models, not both: one store, or a folder of many")
    if "store" in given:
        given.setdefault("models", None)  # an argument wins over the environment
    for name, instead in MOVED.items():
        if name in given or os.environ.get(f"DNE_{name.upper()}"):
            raise WrongUsage(f"the setting {name} does not exist any more: {instead}")
    try:
        return Settings(**given)
    except ValidationError as error:
        raise WrongUsage(f"a setting cannot be used: {first_reason(error)}") from error
