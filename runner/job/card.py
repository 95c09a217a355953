"""The card at the end of a job: how long it took, where the time of a step went, who was slow, what to do. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from horo.config.hosts import ranges
from horo.diagnostics.slowest import slowest_of
from horo.runner.agent.rank_summary import NAMES_MAX, RankSummary
from horo.runner.job.amounts import count, duration, ms, percent, size, span
from horo.runner.job.report import Ending

__all__ = ["card", "details", "facts_of", "pace"]

_LOADING_MIN = 0.2
"""Of a step, for which every rank waits for its loader."""
_NAMED_MAX = 3


def facts_of(endings: Sequence[Ending], *, failed: bool, word: str = "rank") -> dict[str, Any]:
    """The parts of the time of a job's steps, for the card and ``--json-report``; None where they were not measured.

    Args:
        endings: of all its ranks.
        failed: whether the job has.
        word: the name for a process; workers come and go.
    """
    known = {each.rank: each.note.summary for each in sorted(endings, key=lambda each: each.rank)}
    ranks = {rank: summary for rank, summary in known.items() if summary is not None}
    measured = {rank: each for rank, each in ranks.items() if each.measured and each.ns}
    is_whole = all(rank in measured and measured[rank].size == len(known) for rank in known)
    step = _step(list(measured.values())) if measured else None
    samples = {rank: each.samples for rank, each in measured.items()}
    slowest = slowest_of(samples, step["seconds"]) if step is not None and is_whole else None
    most = max(measured.values(), key=lambda each: each.measured, default=None)
    return {
        "ranks": len(endings),
        "hosts": len({ending.host for ending in endings}),
        "steps": max((each.steps for each in ranks.values()), default=0),
        "steps_per_second": None if most is None else most.measured / (most.ns / 1e9),
        "step": step,
        "slowest": None if slowest is None else vars(slowest),
        "traffic": _traffic(list(measured.values())),
        "memory": _peaks([each.peak for each in ranks.values()]),
        "gpu_memory": _peaks([each.gpu_peak for each in ranks.values()]),
        "ends": _ends(ranks, endings, word) if failed else "",
        "notes": _notes(ranks, endings, step, may_be_short=failed and word == "rank"),
    }


def _step(measured: Sequence[RankSummary]) -> dict[str, float]:
    """The mean step, over steps and ranks."""
    seconds, waiting, moving, loading = (
        fmean(getattr(each, name) / each.measured / 1e9 for each in measured)
        for name in ("ns", "waiting", "moving", "loading")
    )
    computing = max(0.0, seconds - waiting - moving)  # another thread may have waited in the first step, too
    return {"seconds": seconds, "computing": computing, "waiting": waiting, "moving": moving, "loading": loading}


def _traffic(measured: Sequence[RankSummary]) -> dict[str, Any] | None:
    moved = [each for each in measured if each.bytes and each.via]
    if not moved:
        return None
    means = {
        name: fmean(getattr(each, name) / each.measured for each in moved) for name in ("bytes", "tensors", "batches")
    }
    return {**means, "via": moved[0].via}


def _peaks(all_ranks: Sequence[int]) -> dict[str, int] | None:
    known = list(filter(None, all_ranks))
    return {"least": min(known), "most": max(known)} if known else None


def _ends(ranks: Mapping[int, RankSummary], endings: Sequence[Ending], word: str) -> str:
    """The place of each rank at the end of a job that has failed."""
    groups: dict[tuple[bool, str], list[int]] = {}
    for ending in sorted(endings, key=lambda each: each.rank):
        known = ranks.get(ending.rank)
        if known is not None:
            step = f"in step {known.within}" if known.within else f"after step {known.steps}"
            where = f", {ending.note.where}" if ending.note.where and ending.failed else ""
            groups.setdefault((ending.failed, step + where), []).append(ending.rank)
    parts = []
    for (failed, place), who in groups.items():
        is_one = len(who) == 1
        verb = ("was" if is_one else "were") if failed else f"ended {'its script' if is_one else 'their scripts'}"
        parts.append(f"{word}{'' if is_one else 's'} {ranges(who)} {verb} {place}")
    return "; ".join(parts)


def _notes(
    ranks: Mapping[int, RankSummary], endings: Sequence[Ending], step: Mapping[str, float] | None, *, may_be_short: bool
) -> list[str]:
    """Advice, each by a rule."""
    notes = []
    ended_well = {ending.rank for ending in endings if not (ending.failed or ending.asked)}
    reached = {rank: max(each.steps, each.within) for rank, each in ranks.items()}
    furthest = max(reached.values(), default=0)
    short = [rank for rank, step in reached.items() if rank in ended_well and 0 < step < furthest]
    if short and may_be_short:
        one = len(short) == 1
        notes.append(
            f"rank{'' if one else 's'} {ranges(short)} ran short of data: give all ranks equally many batches, or end "
            "with hvd.join()"
        )
    if not ranks or len(ranks) < len(endings):
        return notes  # the others are true of all ranks
    loading = min(each.loading / each.ns if each.ns else 0.0 for each in ranks.values())
    if step is not None and loading >= _LOADING_MIN:
        notes.append(
            f"every rank waits for its DataLoader for {percent(step['loading'] / step['seconds'])} of a step: more "
            "workers (num_workers=) would help"
        )
    unused = set.intersection(*(set(each.unused) for each in ranks.values()))
    if unused:
        names = sorted(unused)[:_NAMED_MAX]
        more = ", ..." if len(unused) > len(names) else ""
        least = "at least " if any(len(each.unused) == NAMES_MAX for each in ranks.values()) else ""
        notes.append(
            f"{least}{count(len(unused), 'parameter')} had no gradient in the last step ({', '.join(names)}{more})"
        )
    crowded = [each for each in ranks.values() if each.on_cpu and each.ranks_here > each.cores > 0]
    if crowded:
        most = max(crowded, key=lambda each: each.ranks_here / each.cores)
        crowd = f"{most.ranks_here} ranks on {count(most.cores, 'core')}"
        best = sum(min(1.0, each.cores / each.ranks_here) for each in ranks.values())
        notes.append(f"{crowd}: -np {round(best)} would be faster")
    return notes


def card(facts: Mapping[str, Any], *, seconds: float, code: int, signal: str = "", word: str = "rank") -> list[str]:
    """The lines for the user; a line without facts is left out.

    Args:
        facts: of ``facts_of``.
        seconds: that the job took.
        code: hororun's exit code.
        signal: that has ended the job; empty: none has.
        word: the name for a process.
    """
    how = f"ended by {signal}" if signal else "failed" if code else "done"
    after = "after" if how != "done" else "in"
    return [f"{how} {after} {duration(seconds)}: {pace(facts, word)}, exit {code}", *details(facts, word)]


def pace(facts: Mapping[str, Any], word: str = "rank") -> str:
    """The numbers of ranks and steps, as in the first line."""
    parts = [f"{count(facts['ranks'], word)} on {count(facts['hosts'], 'host')}"]
    if facts["steps"]:
        parts.append(count(facts["steps"], "step"))
    if facts["steps_per_second"] is not None:
        parts.append(f"{facts['steps_per_second']:.3g} steps/s")
    return ", ".join(parts)


def details(facts: Mapping[str, Any], word: str = "rank") -> list[str]:
    """The lines below the first one."""
    step, slowest, traffic = facts["step"], facts["slowest"], facts["traffic"]
    lines = []

    def add(label: str, text: str) -> None:
        lines.append(f"  {label:<15} {text}")

    if facts["ends"]:
        add(f"{word}s", facts["ends"])
    if step is not None:
        shares = [("computing", "computing"), ("waiting", f"waiting for other {word}s"), ("moving", "moving data")]
        told = [
            f"{name} {ms(step[key])} ({percent(step[key] / step['seconds'])})"
            for key, name in shares
            if key == "computing" or facts["ranks"] > 1
        ]
        add("a step", f"{ms(step['seconds'])} ms: {', '.join(told)}")
    if slowest is not None:
        data = ""
        if slowest["loading_s"] >= slowest["behind_s"] / 2:
            data = f", {ms(slowest['loading_s'])} of it waiting for its DataLoader (data loading?)"
        add(
            f"slowest {word}",
            f"{slowest['rank']}: last in {percent(slowest['share'])} of steps, {ms(slowest['behind_s'])} ms behind "
            f"at the median{data}",
        )
    if traffic is not None:
        tensors, batches = round(traffic["tensors"]), max(1, round(traffic["batches"]))
        each = f"{count(tensors, 'tensor')} in {count(batches, 'batch', 'batches')}"
        add("traffic", f"{size(traffic['bytes'])} per step and {word}, {each}, {traffic['via']}")
    memory = [(facts["memory"], ""), (facts["gpu_memory"], " on its GPU")]
    told = [f"{span(each['least'], each['most'])} per {word} at most{where}" for each, where in memory if each]
    if told:
        add("memory", ", ".join(told))
    if facts["notes"]:
        add("notes", "; ".join(facts["notes"]))
    return lines
