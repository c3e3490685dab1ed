"""Promote a published version, or explain why its channel stays."""

from __future__ import annotations

from model_store.errors import ChannelMoved
from model_store.records.channel import ChannelRecord
from model_store.records.manifest import Manifest
from model_store.store.store import Store


def promote_or_explain(
    store: Store,
    manifest: Manifest,
    *,
    head: ChannelRecord | None,
    channel: str,
    actor: str,
    reason: str,
) -> str | None:
    """Promote a version unless its gate, a pin or a later move of the channel is against it.

    `head` is the channel's record from before the work on the version began. Return None, or the
    reason against the promotion and the next step.
    """
    number, gate = manifest.version, manifest.metrics.gate
    by_hand = f"`dne-store promote {number} --channel {channel}` would promote it"
    if gate is not None and gate.reasons and not gate.forced:
        return f"the gate refused it: {'; '.join(gate.reasons)}; {by_hand}"
    if head is not None and head.mode == "pin":
        return f"channel {channel} is pinned to version {head.target}; {by_hand}"
    after = head.number if head else 0
    try:
        store.promote(number, channel=channel, actor=actor, reason=reason, after=after)
    except ChannelMoved:
        return (
            f"channel {channel} has moved meanwhile, so version {number} is a branch; {by_hand}, "
            "and running the same command again starts from the new head"
        )
    return None
