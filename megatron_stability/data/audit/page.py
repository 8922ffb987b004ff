"""`audit.html`: what an audit found, on one page without a script. All text of the data is escaped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from megatron_stability.data.audit.findings import Summary
from megatron_stability.data.audit.work import WORST
from megatron_stability.data.blends import DataSet
from megatron_stability.data.limits import Limits
from megatron_stability.data.scores import LOW, SCORES

_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:70em;margin:2em auto;padding:0 1em;color:#222}"
    "table{border-collapse:collapse;margin:1em 0}td,th{padding:.2em .7em;text-align:left;vertical-align:top;"
    "border-bottom:1px solid #ddd}td.n{text-align:right;font-variant-numeric:tabular-nums}"
    "svg{background:#f6f6f6;vertical-align:middle}pre{white-space:pre-wrap;margin:0}.bad{color:#a00}"
)


def page(
    summary: Summary, sets: Sequence[DataSet], limits: Limits, excerpts: Mapping[tuple[str, int, int], str]
) -> str:
    """The page.

    Args:
        summary: of the audit.
        sets: what was audited.
        limits: of the corpus.
        excerpts: beginnings of bad documents, by input, document and first token; shown where given.
    """
    verdict = "".join(f'<li class="bad">{escape(each)}</li>' for each in summary.findings) or "<li>nothing</li>"
    notes = "".join(f"<li>{escape(each)}</li>" for each in summary.notes)
    return (
        f"<!doctype html><meta charset=utf-8><title>Audit of training data</title><style>{_STYLE}</style>"
        f"<h1>Audit of training data</h1><h2>Found</h2><ul>{verdict}{notes}</ul>"
        f"<h2>Data sets</h2>{_sets(summary, sets)}<h2>Lengths of documents</h2>{_lengths(summary)}"
        f"<h2>Scores</h2><p>0 is the corpus's median, 1 its limit; bars are documents, on a scale of logarithms.</p>"
        f"{_scores(summary, limits)}<h2>Worst documents</h2>{_worst(summary, excerpts)}"
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{escape(each)}</th>" for each in head)
    body = "".join("<tr>" + "".join(cells) + "</tr>" for cells in rows)
    return f"<table><tr>{top}</tr>{body}</table>"


def _text(value: str) -> str:
    return f"<td>{escape(value)}</td>"


def _number(value: float) -> str:
    return f'<td class="n">{value:,.4g}</td>' if isinstance(value, float) else f'<td class="n">{value:,}</td>'


def _sets(summary: Summary, sets: Sequence[DataSet]) -> str:
    total = max(summary.tokens, 1)
    rows = [
        [
            _text(given.prefix),
            _text("" if given.weight is None else f"{given.weight:g}"),
            *map(_number, (each.documents, each.tokens)),
            _text(f"{each.tokens / total:.1%}"),
            *map(_number, (each.bad_documents, each.bad_tokens, each.empty)),
        ]
        for each, given in zip(summary.sets, sets, strict=True)
    ]
    head = ("data set", "weight", "documents", "tokens", "share", "bad documents", "their tokens", "empty")
    return _table(head, rows) + f"<p>{summary.duplicates:,} documents are equal to an earlier one.</p>"


def _lengths(summary: Summary) -> str:
    bins = [sum(each.lengths[at] for each in summary.sets) for at in range(len(summary.sets[0].lengths))]
    last = max((at for at, count in enumerate(bins) if count), default=0) + 1
    return _bars(bins[:last]) + f" 1 to 2<sup>{last}</sup> tokens, a bar a power of 2"


def _bars(bins: Sequence[int]) -> str:
    from math import log1p

    most = log1p(max(max(bins, default=0), 1))
    bars = "".join(
        f'<rect x="{8 * at}" y="{40 - 40 * log1p(count) / most:.1f}" width="7" height="{40 * log1p(count) / most:.1f}">'
        f"<title>{count}</title></rect>"
        for at, count in enumerate(bins)
    )
    return f'<svg width="{8 * len(bins)}" height="40">{bars}</svg>'


def _scores(summary: Summary, limits: Limits) -> str:
    names = [name for name in (*SCORES, "seed") if any(name in each.histograms for each in summary.sets)]
    rows = []
    for name in names:
        parts = [each.histograms[name] for each in summary.sets if name in each.histograms]
        bins = [sum(column) for column in zip(*parts, strict=True)]
        sign = "&lt;" if name in LOW else "&gt;"
        limit = f"<td>{sign} {limits.limit[name]:.3g}</td>" if name in limits.limit else "<td></td>"
        count = sum(each.by_reason.get(name, 0) for each in summary.sets)
        rows.append([_text(name), f"<td>{_bars(bins)}</td>", limit, _number(count), _text(SCORES.get(name, ""))])
    return _table(("score", "-1 to 3", "bad", "documents, by their worst", "what it is"), rows)


def _worst(summary: Summary, excerpts: Mapping[tuple[str, int, int], str]) -> str:
    skips = sorted((skip for each in summary.sets for skip in each.skips), key=lambda skip: -skip["score"])[:WORST]
    rows = []
    for skip in skips:
        excerpt = excerpts.get((skip["input"], skip["document"], skip["first"]))
        cells = [_text(skip["input"]), *(_number(skip[name]) for name in ("document", "first", "tokens", "score"))]
        cells.append(_text("; ".join(skip["reasons"])))
        rows.append([*cells, "<td></td>" if excerpt is None else f"<td><pre>{escape(excerpt)}</pre></td>"])
    return _table(("input", "document", "first token", "tokens", "score", "why", "text" if excerpts else ""), rows)
