"""Compute the network quickly: fold its constants, stack equal experts, reuse memory."""
