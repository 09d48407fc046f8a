"""The layers that scale, and their names: every table by layer derives from this enum."""

from __future__ import annotations

from enum import StrEnum


class Layer(StrEnum):
    """A layer that scales. Its value is the first part of its slices' names, such as `matcher-3`."""

    ACCESS_POINT = "access-point"
    MATCHER = "matcher"
    EXIT_POINT = "exit-point"

    @property
    def plural(self) -> str:
        """The layer's name in commands, such as `access-points`."""
        return f"{self}s"

    @property
    def field(self) -> str:
        """The layer's name in configurations and wanted counts, such as `access_points`."""
        return self.plural.replace("-", "_")

    @property
    def spelled(self) -> str:
        """The layer's name in text, such as `Access Points`."""
        return self.plural.replace("-", " ").title()


def layer_of(name: str) -> Layer | None:
    """Returns the layer of a slice; None for Connection Points, which do not scale."""
    layer = name.rpartition("-")[0]
    return Layer(layer) if layer in set(Layer) else None
