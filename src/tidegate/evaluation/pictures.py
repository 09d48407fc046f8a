"""The look of the reports' pictures: colours that the colour-blind can tell apart, and lines named at their end.

A line's name stands beside it in its own colour, so that no reader has to look a colour up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from tidegate.evaluation.report import Estimate

TEXT_COLOUR = "#333333"
LABEL_POINTS = 9.5
LABEL_HEIGHT_POINTS = 12.5


@dataclass(frozen=True)
class Look:
    """Of a line; the colours are Okabe and Ito's."""

    colour: str
    marker: str


BLACK = Look("#000000", "o")
ORANGE = Look("#D98C00", "s")
BLUE = Look("#0072B2", "^")
GREEN = Look("#008060", "D")
PURPLE = Look("#B8528C", "v")


@dataclass(frozen=True)
class Line:
    """A named line of estimates, each drawn with its confidence interval; `scale` turns their unit."""

    name: str
    look: Look
    x: Sequence[float]
    y: Sequence[Estimate]
    scale: float = 1.0


def new_figure(panels: int, width: float = 5.4, height: float = 3.9) -> tuple[Figure, list[Axes]]:
    """A figure without a window, its panels side by side."""
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
    axes.yaxis.set_major_formatter(FuncFormatter(_write_tick))


def _write_tick(value: float, _place: int | None) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:g}"


def set_x_ticks(axes: Axes, ticks: Sequence[float]) -> None:
    """Plain numbers where the reader looks for them, on a logarithmic axis too."""
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(_write_tick))


def share_y_limits(panels: Sequence[Axes]) -> None:
    """From zero to the highest of all, so that neighbouring panels can be compared by eye."""
    top = max(axes.get_ylim()[1] for axes in panels)
    for axes in panels:
        axes.set_ylim(0, top)


def name_axes(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title, fontsize=10.5, loc="left", color=TEXT_COLOUR)
    axes.set_xlabel(x, fontsize=9.5, color=TEXT_COLOUR)
    axes.set_ylabel(y, fontsize=9.5, color=TEXT_COLOUR)


def draw_lines(axes: Axes, lines: Sequence[Line]) -> None:
    for line in lines:
        axes.errorbar(
            line.x,
            [estimate.mean * line.scale for estimate in line.y],
            [_drawable(estimate.half_width) * line.scale for estimate in line.y],
            color=line.look.colour,
            marker=line.look.marker,
            markersize=4.5,
            linewidth=1.6,
            capsize=2.5,
            elinewidth=1,
        )


def draw_dots(axes: Axes, name: str, look: Look, estimates: Sequence[Estimate], scale: float) -> None:
    """One row a value, each with its confidence interval; `scale` turns the unit."""
    axes.errorbar(
        [estimate.mean * scale for estimate in estimates],
        range(len(estimates)),
        xerr=[_drawable(estimate.half_width) * scale for estimate in estimates],
        color=look.colour,
        marker=look.marker,
        markersize=5,
        linestyle="none",
        capsize=2.5,
        elinewidth=1,
        label=name,
    )


def name_rows(axes: Axes, names: Sequence[str]) -> None:
    """From the top down."""
    axes.yaxis.set_major_locator(FixedLocator(range(len(names))))
    axes.set_yticklabels(names)
    axes.set_ylim(len(names) - 0.5, -0.5)


def _drawable(half_width: float) -> float:
    """One seed alone has no interval."""
    return half_width if half_width == half_width else 0.0


@dataclass(frozen=True)
class Label:
    """A name in the colour of what it names, at the height of the data that it belongs to."""

    text: str
    look: Look
    y: float


def label_ends(figure: Figure, axes: Axes, lines: Sequence[Line]) -> None:
    label_right(figure, axes, [Label(line.name, line.look, line.y[-1].mean * line.scale) for line in lines])


def label_right(figure: Figure, axes: Axes, labels: Sequence[Label]) -> None:
    _label(figure, axes, labels, axes.get_xlim()[1], 5)


def label_starts(figure: Figure, axes: Axes, lines: Sequence[Line]) -> None:
    """For lines that come together to the right; the axis must leave room on the left."""
    labels = [Label(line.name, line.look, line.y[0].mean * line.scale) for line in lines]
    _label(figure, axes, labels, min(line.x[0] for line in lines), -7)


def _label(figure: Figure, axes: Axes, labels: Sequence[Label], x: float, offset_points: float) -> None:
    """Moves labels apart where they would lie on each other. The limits of the axes must be final."""
    figure.canvas.draw()
    wanted = [axes.transData.transform((x, label.y))[1] for label in labels]
    step = LABEL_HEIGHT_POINTS * figure.dpi / 72
    for label, anchor, place in zip(labels, wanted, spread(wanted, step), strict=True):
        axes.annotate(
            label.text,
            (x, label.y),
            xytext=(offset_points, (place - anchor) * 72 / figure.dpi),
            textcoords="offset points",
            color=label.look.colour,
            fontsize=LABEL_POINTS,
            ha="left" if offset_points > 0 else "right",
            va="center",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
            annotation_clip=False,
        )


def spread(wanted: Sequence[float], step: float) -> list[float]:
    """Places as near to the wanted ones as a distance of `step` between neighbours allows, in the same order.

    Names that collide become a group around their middle; groups that then collide are joined."""
    order = sorted(range(len(wanted)), key=wanted.__getitem__)
    groups: list[list[int]] = []
    for number in order:
        groups.append([number])
        while len(groups) > 1 and _top(groups[-2], wanted, step) + step > _bottom(groups[-1], wanted, step):
            last = groups.pop()
            groups[-1].extend(last)
    places = [0.0] * len(wanted)
    for group in groups:
        for k, number in enumerate(group):
            places[number] = _bottom(group, wanted, step) + k * step
    return places


def _middle(group: Sequence[int], wanted: Sequence[float]) -> float:
    return sum(wanted[number] for number in group) / len(group)


def _bottom(group: Sequence[int], wanted: Sequence[float], step: float) -> float:
    return _middle(group, wanted) - step * (len(group) - 1) / 2


def _top(group: Sequence[int], wanted: Sequence[float], step: float) -> float:
    return _middle(group, wanted) + step * (len(group) - 1) / 2
