"""The registry: every acknowledged subscription, kept durably, so that the share of a Matcher that died can be read by
its successors.

    Access Point ─Change─► registry point ─► registry (LMDB or Redis)
    Matcher ─ReadShare─►        │    ◄─ one in every process, all on one registry
    coordinator ─Fence─►        └─ChangeOk, Share, Reply─► whoever asked
"""

from tidegate.layers.registry.address import open_registry
from tidegate.layers.registry.registry import Registry
from tidegate.layers.registry.registry_point import RegistryPoint

__all__ = ["Registry", "RegistryPoint", "open_registry"]
