"""What can be set, once: every field is a long option of `dne-serve` and a `DNE_` variable."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, SecretStr, ValidationError, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from model_store.channel import ChannelName
from model_store.errors import WrongUsage
from model_store.manifest import MAX_VERSION, first_reason
from model_store.signing import Trust, load_trust

Positive = Annotated[int, Field(ge=1, le=1 << 40)]
Seconds = Annotated[float, Field(gt=0, le=3600)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Canary:
    version: int
    share: float

    @classmethod
    def parse(cls, text: str) -> Canary:
        """`7=5%`: version 7 answers five of a hundred requests."""
        found = re.fullmatch(r"([0-9]{1,10})=([0-9]{1,3}(?:\.[0-9]{1,6})?)%", text, re.ASCII)
        if found is None:
            raise WrongUsage(f"canary {text!r} is not of the form VERSION=SHARE%, such as 7=5%")
        version, percent = int(found[1]), float(found[2])
        if not 1 <= version <= MAX_VERSION or not 0 < percent <= 100:
            raise WrongUsage(f"canary {text!r} names no version, or no share of the requests")
        return cls(version=version, share=percent / 100)


class Settings(BaseSettings):
    """Arguments win over the environment. Nothing is read from files of its own accord."""

    model_config = SettingsConfigDict(
        env_prefix="DNE_", env_ignore_empty=True, extra="ignore", frozen=True
    )

    store: str = Field("./models", description="directory or s3://bucket/prefix of the store")
    channel: ChannelName = Field("production", description="the channel whose head is served")
    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    backend: Literal["torch", "onnx"] = Field("torch", description="what runs the network")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="where it runs")
    threads: Annotated[int, Field(ge=1, le=1024)] | None = Field(
        None, description="threads of the engine (default: what the backend chooses)"
    )
    decode_threads: Annotated[int, Field(ge=1, le=256)] = Field(
        2, description="threads that turn bytes into pixels"
    )
    max_batch: Positive = Field(16, description="images in a batch at most")
    max_queue: Positive = Field(256, description="images that may wait; more are answered with 503")
    max_resident: Annotated[int, Field(ge=1, le=1000)] = Field(
        32, description="versions kept in memory besides the served one; they share their experts"
    )
    max_model_bytes: Positive | None = Field(
        None,
        description="bytes of experts and classifiers in memory at most; what is needed least "
        "leaves, and a version that cannot fit is answered with 503 (default: no limit)",
    )
    idle_seconds: Annotated[float, Field(gt=0, le=86400)] = Field(
        600, description="a version that nobody has asked for in this time leaves the memory"
    )
    canary: str | None = Field(
        None, description="VERSION=SHARE%: a version that answers a share of the requests"
    )
    shadow: Annotated[int, Field(ge=1, le=MAX_VERSION)] | None = Field(
        None, description="a version that is compared with the served one, and answers nobody"
    )
    poll_seconds: Seconds = Field(0.25, description="how often the channel is looked at")
    grace_seconds: Annotated[int, Field(ge=0, le=3600)] = Field(
        15, description="time that requests under way get when the server is told to stop"
    )
    max_body_bytes: Positive = Field(32 << 20, description="bytes of a request body at most")
    max_images: Positive = Field(64, description="images in a request at most")
    max_pixels: Positive = Field(40_000_000, description="pixels of an image at most")
    admin_token: SecretStr | None = Field(
        None,
        description="opens the admin routes; not an option, as arguments are for all to see",
    )
    admin_token_file: Path | None = Field(
        None, description="file that holds the admin token; wins over DNE_ADMIN_TOKEN"
    )
    require_signatures: bool = Field(
        False, description="serve only versions signed by someone whom the trust file names"
    )
    trust: Path | None = Field(None, description="file that names who may publish, for the above")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="how much the log says; debug has a line for every request"
    )

    @model_validator(mode="after")
    def _a_request_fits_the_queue(self) -> Self:
        if self.max_queue < self.max_images:
            raise ValueError(
                f"max_queue ({self.max_queue}) is less than max_images ({self.max_images}): "
                "a full request could never be queued"
            )
        return self

    def read_admin_token(self) -> str | None:
        """None when there is none; WrongUsage for one that no client could send."""
        token = self._token_from_file()
        if token is None and self.admin_token is not None:
            token = self.admin_token.get_secret_value()
        if token is not None and not re.fullmatch(r"[!-~]+", token):
            raise WrongUsage("the admin token must be ASCII text without spaces")
        return token

    def read_canary(self) -> Canary | None:
        return Canary.parse(self.canary) if self.canary is not None else None

    def read_trust(self) -> Trust | None:
        """Who may publish; None when anybody may. A change counts from the next start."""
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


def load_settings(**given: Any) -> Settings:
    """`given` over the environment over the defaults; WrongUsage names what is wrong."""
    try:
        return Settings(**given)
    except ValidationError as error:
        raise WrongUsage(f"a setting cannot be used: {first_reason(error)}") from error
