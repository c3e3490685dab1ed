"""The network: pure modules. Reads no files and knows no store."""

from model_store.network.device import choose_device
from model_store.network.expert import Expert
from model_store.network.folded import FoldedNetwork, Lineage
from model_store.network.network import Network

__all__ = ["Expert", "FoldedNetwork", "Lineage", "Network", "choose_device"]
