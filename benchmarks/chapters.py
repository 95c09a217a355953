"""The chapters of docs/performance.md: what each benchmark's results become in words, tables and pictures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pictures
import report
from measured import Document, Row, grouped, median_of, ratio_of, states_of, values_of
from pictures import Curve
from sizes import ALLREDUCE, OPERATIONS, Operation, Rates

STATE_TEXTS = {"": ", all rounds", "sharing": "", "apart": ", separate caches"}
# Columns of a table that say nothing to a reader of the page.
HIDDEN = {"case", "operation", "idle_cpu_percent", "name", "count", "calls", "wrong", "algbw", "ratio", "iterations"}
HIDDEN |= {"min_us", "call_min_us", "call_median_us"}
SIZES_MAX = 7
SMALL_BYTES = 1024


@dataclass(frozen=True)
class Chapter:
    """``lines`` of Markdown; ``ahead``: for the list of what peers do better."""

    lines: list[str]
    ahead: list[str] = field(default_factory=list)


def make(document: Document, folder: Path) -> Chapter:
    """The chapter of one file of results; pictures go to ``folder``."""
    maker: Callable[[Document, Path], Chapter] = MAKERS.get(document.benchmark, plain)
    return maker(document, folder)


def markdown_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(titles)} |", "|" + "---|" * len(titles), *[f"| {' | '.join(row)} |" for row in rows]]


def picture(folder: Path, name: str, text: str) -> str:
    return f"![{text}]({folder.name}/{name}.svg)"


# ---- allreduce -------------------------------------------------------------------------------------------------------


def allreduce(document: Document, folder: Path) -> Chapter:
    rows = document.rows
    dtype, ranks = rows[0]["dtype"], rows[0]["ranks"]
    states = states_of(rows)
    lines, ahead = [f"## Allreduce: {dtype}, {ranks} ranks{document.where}", ""], []
    for state in states:
        file = f"{document.name}-{state}" if state else document.name
        title = f"in-place sum of {dtype}, {ranks} ranks{document.where}{STATE_TEXTS[state]}"
        by_contestant = grouped(rows, "contestant")
        curves = [bandwidth_curve(name, found, state) for (name,), found in by_contestant.items()]
        path = folder / f"{file}.svg"
        pictures.draw_curves(path, curves, x="bytes", y="bus bandwidth, GB/s", title=title, x_in_bytes=True)
        lines += [picture(folder, file, f"Bandwidth, {title}"), "", *size_table(rows, state), ""]
        if sizes := sizes_ahead(rows, state):
            ahead.append(f"* allreduce of {dtype}, {ranks} ranks{document.where}{STATE_TEXTS[state]}: {sizes}")
    return Chapter(lines[:-1], ahead)


def bandwidth_curve(name: str, rows: Sequence[Row], state: str) -> Curve:
    def busbw(row: Row, micros: float) -> float:
        return Rates.of(row["bytes"], row["ranks"], micros).busbw

    return Curve(
        name,
        [row["bytes"] for row in rows],
        [busbw(row, median_of(row, state)) for row in rows],
        [busbw(row, max(values_of(row, state))) for row in rows],
        [busbw(row, min(values_of(row, state))) for row in rows],
    )


def best_peer(rows: Sequence[Row], state: str) -> Row | None:
    """The fastest of the others; horo over an MPI is none of them."""
    others = [row for row in rows if row["contestant"].partition(",")[0] not in ("horo", "ceiling")]
    return min(others, key=lambda row: median_of(row, state), default=None)


def horo_of(rows: Sequence[Row]) -> Row | None:
    return next((row for row in rows if row["contestant"] == "horo"), None)


def size_table(rows: Sequence[Row], state: str, operation: Operation = ALLREDUCE) -> list[str]:
    names = [key[0] for key in grouped(rows, "contestant")]
    table = []
    for size, found in sizes_shown(rows).items():
        times = {row["contestant"]: median_of(row, state) for row in found}
        fastest = min(times, key=lambda name: times[name])
        cells = [report.time_text(times[name]) if name in times else "" for name in names]
        cells = [f"**{cell}**" if name == fastest else cell for name, cell in zip(names, cells, strict=True)]
        horo, best = horo_of(found), best_peer(found, state)
        busbw = Rates.of(size, horo["ranks"], times["horo"], operation).busbw if horo else 0.0
        ratio = f"{ratio_of(best, horo, state):.2f}" if horo and best else ""
        table.append([report.size_text(size), *cells, report.three_digits(busbw), ratio])
    return markdown_table(["size", *names, "horo, GB/s", "best peer / horo"], table)


def sizes_shown(rows: Sequence[Row]) -> dict[int, list[Row]]:
    """Rows by size; of many sizes every second one, which are powers of 16 where powers of 4 were measured.

    Of sizes below ``SMALL_BYTES``, whose times hardly differ, only the least.
    """
    by_size = {int(size): found for (size,), found in grouped(rows, "bytes").items()}
    step = 1 if len(by_size) <= SIZES_MAX else 2
    shown = list(by_size.items())[::step]
    return dict(shown[:1] + [item for item in shown[1:] if item[0] >= SMALL_BYTES])


def sizes_ahead(rows: Sequence[Row], state: str) -> str:
    """At which sizes in a row a peer takes less time than horo, and how many times as fast it is; empty if at none."""
    runs: list[list[tuple[int, float, str]]] = [[]]
    for (size,), of_size in grouped(rows, "bytes").items():
        horo, best = horo_of(of_size), best_peer(of_size, state)
        if horo and best and (ratio := ratio_of(best, horo, state)) < 1:
            runs[-1].append((size, 1 / ratio, best["contestant"]))
        elif runs[-1]:
            runs.append([])
    texts = []
    for run in filter(None, runs):
        sizes, times = [report.size_text(size) for size, _, _ in run], [time for _, time, _ in run]
        names = " or ".join(dict.fromkeys(name for _, _, name in run))
        low, high = f"{min(times):.2f}", f"{max(times):.2f}"
        size_range = sizes[0] if len(run) == 1 else f"{sizes[0]} to {sizes[-1]}"
        texts.append(f"{size_range} {low if low == high else f'{low} to {high}'} ({names})")
    return ", ".join(texts)


# ---- the other collectives -------------------------------------------------------------------------------------------


def collectives(document: Document, folder: Path) -> Chapter:
    """One table per operation and state of the cores."""
    del folder
    dtype, ranks = document.rows[0]["dtype"], document.rows[0]["ranks"]
    lines = [f"## Other collectives: {dtype}, {ranks} ranks{document.where}", ""]
    ahead: dict[str, list[str]] = {}
    for (name,), rows in grouped(document.rows, "operation").items():
        operation = OPERATIONS[name]
        for state in states_of(rows):
            lines += [f"### {name}{STATE_TEXTS[state]}", "", *size_table(rows, state, operation), ""]
            if sizes := sizes_ahead(rows, state):
                ahead.setdefault(STATE_TEXTS[state], []).append(f"{name} {sizes}")
    place = f"{dtype}, {ranks} ranks{document.where}"
    return Chapter(lines[:-1], [f"* {place}{state}: {'; '.join(texts)}" for state, texts in ahead.items()])


# ---- training step ---------------------------------------------------------------------------------------------------

CEILINGS = {
    "ceiling": "efficiency, %",
    "ceiling, memory kept": "of the ceiling with memory kept, %",
    "ceiling, memory kept, in step": "of that one in step, %",
}


def training_step(document: Document, folder: Path) -> Chapter:
    """Scaling efficiency: the time of a step without communication over the time of a step with it, in percent."""
    rows = document.rows
    groups: dict[str, dict[str, float]] = {}
    table, ahead = [], []
    for (model,), found in grouped(rows, "model").items():
        ceilings = [row for row in found if row["contestant"].partition(",")[0] == "ceiling"]
        for row in found:
            shares = {ceiling["contestant"]: 100 * ratio_of(ceiling, row, "") for ceiling in ceilings}
            if "ceiling" in shares and row["contestant"] != "ceiling":
                groups.setdefault(str(model), {})[row["contestant"]] = shares["ceiling"]
            times = (median_of(row, ""), min(row["rounds_us"]), max(row["rounds_us"]))
            step = "{} ({} to {})".format(*(report.three_digits(micros / 1e3) for micros in times))
            cells = [str(model), row["contestant"], step]
            cells += [f"{shares[name]:.1f}" if name in shares else "" for name in CEILINGS]
            table.append([*cells, f"{row['cpu_us'] / 1e3:.0f}", f"{row['switches']:.0f}"])
        horo, best = horo_of(found), best_peer(found, "")
        if horo and best and (ratio := ratio_of(best, horo, "")) < 1:
            what = f"* training step, {model}{document.where}"
            ahead.append(f"{what}: {best['contestant']}, {1 / ratio:.2f} times as fast")
    lines = [f"## Training step{document.where}", ""]
    if groups:
        title = "scaling efficiency: step without communication / step"
        pictures.draw_bars(folder / f"{document.name}.svg", groups, y="%", title=title, full=100)
        lines += [picture(folder, document.name, "Scaling efficiency by model"), ""]
    titles = ["model", "", "step, ms (fastest to slowest)", *CEILINGS.values(), "CPU, ms", "context switches"]
    return Chapter([*lines, *markdown_table(titles, table)], ahead)


# ---- steps through torch.distributed ---------------------------------------------------------------------------------


def distributed_step(document: Document, folder: Path) -> Chapter:
    """DDP, FSDP2 and ZeRO: times, and those of the others over that of torch.distributed over horo."""
    del folder
    names = [key[0] for key in grouped(document.rows, "contestant")]
    others = [name for name in names if name != "horo dist"]
    table, ahead = [], []
    for (model, title), found in grouped(document.rows, "model", "title").items():
        rows = {row["contestant"]: row for row in found}
        cells = [report.time_text(median_of(rows[name], "")) if name in rows else "" for name in names]
        spreads = {name: rows[name]["of_horo_dist"] for name in others if name in rows}
        ratios = {name: "{1:.2f} ({0:.2f} to {2:.2f})".format(*spread) for name, spread in spreads.items() if spread}
        table.append([str(model), str(title), *cells, *(ratios.get(name, "") for name in others)])
        gloo = spreads.get("gloo")
        if gloo and gloo[1] < 1:
            ahead.append(f"* step of {model}, {title}{document.where}: gloo, {1 / gloo[1]:.2f} times as fast")
    remark = (
        "The ratios are medians within rounds with their quartiles; above 1, torch.distributed over horo is faster."
    )
    titles = ["model", "way", *names, *(f"{name} / horo dist" for name in others)]
    lines = [f"## Steps of DDP, FSDP2 and ZeRO{document.where}", "", remark, "", *markdown_table(titles, table)]
    return Chapter(lines, ahead)


# ---- negotiation -----------------------------------------------------------------------------------------------------

GROWTH = (
    ("messages", "messages"),
    ("hops", "hops"),
    ("latency_us", "time, us"),
    ("memory_used_bytes", "bytes per rank"),
)


def negotiation(document: Document, folder: Path) -> Chapter:
    """How agreement grows with the number of ranks, for one tensor that is known already."""
    rows = [row for row in document.rows if row["tensors"] == 1 and row["kind"] == "cached"]
    lines = ["## Agreement", ""]
    for column, y in GROWTH:
        curves = [
            Curve(f"{ranks_per_host:g} ranks per host", *zip(*points, strict=True))
            for ranks_per_host, points in growth_points(rows, column).items()
            if len(points) > 1
        ]
        if curves:
            name = f"{document.name}-{column.removesuffix('_us').removesuffix('_bytes')}"
            title = f"agreement on one known tensor: {y}"
            pictures.draw_curves(folder / f"{name}.svg", curves, x="ranks", y=y, title=title)
            lines += [picture(folder, name, title), ""]
    return Chapter([*lines, *agreement_table([row for row in document.rows if row["kind"] == "cached"])])


def agreement_table(rows: Sequence[Row]) -> list[str]:
    """One row per layout, with a column for each number of tensors if the value depends on it."""
    counts = [count for (count,) in grouped(rows, "tensors")]
    by_count = {
        "messages": "messages",
        "wire_bytes": "bytes",
        "latency_us": "time",
        "cpu_us_per_rank": "CPU us",
    }
    titles = [f"{title}, {count}" for title in by_count.values() for count in counts]
    table = []
    for (hosts, ranks), found in grouped(rows, "hosts", "ranks").items():
        of_count = {row["tensors"]: row for row in found}
        cells = [cell_of(key, of_count[count][key]) for key in by_count for count in counts]
        first = found[0]
        hops = f"{first['hops']}" + (f", not {first['hops_bound']}" if first["hops"] != first["hops_bound"] else "")
        memory = [cell_of(key, first[key]) for key in ("memory_idle_bytes", "memory_used_bytes", "descriptors")]
        table.append([str(hosts), str(ranks), hops, *cells, *memory])
    remark = f"For {' and '.join(map(str, counts))} tensors in a step; CPU per rank; hops for one, the least possible."
    titles = ["hosts", "ranks", "hops", *titles, "memory idle", "memory used", "descriptors"]
    return [remark, "", *markdown_table(titles, table)]


def growth_points(rows: Sequence[Row], column: str) -> dict[float, list[tuple[float, float]]]:
    """(ranks, value) by ranks per host; values that a logarithmic axis cannot show are left out."""
    found: dict[float, list[tuple[float, float]]] = {}
    for row in rows:
        if row[column]:
            found.setdefault(row["ranks"] / row["hosts"], []).append((row["ranks"], row[column]))
    return {key: sorted(points) for key, points in found.items()}


# ---- links between hosts, and memory ---------------------------------------------------------------------------------


def two_hosts(document: Document, folder: Path) -> Chapter:
    """How much of the link's rate the data has."""
    del folder
    names = [name for (name,) in grouped(document.rows, "contestant")]
    table = []
    for (hosts, per_host, rate, size), found in grouped(document.rows, "hosts", "per_host", "rate", "bytes").items():
        shares = {
            row["contestant"]: report.three_digits(row["data_share"]) if row["right"] else "wrong" for row in found
        }
        place = [str(hosts), str(per_host), str(rate), report.size_text(size)]
        table.append([*place, *(shares.get(name, "") for name in names)])
    remark = "Bytes that each host must send, over the time of a sum and the rate of the link."
    titles = ["hosts", "ranks per host", "rate", "tensor", *names]
    return Chapter(["## Two hosts", "", remark, "", *markdown_table(titles, table)])


def footprint(document: Document, folder: Path) -> Chapter:
    """Memory by what a job does, side by side for its places."""
    del folder
    places = [place for (place,) in grouped(document.rows, "place")]
    table = []
    for (what, in_flight, allowed), found in grouped(document.rows, "what", "in_flight_bytes", "allowed_bytes").items():
        extra = {row["place"]: mebibytes(row["extra_bytes"]) for row in found}
        texts = [mebibytes(in_flight), *(extra.get(place, "") for place in places), mebibytes(allowed)]
        table.append([str(what), *texts])
    remark = f"MiB per rank beside the tensors; {document.rows[0]['ranks']} ranks."
    titles = ["what", "in flight", *places, "allowed"]
    return Chapter(["## Footprint", "", remark, "", *markdown_table(titles, table)])


def mebibytes(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 20):.3g}"


# ---- everything else -------------------------------------------------------------------------------------------------


def plain(document: Document, folder: Path) -> Chapter:
    """A table of all columns, for benchmarks without a chapter of their own."""
    del folder
    ahead = []
    contests = [row for row in document.rows if {"case", "contestant", "rounds_us"} <= set(row)]
    for (case, ranks), found in grouped(contests, "case", "ranks").items():
        horo, best = horo_of(found), best_peer(found, "")
        if horo and best and (ratio := ratio_of(best, horo, "")) < 1:
            what = f"{case}, {ranks} ranks" if ranks else case
            ahead.append(f"* {title_of(document.name)}, {what}: {best['contestant']}, {1 / ratio:.1f} times as fast")
    return Chapter([f"## {title_of(document.name).capitalize()}", "", *plain_table(document.rows)], ahead)


def plain_table(rows: Sequence[Row]) -> list[str]:
    if all("bytes" in row for row in rows):
        rows = [row for found in sizes_shown(rows).values() for row in found]
    columns = list(dict.fromkeys(key for row in rows for key in row if key not in HIDDEN))
    columns = [key for key in columns if not any(isinstance(row.get(key), list | dict) for row in rows)]
    cells = {title_of(key): [cell_of(key, row.get(key)) for row in rows] for key in columns}
    same = {title: column[0] for title, column in cells.items() if len(column) > 1 and len(set(column)) == 1}
    remark = [f"In all rows: {', '.join(' '.join(pair) for pair in same.items())}.", ""] if same else []
    titles = [title for title in cells if title not in same]
    return [*remark, *markdown_table(titles, list(zip(*(cells[title] for title in titles), strict=True)))]


def title_of(key: str) -> str:
    for unit in ("_us", "_bytes"):
        key = key.removesuffix(unit)
    for unit in ("ms", "s", "gbs"):
        if key.endswith(f"_{unit}"):
            key = f"{key.removesuffix(f'_{unit}')}, {'GB/s' if unit == 'gbs' else unit}"
    return key.replace("_", " ")


def cell_of(key: str, value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, int | float):
        return str(value)
    if key.endswith("_us"):
        return report.time_text(float(value))
    if key == "bytes" or key.endswith("_bytes"):
        return report.size_text(int(value)) if value % 1024 == 0 else f"{value:,}"
    return f"{value:g}" if isinstance(value, int) else report.three_digits(value)


MAKERS: dict[str, Callable[[Document, Path], Chapter]] = {
    "allreduce": allreduce,
    "collectives": collectives,
    "training_step": training_step,
    "distributed_step": distributed_step,
    "negotiation": negotiation,
    "two_hosts": two_hosts,
    "footprint": footprint,
}
