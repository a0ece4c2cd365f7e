"""Peak against step time as an SVG: one line for each backend of graphopt, a labelled mark for each peer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from benchmarks.frontier_rows import AT_PEAK, AT_SMALL_SHARE, FrontierFigures
from graphopt.ir.units import format_bytes

_WIDTH, _HEIGHT = 860, 480
_LEFT, _RIGHT, _TOP, _BOTTOM = 86, 24, 40, 52
_INNER_WIDTH, _INNER_HEIGHT = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
_NUM_GRID_LINES = 5
# Room to the right of the slowest and to the left of the fastest, as a share of what lies between.
_MARGIN = 0.12
# Of labels that would lie on each other, the later one moves down by this much.
_LINE_HEIGHT = 14

_OWN_COLORS = {"aten": "#31507a", "inductor": "#b5504b"}
_OTHER_COLOR = "#57606a"
_FONT = 'font-family="sans-serif" font-size="12"'


@dataclass(frozen=True)
class _Scale:
    """From time over eager's, and bytes, to the plane."""

    least_ratio: float
    most_ratio: float
    most_bytes: int

    def x(self, ratio: float) -> float:
        return _LEFT + _INNER_WIDTH * (ratio - self.least_ratio) / (self.most_ratio - self.least_ratio)

    def y(self, nbytes: float) -> float:
        return _TOP + _INNER_HEIGHT * (1 - nbytes / self.most_bytes)


def frontier_plot(model: str, points: Sequence[FrontierFigures]) -> str:
    """A whole ``<svg>`` document; points without figures are left out."""
    shown = [point for point in points if point.peak_bytes is not None and point.eager_ratio is not None]
    scale = _scale(shown)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" {_FONT}>',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>',
        f'<text x="{_LEFT}" y="22" font-weight="bold">{escape(model)}: peak above what rests, against step time</text>',
        *_grid(scale),
        *(part for backend in _backends(shown) for part in _own_line(backend, shown, scale)),
        *_peer_marks([point for point in shown if not point.is_own], scale),
        *_legend(_backends(shown)),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _scale(shown: Sequence[FrontierFigures]) -> _Scale:
    ratios = [_ratio(point) for point in shown] or [1.0]
    margin = _MARGIN * ((max(ratios) - min(ratios)) or 1.0)
    return _Scale(min(ratios) - margin, max(ratios) + margin, max([_bytes(point) for point in shown] + [1]))


def _backends(shown: Sequence[FrontierFigures]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(point.backend for point in shown if point.is_own))


def _own_line(backend: str, shown: Sequence[FrontierFigures], scale: _Scale) -> Iterator[str]:
    """Marks for every point of ``backend``; the budgets among them joined, from the smallest peak to the largest."""
    own = [point for point in shown if point.is_own and point.backend == backend]
    line = sorted((point for point in own if _is_on_line(point)), key=_bytes)
    color = _OWN_COLORS.get(backend, _OTHER_COLOR)
    joined = " ".join(f"{scale.x(_ratio(point)):.1f},{scale.y(_bytes(point)):.1f}" for point in line)
    yield f'<polyline class="{escape(backend)}" points="{joined}" fill="none" stroke="{color}" stroke-width="1.5"/>'
    for point in own:
        fill = color if _is_on_line(point) else "#ffffff"
        yield (
            f'<circle cx="{scale.x(_ratio(point)):.1f}" cy="{scale.y(_bytes(point)):.1f}" r="4" fill="{fill}"'
            f' stroke="{color}"><title>{escape(_title(point))}</title></circle>'
        )


def _is_on_line(point: FrontierFigures) -> bool:
    """Whether this is a point of the frontier itself: not a policy, nor a budget set by a peer."""
    return not point.beside or point.setting in (AT_PEAK, AT_SMALL_SHARE)


def _peer_marks(peers: Sequence[FrontierFigures], scale: _Scale) -> Iterator[str]:
    taken: list[float] = []
    for point in sorted(peers, key=lambda point: -_bytes(point)):
        x, y = scale.x(_ratio(point)), scale.y(_bytes(point))
        label_y = y + 4
        while any(abs(label_y - other) < _LINE_HEIGHT for other in taken):
            label_y += _LINE_HEIGHT
        taken.append(label_y)
        yield (
            f'<rect class="peer" x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" height="8" fill="#2b2f36">'
            f"<title>{escape(_title(point))}</title></rect>"
        )
        left = x > _LEFT + _INNER_WIDTH / 2
        anchor, offset = ("end", -9) if left else ("start", 9)
        yield f'<text x="{x + offset:.1f}" y="{label_y:.1f}" text-anchor="{anchor}">{escape(point.name)}</text>'


def _grid(scale: _Scale) -> Iterator[str]:
    for step in range(_NUM_GRID_LINES + 1):
        share = step / _NUM_GRID_LINES
        y = scale.y(share * scale.most_bytes)
        yield f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#d9dee4"/>'
        label = format_bytes(round(share * scale.most_bytes))
        yield f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{label}</text>'
        ratio = scale.least_ratio + share * (scale.most_ratio - scale.least_ratio)
        x, bottom = scale.x(ratio), _HEIGHT - _BOTTOM
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{bottom}" y2="{bottom + 5}" stroke="#57606a"/>'
        yield f'<text x="{x:.1f}" y="{bottom + 19}" text-anchor="middle">{ratio:.2f}</text>'
    yield f'<text x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 12}" text-anchor="end">step time over that of eager</text>'


def _legend(backends: Sequence[str]) -> Iterator[str]:
    for number, backend in enumerate(backends):
        x, color = _LEFT + 130 * number, _OWN_COLORS.get(backend, _OTHER_COLOR)
        yield f'<circle cx="{x + 4}" cy="{_HEIGHT - 16}" r="4" fill="{color}"/>'
        yield f'<text x="{x + 14}" y="{_HEIGHT - 12}">graphopt {escape(backend)}</text>'


def _title(point: FrontierFigures) -> str:
    return f"{point.label}: {format_bytes(_bytes(point))}, {_ratio(point):.2f} of eager's time"


def _ratio(point: FrontierFigures) -> float:
    assert point.eager_ratio is not None, "only points with figures are shown"
    return point.eager_ratio


def _bytes(point: FrontierFigures) -> int:
    assert point.peak_bytes is not None, "only points with figures are shown"
    return point.peak_bytes
