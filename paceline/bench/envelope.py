"""Draws a comparison: throughput by concurrency, the envelope, and the regret of each arm."""

from __future__ import annotations

from pathlib import Path

from paceline.bench.comparison import Grid, regrets

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f")
MARKS = "osD^vPX"


def draw(grid: Grid, stem: Path, title: str) -> list[Path]:
    """Writes STEM.png and STEM.svg; returns their paths."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    levels = list(next(iter(grid.values())))
    lost = regrets(grid)
    figure, (top, bottom) = pyplot.subplots(
        2, 1, sharex=True, figsize=(8, 7), height_ratios=(2, 1), layout="constrained"
    )
    best = [max(cells[level].rate for name, cells in grid.items() if "#" not in name)
            for level in levels]  # fmt: skip
    top.fill_between(levels, best, color="#000000", alpha=0.06, label="best of all", linewidth=0)
    for number, (name, cells) in enumerate(grid.items()):
        style = {
            "color": COLOURS[number % len(COLOURS)],
            "marker": MARKS[number % len(MARKS)],
            "linestyle": ":" if "#" in name else "-",
            "linewidth": 2.6 if name == "adaptive" else 1.6,
            "markersize": 5,
        }
        top.plot(levels, [cells[level].rate for level in levels], label=name, **style)
        bottom.plot(levels, [100 * lost[name][level] for level in levels], **style)
        bad = [level for level in levels if cells[level].failed]
        if bad:
            top.scatter(bad, [cells[level].rate for level in bad], s=130, marker="x",
                        color="#c00000", zorder=5, label=f"{name}: failed requests")  # fmt: skip
    top.set_title(title, loc="left", fontsize=11)
    top.set_ylabel("output tokens a second")
    top.set_ylim(bottom=0)
    top.legend(frameon=False, fontsize=9)
    bottom.set_ylabel("regret, %")
    bottom.set_xlabel("concurrent requests")
    bottom.set_xscale("log", base=2)
    bottom.set_xticks(levels, [str(level) for level in levels])
    bottom.minorticks_off()
    for axes in (top, bottom):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    paths = [stem.with_suffix(".png"), stem.with_suffix(".svg")]
    for path in paths:
        figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return paths
