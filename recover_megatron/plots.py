"""Every plot that the commands draw, from plain numbers. The only importer of matplotlib."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log2
from pathlib import Path
from typing import Any

Figure = Any  # matplotlib.figure.Figure


def new_figure(height: float, ratios: Sequence[float] = (1,)) -> tuple[Figure, Any]:
    """A figure of `height` inches, and its panels, one above the other (the panel, if one)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, height), layout="constrained")
    return figure, figure.subplots(len(ratios), 1, sharex=True, height_ratios=ratios)


def png(figure: Figure) -> bytes:
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=120)
    return picture.getvalue()


def by_iteration(
    values: Mapping[int, float], name: str, marks: Sequence[int], steps: bool = False
) -> Figure:
    """One line over the iterations, with a vertical line at each of `marks`."""
    figure, axes = new_figure(3.2)
    iterations = sorted(values)
    style = {"drawstyle": "steps-mid"} if steps else {}
    line = "C0.-" if len(iterations) < 60 else "C0-"
    axes.plot(iterations, [values[i] for i in iterations], line, lw=1.2, **style)
    axes.set_xlabel("iteration")
    axes.set_ylabel(name)
    if name != "lm loss":
        axes.set_ylim(bottom=0)
    if steps:
        axes.yaxis.get_major_locator().set_params(integer=True)
    for iteration in marks:
        axes.axvline(iteration, color="C3", ls=":", lw=1)
    return figure


@dataclass(frozen=True)
class Bar:
    """One recovery: its label, and how long each part took, in seconds."""

    label: str
    seen_s: float
    repaired_s: float
    redone_s: float


def timeline(bars: Sequence[Bar]) -> Figure:
    """A bar for each recovery: seen, repaired, recomputed and committed."""
    figure, axes = new_figure(0.9 + 0.4 * len(bars))
    for row, bar in enumerate(bars):
        start = 0.0
        parts = (("seen", bar.seen_s, "C1"), ("repaired", bar.repaired_s, "C3"))
        for name, seconds, color in (*parts, ("redone", bar.redone_s, "C2")):
            label = name if row == 0 else None
            axes.barh(row, 1000 * seconds, left=start, color=color, label=label)
            start += 1000 * seconds
    axes.set_yticks(range(len(bars)), [bar.label for bar in bars])
    axes.invert_yaxis()
    axes.set_xlabel("ms since the replica died (where that is known), else since it was seen")
    figure.legend(loc="outside upper right", ncols=3, fontsize=8)
    return figure


@dataclass(frozen=True)
class Comparison:
    """Two runs by iteration. `live` are replicas, `rates` tokens/s, `marks` what was lost in which
    iteration."""

    losses: Mapping[int, float]
    reference: Mapping[int, float]
    live: Mapping[int, int]
    rates: Mapping[int, float]
    marks: Sequence[tuple[int, str]]


def comparison(runs: Comparison) -> Figure:
    """Four panels: both losses, their difference, live replicas, tokens/s."""
    from matplotlib.ticker import MaxNLocator

    figure, panels = new_figure(10, (3, 1.4, 1, 1.4))
    loss, difference, live, rate = panels
    known, mine = sorted(runs.reference), sorted(runs.losses)
    loss.plot(known, [runs.reference[i] for i in known], "k-", lw=3, alpha=0.3)
    loss.plot(mine, [runs.losses[i] for i in mine], "C0-", lw=1.2)
    loss.legend(["without failures", "with failures"])
    loss.set_ylabel("lm loss")
    shared = [i for i in mine if i in runs.reference]
    difference.plot(shared, [runs.losses[i] - runs.reference[i] for i in shared], "C3.-", lw=0.8)
    difference.axhline(0, color="k", lw=0.5)
    difference.set_ylabel("loss difference")
    difference.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    live.step(list(runs.live), list(runs.live.values()), "C2-", where="mid")
    live.set_ylim(0, max(runs.live.values(), default=0) + 0.5)
    live.set_ylabel("live replicas")
    rate.plot(list(runs.rates), list(runs.rates.values()), "C4.-", lw=0.8)
    rate.set_ylabel("tokens/s")
    rate.set_ylim(bottom=0)
    rate.set_xlabel("iteration")
    rate.xaxis.set_major_locator(MaxNLocator(integer=True))
    for iteration, text in runs.marks:
        for panel in panels:
            panel.axvline(iteration, color="C1", ls=":", lw=1)
        loss.annotate(
            text,
            (iteration, 1),
            xycoords=("data", "axes fraction"),
            xytext=(3, -6),
            textcoords="offset points",
            rotation=90,
            va="top",
            fontsize=8,
            color="C1",
            bbox={"fc": "white", "ec": "none", "alpha": 0.8, "pad": 1},
        )
    figure.align_ylabels()
    return figure


def goodput(
    lines: Mapping[str, Mapping[int, float]], notes: Sequence[str], title: str, path: Path
) -> None:
    """Goodput, in per cent, against GPUs, one line for each system; the assumptions beneath."""
    figure, axes = new_figure(4.6 + 0.17 * len(notes))
    for name, line in lines.items():
        axes.plot(list(line), list(line.values()), "o-", label=name)
    sizes = sorted({size for line in lines.values() for size in line})
    if len(sizes) > 1 and log2(sizes[-1] / sizes[0]) > 2:
        axes.set_xscale("log")
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.minorticks_off()
    axes.set_xlabel("GPUs")
    axes.set_ylabel("goodput, % of the machine without failures")
    axes.set_ylim(0, 102)
    axes.set_title(title)
    axes.legend(loc="lower left")
    figure.supxlabel("\n".join(notes), fontsize=7, x=0.02, ha="left")
    path.write_bytes(png(figure))
