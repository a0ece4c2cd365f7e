"""The decision table as text, Markdown and HTML: summed by action, then the largest rows."""

from __future__ import annotations

from html import escape

from rich.table import Table

from graphopt.ir.decisions import Action, Decision, DecisionTable
from graphopt.ir.units import format_bytes, format_seconds
from graphopt.report.code_span import code

_NUM_ROWS_AS_TEXT = 12
_HEADINGS = ("decision", "value", "size", "cost", "copies", "why", "from")
_RIGHT = frozenset({"size", "cost", "copies"})


def has_decisions(table: DecisionTable) -> bool:
    """Whether there is anything to show."""
    return bool(table.rows or table.notes)


def action_totals(table: DecisionTable) -> list[str]:
    """One line for each action: how many values, bytes, and what it costs by the cost model."""
    lines = []
    for action in Action:
        rows = table.with_action(action)
        if rows:
            nbytes, seconds = sum(row.nbytes for row in rows), sum(row.seconds for row in rows)
            replaced = [row.kept_bytes for row in rows if row.kept_bytes is not None]
            size = format_bytes(nbytes) + (f" kept as {format_bytes(sum(replaced))}" if replaced else "")
            cost = f", {format_seconds(seconds)} by the cost model" if seconds else ""
            lines.append(f"{action}: {len(rows)} values, {size}{cost}")
    return lines


def decision_text(table: DecisionTable) -> list[str | Table]:
    """The parts of the text report; empty without decisions."""
    if not has_decisions(table):
        return []
    shown = Table("decision", "value")
    for heading in _HEADINGS[2:]:
        shown.add_column(heading, justify="right" if heading in _RIGHT else "left")
    for row in _largest(table)[:_NUM_ROWS_AS_TEXT]:
        shown.add_row(*_cells(row)[:-1], row.source.split(" | ")[0])
    return [f"decisions by {table.policy}", *action_totals(table), shown, *(f"note: {note}" for note in table.notes)]


def decision_markdown(table: DecisionTable) -> list[str]:
    """Lines of Markdown with every row, in order of definition."""
    if not has_decisions(table):
        return []
    lines = ["", "## Decisions", "", f"By {code(table.policy)}.", "", *(f"- {line}" for line in action_totals(table))]
    lines += [f"- {note}" for note in table.notes]
    lines += ["", f"| {' | '.join(_HEADINGS)} |", f"|{'|'.join('---:' if h in _RIGHT else '---' for h in _HEADINGS)}|"]
    for row in table.rows:
        action, value, size, cost, copies, why, source = _cells(row)
        cells = (action, code(value), size, cost, copies, why.replace("|", r"\|"), code(source))
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def decision_html(table: DecisionTable) -> str:
    """A list of totals and a table of every row; empty without decisions."""
    if not has_decisions(table):
        return ""
    items = "".join(f"<li>{escape(line)}</li>" for line in (*action_totals(table), *table.notes))
    head = "".join(f'<th class="{"number" if h in _RIGHT else ""}">{h}</th>' for h in _HEADINGS)
    body = "".join(_html_row(row) for row in _largest(table))
    return f"<ul>{items}</ul><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def decision_lines(table: DecisionTable, names: set[str]) -> list[str]:
    """What was decided about the values called ``names``, for ``explain``."""
    return [f"  decided: {describe(row)}" for row in table.rows if row.value in names]


def describe(row: Decision) -> str:
    """One decision as a line: what, why, bytes and cost."""
    cost = f", {format_seconds(row.seconds)} by the cost model" if row.seconds else ""
    copies = f", {row.copies} times" if row.copies > 1 else ""
    return f"{row.action} {row.value} ({_size(row)}{cost}{copies}): {row.reason}"


def _size(row: Decision) -> str:
    """Bytes of the value, and of what is kept in its place."""
    kept = "" if row.kept_bytes is None else f" kept as {format_bytes(row.kept_bytes)}"
    return format_bytes(row.nbytes) + kept


def _largest(table: DecisionTable) -> list[Decision]:
    return sorted(table.rows, key=lambda row: -row.nbytes)


def _cells(row: Decision) -> tuple[str, ...]:
    cost = format_seconds(row.seconds) if row.seconds else ""
    return (str(row.action), row.value, _size(row), cost, str(row.copies or ""), row.reason, row.source)


def _html_row(row: Decision) -> str:
    action, value, size, cost, copies, why, source = map(escape, _cells(row))
    numbers = "".join(f'<td class="number">{text}</td>' for text in (size, cost, copies))
    name = f'<td class="name"><code>{value}</code></td>'
    return f'<tr class="decision"><td>{action}</td>{name}{numbers}<td>{why}</td><td><code>{source}</code></td></tr>'
