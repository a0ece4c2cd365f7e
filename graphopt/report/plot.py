"""Memory over time as an SVG: one step of the line an operator, segments shaded, the peak marked, titles to hover."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby

from graphopt.ir.units import format_bytes
from graphopt.report.data import Report, TimelinePoint

_WIDTH, _HEIGHT = 1060, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 78, 14, 34, 26
_INNER_WIDTH, _INNER_HEIGHT = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
_NUM_GRID_LINES = 4
# More columns than this are narrower than a pixel or two: operators are then joined, the highest shown.
_MAX_COLUMNS = 500
# Characters of the peak's label, at about 6.5 pixels each, decide on which side of the peak it fits.
_LABEL_CHARACTER_WIDTH = 6.5

_SHADES = {"forward": "#eef3fb", "backward": "#fdf3ec", "update": "#eef6ee"}


def memory_plot(report: Report) -> str:
    """The plot as an ``<svg>`` element; empty for a program without operators."""
    peak = report.peak
    if peak is None:
        return ""
    scale = _Scale(len(report.timeline), max(peak.live_bytes, 1))
    columns = _columns(report.timeline)
    line = _line(columns, scale)
    bottom = scale.y(0)
    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" id="memory-plot">',
        *_shades(report.timeline, scale),
        *_grid(scale),
        f'<polygon points="{_LEFT},{bottom:.1f} {line} {_WIDTH - _RIGHT},{bottom:.1f}" fill="#4c6a92" opacity="0.15"/>',
        f'<polyline points="{line}" fill="none" stroke="#31507a" stroke-width="1.5" stroke-linejoin="round"/>',
        *_hover_columns(columns, scale),
        _peak_mark(peak, scale),
        f'<text x="{_LEFT}" y="{_HEIGHT - 8}">operator 0</text>',
        f'<text x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 8}" text-anchor="end">{len(report.timeline) - 1}</text>',
        "</svg>",
    ]
    return "".join(parts)


class _Scale:
    def __init__(self, num_points: int, max_bytes: int) -> None:
        self.num_points = num_points
        self.max_bytes = max_bytes

    def x(self, position: float) -> float:
        return _LEFT + _INNER_WIDTH * position / self.num_points

    def y(self, nbytes: float) -> float:
        return _TOP + _INNER_HEIGHT * (1 - nbytes / self.max_bytes)


def _columns(timeline: Sequence[TimelinePoint]) -> list[tuple[TimelinePoint, ...]]:
    width = -(-len(timeline) // _MAX_COLUMNS)
    return [tuple(timeline[start : start + width]) for start in range(0, len(timeline), width)]


def _highest(column: Sequence[TimelinePoint]) -> TimelinePoint:
    return max(column, key=lambda point: point.live_bytes)


def _line(columns: Sequence[Sequence[TimelinePoint]], scale: _Scale) -> str:
    points = []
    for column in columns:
        y = scale.y(_highest(column).live_bytes)
        points += [f"{scale.x(column[0].position):.1f},{y:.1f}", f"{scale.x(column[-1].position + 1):.1f},{y:.1f}"]
    return " ".join(points)


def _shades(timeline: Sequence[TimelinePoint], scale: _Scale) -> Iterator[str]:
    for name, points in groupby(timeline, key=lambda point: point.segment):
        members = list(points)
        left, right = scale.x(members[0].position), scale.x(members[-1].position + 1)
        yield (
            f'<rect class="segment" x="{left:.1f}" y="{_TOP}" width="{right - left:.1f}" height="{_INNER_HEIGHT}"'
            f' fill="{_SHADES.get(name, "#f3f4f6")}"><title>{escape(name)}: {len(members)} operators</title></rect>'
        )
        if right - left > _LABEL_CHARACTER_WIDTH * len(name):
            yield f'<text x="{left + 5:.1f}" y="{_TOP + _INNER_HEIGHT - 6}">{escape(name)}</text>'


def _grid(scale: _Scale) -> Iterator[str]:
    for step in range(_NUM_GRID_LINES + 1):
        nbytes = scale.max_bytes * step / _NUM_GRID_LINES
        y = scale.y(nbytes)
        yield f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#d9dee4" stroke-width="1"/>'
        yield f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{format_bytes(round(nbytes))}</text>'


def _hover_columns(columns: Sequence[Sequence[TimelinePoint]], scale: _Scale) -> Iterator[str]:
    for column in columns:
        point = _highest(column)
        left, right = scale.x(column[0].position), scale.x(column[-1].position + 1)
        title = f"{point.position}: {point.op} ({point.segment}): {format_bytes(point.live_bytes)}"
        yield (
            f'<rect class="op" x="{left:.2f}" y="{_TOP}" width="{right - left:.2f}" height="{_INNER_HEIGHT}"'
            f' fill="transparent"><title>{escape(title)}</title></rect>'
        )


def _peak_mark(peak: TimelinePoint, scale: _Scale) -> str:
    x, y = scale.x(peak.position + 0.5), scale.y(peak.live_bytes)
    label = f"peak {format_bytes(peak.live_bytes)} at {peak.op}"
    fits_right = x + 10 + _LABEL_CHARACTER_WIDTH * len(label) < _WIDTH
    anchor, offset = ("start", 8) if fits_right else ("end", -8)
    return (
        f'<circle id="peak" data-bytes="{peak.live_bytes}" cx="{x:.1f}" cy="{y:.1f}" r="5" fill="#b5504b">'
        f"<title>{escape(label)}</title></circle>"
        f'<text x="{x + offset:.1f}" y="{y - 10:.1f}" text-anchor="{anchor}">{escape(label)}</text>'
    )
