# SPDX-License-Identifier: Apache-2.0
"""Timings in, figures out: percentiles, rates, and the same figures as text, JSON or a picture.

Pure: no clock and no I/O. A rate counts only the span from the first sent turn to the last ended one.
"""

import html
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from server.cli.bench.clients import TurnTiming

PERCENTILES = (50, 95, 99)


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The figures of one run. Times in milliseconds, rates per second; percentiles as (p50, p95, p99)."""

    label: str
    clients: int
    turns: int
    errors: dict[str, int]
    seconds: float
    input_tokens: int
    output_tokens: int
    cached_tokens: int
    output_tokens_per_s: float
    turns_per_s: float
    first_token_ms: tuple[float, ...]
    later_first_token_ms: tuple[float, ...]
    gap_ms: tuple[float, ...]
    gap_ms_max: float
    end_to_end_ms: tuple[float, ...]


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which `percent` of `values` lie, by linear interpolation; 0 when there are none."""
    if not values:
        return 0.0
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summarise(label: str, clients: int, timings: Sequence[TurnTiming]) -> Summary:
    """Reduce one run's timings; failed turns count in `errors` and nowhere else."""
    good = [timing for timing in timings if timing.error is None]
    errors = Counter(timing.error for timing in timings if timing.error is not None)
    seconds = max((t.ended_at for t in good), default=0.0) - min((t.started_at for t in good), default=0.0)
    first = [t.first_token_s for t in good if t.turn == 0 and t.first_token_s is not None]
    later = [t.first_token_s for t in good if t.turn > 0 and t.first_token_s is not None]
    gaps = [gap for timing in good for gap in timing.gaps_s]
    outputs = sum(timing.output_tokens for timing in good)
    return Summary(
        label=label,
        clients=clients,
        turns=len(good),
        errors=dict(errors),
        seconds=round(seconds, 3),
        input_tokens=sum(timing.input_tokens for timing in good),
        output_tokens=outputs,
        cached_tokens=sum(timing.cached_tokens for timing in good),
        output_tokens_per_s=round(outputs / seconds, 1) if seconds else 0.0,
        turns_per_s=round(len(good) / seconds, 2) if seconds else 0.0,
        first_token_ms=_milliseconds(first),
        later_first_token_ms=_milliseconds(later),
        gap_ms=_milliseconds(gaps),
        gap_ms_max=round(max(gaps, default=0.0) * 1000, 1),
        end_to_end_ms=_milliseconds([timing.ended_at - timing.started_at for timing in good]),
    )


def as_text(summaries: Sequence[Summary]) -> str:
    """A table for a terminal, one line a run."""
    head = ("clients", "turns", "errors", "tokens/s", "first p50/p95/p99 ms", "gap p50/p95/p99/max ms")
    rows = [
        head,
        *(
            (
                str(run.clients),
                str(run.turns),
                str(sum(run.errors.values())),
                f"{run.output_tokens_per_s:.1f}",
                _slashes(run.first_token_ms),
                _slashes((*run.gap_ms, run.gap_ms_max)),
            )
            for run in summaries
        ),
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows
    )


def as_json(summaries: Sequence[Summary]) -> list[dict[str, object]]:
    """Plain values, ready for a JSON writer."""
    return [asdict(summary) for summary in summaries]


def as_svg(title: str, summaries: Sequence[Summary]) -> str:
    """A bar a run: output tokens per second over the number of clients, one colour a label."""
    labels = list(dict.fromkeys(run.label for run in summaries))
    counts = sorted({run.clients for run in summaries})
    top = max((run.output_tokens_per_s for run in summaries), default=1.0) or 1.0
    colours = ("#0b7285", "#e8590c", "#5f3dc4", "#868e96")
    group = 560 / max(len(counts), 1)
    width = group * 0.8 / max(len(labels), 1)
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 360" font-family="sans-serif"',
        ' font-size="12">',
        '<rect width="640" height="360" fill="#fff"/>',
        f'<text x="40" y="24" font-size="15">{html.escape(title)}</text>',
    ]
    for run in summaries:
        height = 240 * run.output_tokens_per_s / top
        x = 50 + counts.index(run.clients) * group + labels.index(run.label) * width
        colour = colours[labels.index(run.label) % len(colours)]
        parts.append(
            f'<rect x="{x:.1f}" y="{300 - height:.1f}" width="{width - 2:.1f}" height="{height:.1f}" '
            f'fill="{colour}"/><text x="{x + width / 2 - 1:.1f}" y="{294 - height:.1f}" '
            f'text-anchor="middle">{run.output_tokens_per_s:.0f}</text>'
        )
    for index, count in enumerate(counts):
        x = 50 + index * group + group * 0.4
        parts.append(f'<text x="{x:.1f}" y="318" text-anchor="middle">{count}</text>')
    for index, label in enumerate(labels):
        x = 50 + index * 150
        parts.append(
            f'<rect x="{x}" y="336" width="10" height="10" fill="{colours[index % len(colours)]}"/>'
            f'<text x="{x + 16}" y="345">{html.escape(label)}</text>'
        )
    parts.append('<text x="600" y="318" text-anchor="end">clients</text></svg>')
    return "\n".join(parts)


def _milliseconds(values: Sequence[float]) -> tuple[float, ...]:
    return tuple(round(percentile(values, percent) * 1000, 1) for percent in PERCENTILES)


def _slashes(values: Sequence[float]) -> str:
    return "/".join(f"{value:.0f}" for value in values)
