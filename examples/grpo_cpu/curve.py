"""Draws the mean reward of each step as a small SVG.

Invariant: what is drawn is what the trainer's log says; every step is a point, the line is their running mean.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 320, 48, 16, 28, 40
COLORS = ("#1f6feb", "#d1570a", "#1a7f37", "#8250df")
SMOOTHED_OVER = 5
"""Steps of the running mean."""
QUARTER = 4


def rewards(log: Path) -> list[float]:
    """Mean reward of each step, in order."""
    return [float(json.loads(line)["reward"]) for line in log.read_text(encoding="utf-8").splitlines()]


def summary(log: Path) -> str:
    """The first and the last quarter of the steps in one line."""
    values = rewards(log)
    part = max(len(values) // QUARTER, 1)
    return f"{len(values)} steps, mean reward {_mean(values[:part]):.3f} in the first quarter, {_mean(values[-part:]):.3f} in the last"


def draw(logs: Mapping[str, Path]) -> str:
    """The SVG. logs: label -> the trainer's log."""
    curves = {label: rewards(log) for label, log in logs.items()}
    steps = max(map(len, curves.values()))
    parts = [_axes(steps)]
    for number, (label, values) in enumerate(curves.items()):
        color = COLORS[number % len(COLORS)]
        smooth = [_mean(values[max(0, i + 1 - SMOOTHED_OVER) : i + 1]) for i in range(len(values))]
        points = " ".join(f"{_x(i + 1, steps):.1f},{_y(value):.1f}" for i, value in enumerate(smooth))
        dots = [f'<circle cx="{_x(i + 1, steps):.1f}" cy="{_y(v):.1f}" r="1.8"/>' for i, v in enumerate(values)]
        parts += [f'<g fill="{color}" opacity="0.35">{"".join(dots)}</g>']
        parts += [f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"/>']
        parts += [f'<text x="{LEFT + 12}" y="{TOP + 14 + 16 * number}" fill="{color}">{label}</text>']
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">\n'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>\n{body}\n</svg>\n'
    )


def _axes(steps: int) -> str:
    lines = []
    for tick in range(0, 11, 2):
        y = _y(tick / 10)
        lines.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="#ddd"/>')
        lines.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end" fill="#555">{tick / 10:.1f}</text>')
    for tick in range(0, steps + 1, max(10, steps // 60 * 10)):
        lines.append(
            f'<text x="{_x(tick, steps):.1f}" y="{HEIGHT - 22}" text-anchor="middle" fill="#555">{tick}</text>'
        )
    lines.append(
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 6}" text-anchor="middle" fill="#555">step</text>'
    )
    lines.append(f'<text x="{LEFT - 36}" y="{TOP - 12}" fill="#555">mean reward</text>')
    return "\n".join(lines)


def _x(step: int, steps: int) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * step / max(steps, 1)


def _y(value: float) -> float:
    return TOP + (HEIGHT - TOP - BOTTOM) * (1 - value)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
