"""Parse the address of an OpenTelemetry collector. No message repeats it: it may hold a secret."""

from __future__ import annotations

from dataclasses import replace

from pydantic import SecretStr

from dne_serve.rules.webhooks import WebhookUrl, parse_url
from model_store.errors import WrongUsage

TRACES = "/v1/traces"


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
