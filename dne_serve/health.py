"""Ask a server on this machine whether it is alive: `python -m dne_serve.health`.

For the health check of a container. It reads DNE_HOST, DNE_PORT and DNE_TLS_CERT as the server
does, and imports nothing else of it: it runs every few seconds. Ends with 0, or with 1 and the
reason.
"""

from __future__ import annotations

import os
import ssl
import sys
import urllib.request
from collections.abc import Mapping

PORT = "8000"
TIMEOUT_S = 3.0
_EVERY_ADDRESS = {"", "0.0.0.0", "::"}


def main() -> int:
    url = url_of(os.environ)
    try:
        ask(url)
    except OSError as error:
        print(f"{url} is not healthy: {error}", file=sys.stderr)
        return 1
    return 0


def url_of(environment: Mapping[str, str]) -> str:
    """Make the address of the server from its own variables."""
    host = environment.get("DNE_HOST", "")
    host = "127.0.0.1" if host in _EVERY_ADDRESS else host
    host = f"[{host}]" if ":" in host else host
    scheme = "https" if environment.get("DNE_TLS_CERT") else "http"
    return f"{scheme}://{host}:{environment.get('DNE_PORT') or PORT}/healthz"


def ask(url: str) -> None:
    """Raise OSError unless the answer is 200."""
    # The certificate names the server as clients know it, never this machine's loopback.
    unverified = ssl.create_default_context()
    unverified.check_hostname = False
    unverified.verify_mode = ssl.CERT_NONE
    handlers = (urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=unverified))
    with urllib.request.build_opener(*handlers).open(url, timeout=TIMEOUT_S):
        pass


if __name__ == "__main__":
    sys.exit(main())
