"""The look of our pictures: colours that colour-blind readers can tell apart, and plain axes."""

from __future__ import annotations

from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

TEXT_COLOUR = "#333333"


@dataclass(frozen=True)
class Look:
    """How a line is drawn; the colours are Okabe and Ito's."""

    colour: str
    marker: str


BLACK = Look("#000000", "o")
ORANGE = Look("#D98C00", "s")
BLUE = Look("#0072B2", "^")
GREEN = Look("#008060", "D")
PURPLE = Look("#B8528C", "v")


def new_figure(panels: int, width: float = 5.4, height: float = 3.9) -> tuple[Figure, list[Axes]]:
    """Returns a figure without a window, and its panels, which stand side by side."""
    figure = Figure(figsize=(width * panels, height), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(1, panels, squeeze=False)
    axes = [panel for panel in grid[0] if isinstance(panel, Axes)]
    for panel in axes:
        _tidy(panel)
    return figure, axes


def _tidy(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#888888")
    axes.tick_params(colors=TEXT_COLOUR, labelsize=9)
    axes.grid(axis="y", color="#E4E4E4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.yaxis.set_major_formatter(FuncFormatter(write_tick))


def write_tick(value: float, _place: int | None) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:g}"


def name_axes(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title, fontsize=10.5, loc="left", color=TEXT_COLOUR)
    axes.set_xlabel(x, fontsize=9.5, color=TEXT_COLOUR)
    axes.set_ylabel(y, fontsize=9.5, color=TEXT_COLOUR)
