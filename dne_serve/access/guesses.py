"""Slow down clients that guess tokens. Used on the event loop only.

An address may present 20 wrong tokens. After that one more every three seconds is judged, and all
others are refused with 429, right or wrong. A token that was right from that address before is
always judged, so that a stranger behind the same address does not lock its holder out.
"""

from __future__ import annotations

import ipaddress
import math
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from dne_serve.errors import RateExceeded

MOST = 20
WINDOW_S = 60.0
MAX_ADDRESSES = 4096
MAX_KNOWN = 16


@dataclass(slots=True, kw_only=True)
class _Guesser:
    """Tokens that an address has presented."""

    left: float
    at: float
    known: list[bytes] = field(default_factory=list)
    """Digests of the last tokens that were right."""


class Guesses:
    """Wrong tokens of all addresses."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._by_address: OrderedDict[str, _Guesser] = OrderedDict()

    def check(self, address: str, digest: bytes) -> None:
        """Raise RateExceeded for a token that is not to be judged."""
        one = self._by_address.get(_network(address))
        if one is None or digest in one.known:
            return
        left = self._left(one)
        if left < 1:
            raise RateExceeded(
                "too many wrong tokens have come from this address",
                retry_after_s=math.ceil((1 - left) * WINDOW_S / MOST),
            )

    def was_wrong(self, address: str) -> None:
        one = self._of(address)
        one.left, one.at = self._left(one) - 1, self._clock()

    def was_right(self, address: str, digest: bytes) -> None:
        one = self._of(address)
        if digest not in one.known:
            one.known = [*one.known[1 - MAX_KNOWN :], digest]

    def _left(self, one: _Guesser) -> float:
        return min(float(MOST), one.left + (self._clock() - one.at) * MOST / WINDOW_S)

    def _of(self, address: str) -> _Guesser:
        """Find or make the entry of an address. The entry not used for longest goes."""
        network = _network(address)
        one = self._by_address.get(network)
        if one is None:
            one = self._by_address[network] = _Guesser(left=float(MOST), at=self._clock())
            if len(self._by_address) > MAX_ADDRESSES:
                self._by_address.popitem(last=False)
        self._by_address.move_to_end(network)
        return one


def _network(address: str) -> str:
    """Return the /64 network of an IPv6 address, as one host has all of it, or an IPv4 address."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv4Address):
        return address
    mapped = found.ipv4_mapped
    return str(mapped) if mapped else str(int(found) >> 64)
