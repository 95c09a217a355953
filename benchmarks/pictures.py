"""Draws what was measured, as SVG files. The only module that needs matplotlib."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

mpl.rcParams.update(
    {
        "svg.fonttype": "none",  # text stays text: small files
        "svg.hashsalt": "horo",  # the same numbers give the same file
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.alpha": 0.3,
    }
)
COLOURS = {
    "horo": "#d1495b",
    "gloo": "#6c757d",
    "DDP": "#6c757d",
    "Open MPI": "#00798c",
    "MPICH": "#edae49",
    "Horovod": "#7b5ea7",
    "ceiling": "#444444",
}


@dataclass(frozen=True)
class Curve:
    """Points of one contestant; ``low`` and ``high`` bound the band round them, or are empty."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()


def bytes_text(value: float, _: object = None) -> str:
    """``64K`` for an axis."""
    for factor, unit in ((1 << 30, "G"), (1 << 20, "M"), (1 << 10, "K")):
        if value >= factor:
            return f"{value / factor:g}{unit}"
    return f"{value:g}"


def draw_curves(path: Path, curves: Sequence[Curve], *, x: str, y: str, title: str, x_in_bytes: bool = False) -> None:
    """Both axes logarithmic, x by powers of two."""
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.add_subplot()
    for curve in curves:
        style: dict[str, Any] = {"color": COLOURS.get(curve.name)} if curve.name in COLOURS else {}
        width = 2.2 if curve.name == "horo" else 1.3
        (line,) = axes.plot(curve.x, curve.y, marker="o", markersize=3, linewidth=width, label=curve.name, **style)
        if curve.low:
            axes.fill_between(curve.x, curve.low, curve.high, color=line.get_color(), alpha=0.15, linewidth=0)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    places = sorted({value for curve in curves for value in curve.x})
    axes.set_xticks(places[:: math.ceil(len(places) / 14)], minor=False)
    axes.xaxis.set_major_formatter(FuncFormatter(bytes_text if x_in_bytes else lambda value, _: f"{value:g}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_title(title, loc="left", fontsize=10)
    axes.legend(frameon=False, fontsize=8)
    _save(figure, path)


def draw_bars(path: Path, groups: Mapping[str, Mapping[str, float]], *, y: str, title: str, full: float) -> None:
    """One group of bars per key, one bar per contestant, each with its number; ``full`` gets a line."""
    figure = Figure(figsize=(6.4, 3.2), layout="constrained")
    axes = figure.add_subplot()
    names = list(dict.fromkeys(name for bars in groups.values() for name in bars))
    width = 0.8 / max(1, len(names))
    for index, name in enumerate(names):
        places = [
            number + (index - (len(names) - 1) / 2) * width
            for number, bars in enumerate(groups.values())
            if name in bars
        ]
        heights = [bars[name] for bars in groups.values() if name in bars]
        style: dict[str, Any] = {"color": COLOURS[name]} if name in COLOURS else {}
        drawn = axes.bar(places, heights, width * 0.92, label=name, **style)
        axes.bar_label(drawn, [f"{height:.0f}" for height in heights], fontsize=7, padding=1)
    axes.axhline(full, color=COLOURS["ceiling"], linewidth=0.8, linestyle="--")
    axes.set_xticks(range(len(groups)), list(groups))
    axes.grid(visible=False, axis="x")
    axes.set_ylabel(y)
    axes.set_title(title, loc="left", fontsize=10)
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    _save(figure, path)


def _save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    # matplotlib ends some lines with a space.
    text = "\n".join(line.rstrip() for line in path.read_text(encoding="utf-8").splitlines())
    path.write_text(text + "\n", encoding="utf-8")
