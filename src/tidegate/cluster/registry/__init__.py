"""The registry: keeps every acknowledged subscription durably, so that the successors of a dead Matcher can read its
share.

    Access Point ─Change─► registry point ─► registry (LMDB or Redis)
    Matcher ─ReadShare─►        │    ◄─ one in every process, all on one registry
    coordinator ─Fence─►        └─ChangeOk, Share, Reply─► the sender of the request
"""

from tidegate.cluster.registry.address import open_registry
from tidegate.cluster.registry.registry import Registry
from tidegate.cluster.registry.registry_point import RegistryPoint

__all__ = ["Registry", "RegistryPoint", "open_registry"]
