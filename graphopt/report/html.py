"""A Report as one self-contained page: no script, nothing loaded; whatever comes from the graph is escaped text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape

from graphopt.ir.units import format_bytes, format_seconds
from graphopt.pipeline.pass_base import PassRecord
from graphopt.report.data import MemoryClass, Report
from graphopt.report.decisions import decision_html
from graphopt.report.fp8 import fp8_html
from graphopt.report.plot import memory_plot
from graphopt.report.precision import precision_html
from graphopt.report.state import state_html

# Nothing may be fetched and no script may run, even if a bug let markup from a graph through.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"

COLORS = {
    MemoryClass.PARAMETERS: "#4c6a92",
    MemoryClass.BUFFERS: "#8fa7c4",
    MemoryClass.BATCH: "#b9c4d0",
    MemoryClass.OPTIMIZER_STATE: "#6b8e5a",
    MemoryClass.CONSTANTS: "#c9c2a5",
    MemoryClass.GRADIENTS: "#c0843d",
    MemoryClass.ACTIVATIONS: "#b5504b",
    MemoryClass.TEMPORARIES: "#8d6aa6",
    MemoryClass.FP8_STATE: "#3f8f8a",
}

_STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #1c2430; background: #f6f7f9; margin: 0; }
main { max-width: 1120px; margin: 0 auto; padding: 28px 24px 60px; }
h1 { font-size: 24px; margin: 0 0 4px; overflow-wrap: anywhere; } h2 { font-size: 17px; margin: 0 0 12px; }
section { background: #fff; border: 1px solid #e1e5ea; border-radius: 8px; padding: 18px 20px; margin-top: 18px; }
.scroll { overflow-x: auto; } .muted { color: #5c6775; } .backend { margin: 0 0 6px; }
.cards { display: flex; flex-wrap: wrap; gap: 12px; margin-top: 16px; }
.card { background: #fff; border: 1px solid #e1e5ea; border-radius: 8px; padding: 10px 16px; flex: 1 1 150px; }
.card b { display: block; font-size: 21px; font-weight: 600; } .card span { color: #5c6775; font-size: 13px; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th { text-align: left; font-weight: 600; color: #5c6775; border-bottom: 1px solid #cfd6de; padding: 4px 10px 4px 0; }
td { border-bottom: 1px solid #edf0f3; padding: 4px 10px 4px 0; vertical-align: top; }
th.number, td.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
td.name, td.spec { white-space: nowrap; } tr.total td { font-weight: 600; border-bottom: 0; }
code { font: 13px/1.45 ui-monospace, "DejaVu Sans Mono", monospace; overflow-wrap: anywhere; }
.better { color: #2e7a43; } .worse { color: #b0372f; }
.bar { display: flex; height: 22px; border-radius: 4px; overflow: hidden; margin-bottom: 14px; background: #edf0f3; }
.swatch { display: inline-block; width: 11px; height: 11px; border-radius: 2px; margin-right: 8px; }
svg { display: block; width: 100%; height: auto; } svg text { font: 12px system-ui, sans-serif; fill: #5c6775; }
li { margin: 3px 0; }
"""


def report_html(report: Report) -> str:
    """The page, as text."""
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(report.title)}</title>",
        f"<style>{_STYLE}</style></head><body><main>",
        f"<h1>{escape(report.title)}</h1>",
        _backend(report),
        _cards(report),
        _section("Memory over time", memory_plot(report)),
        _section("Memory at the peak, by class", _memory_bar(report) + _memory_table(report)),
        _section("Optimizer state", state_html(report.state)),
        _section("Passes", _pass_table(report.records)),
        _section("Largest values at the peak", _largest_table(report)),
        _section("Precision", precision_html(report.precision)),
        _section("FP8", fp8_html(report.fp8, report.fp8_products)),
        _section("Decisions", decision_html(report.decisions)),
        _section("Declined rewrites", _refusal_table(report.records)),
        _section("Notes", _notes(report.notes)),
        f'<script type="application/json" id="report-data">{_embedded_json(report)}</script>',
        "</main></body></html>",
    ]
    return "\n".join(part for part in parts if part) + "\n"


def _embedded_json(report: Report) -> str:
    """The whole report for other programs to read; no character in it can end the element."""
    text = json.dumps(report.as_dict())
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _backend(report: Report) -> str:
    reason = f" &ndash; {escape(report.backend_reason)}" if report.backend_reason else ""
    return f'<p class="muted backend">backend <b>{escape(report.backend)}</b>{reason}</p>'


def _cards(report: Report) -> str:
    cards = [("predicted-peak", report.predicted_peak_bytes, "peak, predicted (above resident)")]
    if report.measured_peak_bytes is not None:
        cards.append(("measured-peak", report.measured_peak_bytes, "peak, measured (above resident)"))
    cards.append(("resident", report.resident_bytes, "resident: parameters, state, batch"))
    cards.append(("total", report.memory.total, "resident and peak"))
    if report.records:
        cards.append(("saved", report.records[-1].saved_bytes_after, "saved for backward"))
    body = "".join(
        f'<div class="card" id="{name}" data-bytes="{nbytes}" title="{nbytes:,} bytes"><b>{format_bytes(nbytes)}</b>'
        f"<span>{label}</span></div>"
        for name, nbytes, label in cards
    )
    return f'<div class="cards">{body}</div>'


def _section(heading: str, body: str) -> str:
    return f'<section><h2>{heading}</h2><div class="scroll">{body}</div></section>' if body else ""


def _table(headings: Sequence[tuple[str, str]], rows: Iterable[str]) -> str:
    """``headings``: text and CSS class of each column; ``rows``: ready ``<tr>`` elements."""
    head = "".join(f'<th class="{kind}">{text}</th>' for text, kind in headings)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _memory_bar(report: Report) -> str:
    total = max(report.memory.total, 1)
    pieces = "".join(
        f'<div style="width:{100 * nbytes / total:.3f}%;background:{COLORS[kind]}"'
        f' title="{kind.label}: {format_bytes(nbytes)}"></div>'
        for kind, nbytes in report.memory.items()
        if nbytes
    )
    return f'<div class="bar">{pieces}</div>'


def _memory_table(report: Report) -> str:
    total = report.memory.total
    rows = [
        f'<tr id="memory-{kind}" data-bytes="{nbytes}"><td><span class="swatch" style="background:{COLORS[kind]}">'
        f"</span>{kind.label}</td>{_sizes(nbytes, total)}</tr>"
        for kind, nbytes in report.memory.items()
    ]
    rows.append(f'<tr class="total" id="memory-total" data-bytes="{total}"><td>total</td>{_sizes(total, total)}</tr>')
    headings = (("class", ""), ("size", "number"), ("bytes", "number"), ("share", "number"))
    return _table(headings, rows)


def _sizes(nbytes: int, total: int) -> str:
    share = f"{100 * nbytes / total:.1f} %" if total else ""
    return _numbers(format_bytes(nbytes), f"{nbytes:,}", share)


def _numbers(*texts: str) -> str:
    return "".join(f'<td class="number">{text}</td>' for text in texts)


def _pass_table(records: tuple[PassRecord, ...]) -> str:
    if not records:
        return ""
    names = ("changes", "ops", "peak", "saved for backward", "time", "declined")
    headings = (("#", ""), ("pass", ""), ("stage", ""), ("numerics", ""), *((name, "number") for name in names))
    return _table(headings, (_pass_row(record) for record in records))


def _pass_row(record: PassRecord) -> str:
    return (
        f'<tr class="pass" data-pass="{escape(record.name)}"><td>{record.position:02d}</td>'
        f'<td class="name"><code>{escape(record.name)}</code></td>'
        f"<td>{escape(record.stage)}</td><td>{escape(record.numerics)}</td>"
        + _numbers(
            f"{record.changes:,}",
            _change(record.ops_before, record.ops_after, f"{record.ops_before:,}", f"{record.ops_after:,}"),
            _change_of_bytes(record.peak_bytes_before, record.peak_bytes_after),
            _change_of_bytes(record.saved_bytes_before, record.saved_bytes_after),
            format_seconds(record.seconds),
            str(len(record.refusals) or ""),
        )
        + "</tr>"
    )


def _change_of_bytes(before: int, after: int) -> str:
    return _change(before, after, format_bytes(before), format_bytes(after))


def _change(before: int, after: int, before_text: str, after_text: str) -> str:
    if before == after:
        return f'<span class="muted">{after_text}</span>'
    return f'{before_text} &rarr; <span class="{"better" if after < before else "worse"}">{after_text}</span>'


def _largest_table(report: Report) -> str:
    rows = [
        f'<tr class="value" data-bytes="{value.nbytes}"><td class="name"><code>{escape(value.name)}</code></td>'
        f'<td class="spec"><code>{escape(value.spec)}</code></td><td>{escape(value.memory_class)}</td>'
        f'<td class="number">{format_bytes(value.nbytes)}</td><td><code>{escape(value.origin)}</code></td></tr>'
        for value in report.largest
    ]
    headings = (("value", ""), ("spec", ""), ("class", ""), ("size", "number"), ("from", ""))
    return _table(headings, rows) if rows else ""


def _refusal_table(records: tuple[PassRecord, ...]) -> str:
    rows = [
        f"<tr><td><code>{escape(record.name)}</code></td><td><code>{escape(refusal.node)}</code></td>"
        f"<td>{escape(refusal.reason)}</td></tr>"
        for record in records
        for refusal in record.refusals
    ]
    return _table((("pass", ""), ("value", ""), ("reason", "")), rows) if rows else ""


def _notes(notes: tuple[str, ...]) -> str:
    return f"<ul>{''.join(f'<li>{escape(note)}</li>' for note in notes)}</ul>" if notes else ""
