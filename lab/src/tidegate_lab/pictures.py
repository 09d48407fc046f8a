"""Pictures: draws the figures of the reports, with estimates, their intervals and labels.

Each line has its name beside it in the same colour, so no reader needs a legend.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from tidegate.demo.figure import BLACK, BLUE, GREEN, ORANGE, PURPLE, Look, name_axes, new_figure, write_tick
from tidegate_lab.report import Estimate

__all__ = [
    "BLACK",
    "BLUE",
    "GREEN",
    "ORANGE",
    "PURPLE",
    "Label",
    "Line",
    "Look",
    "draw_dots",
    "draw_lines",
    "label_ends",
    "label_right",
    "label_starts",
    "name_axes",
    "name_rows",
    "new_figure",
    "set_x_ticks",
    "share_y_limits",
    "spread",
]

LABEL_POINTS = 9.5
LABEL_HEIGHT_POINTS = 12.5


@dataclass(frozen=True)
class Line:
    """A named line of estimates, each drawn with its confidence interval. `scale` converts their unit."""

    name: str
    look: Look
    x: Sequence[float]
    y: Sequence[Estimate]
    scale: float = 1.0


def set_x_ticks(axes: Axes, ticks: Sequence[float]) -> None:
    """Puts plain numbers at these places of the x axis, also if it is logarithmic."""
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(write_tick))


def share_y_limits(panels: Sequence[Axes]) -> None:
    """Gives all panels the same y axis, from zero to the highest value, so that they can be compared by eye."""
    top = max(axes.get_ylim()[1] for axes in panels)
    for axes in panels:
        axes.set_ylim(0, top)


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
    """Draws one row per estimate, with its confidence interval. `scale` converts the unit."""
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
    """Labels the rows, from the top down."""
    axes.yaxis.set_major_locator(FixedLocator(range(len(names))))
    axes.set_yticklabels(names)
    axes.set_ylim(len(names) - 0.5, -0.5)


def _drawable(half_width: float) -> float:
    """Returns the half width, or 0 for NaN: a single seed has no interval."""
    return half_width if half_width == half_width else 0.0


@dataclass(frozen=True)
class Label:
    """The name of a line, in the line's colour, at the height of its data."""

    text: str
    look: Look
    y: float


def label_ends(figure: Figure, axes: Axes, lines: Sequence[Line]) -> None:
    label_right(figure, axes, [Label(line.name, line.look, line.y[-1].mean * line.scale) for line in lines])


def label_right(figure: Figure, axes: Axes, labels: Sequence[Label]) -> None:
    _label(figure, axes, labels, axes.get_xlim()[1], 5)


def label_starts(figure: Figure, axes: Axes, lines: Sequence[Line]) -> None:
    """Labels lines at their left end, for lines that meet at the right. The axis must leave room on the left."""
    labels = [Label(line.name, line.look, line.y[0].mean * line.scale) for line in lines]
    _label(figure, axes, labels, min(line.x[0] for line in lines), -7)


def _label(figure: Figure, axes: Axes, labels: Sequence[Label], x: float, offset_points: float) -> None:
    """Draws labels, and moves them apart where they would overlap. The limits of the axes must be final."""
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
    """Returns places in the same order, at least `step` apart and as near to the wanted ones as that allows.

    Labels that overlap form a group around their mean. Groups that then overlap are joined."""
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
