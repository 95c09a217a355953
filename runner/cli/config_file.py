"""``--config-file``: a YAML file in Horovod's form, as options of hororun."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from horo.runner.config import JobError

__all__ = ["config_words"]


class _Key(NamedTuple):
    """What a key stands for.

    Attributes:
        option: it takes the value; empty: the key is a switch.
        true: the option for true, empty: none.
        false: the option for false, empty: none.
        unless: destinations of the options on the command line that replace the key.
    """

    option: str = ""
    true: str = ""
    false: str = ""
    unless: tuple[str, ...] = ()


def _valued(option: str) -> _Key:
    return _Key(option, unless=(option.strip("-").replace("-", "_"),))


def _switch(option: str) -> _Key:
    return _Key(true=option, false=option.replace("--", "--no-", 1), unless=("refused",))


_SECTIONS: dict[str, dict[str, _Key]] = {
    "params": {
        "fusion_threshold_mb": _valued("--fusion-threshold-mb"),
        "cycle_time_ms": _valued("--cycle-time-ms"),
        "cache_capacity": _valued("--cache-capacity"),
        "hierarchical_allreduce": _switch("--hierarchical-allreduce"),
        "hierarchical_allgather": _switch("--hierarchical-allgather"),
        "torus_allreduce": _switch("--torus-allreduce"),
    },
    "autotune": {
        "enabled": _Key(true="--autotune"),
        "log_file": _Key("--autotune-log-file"),
        "warmup_samples": _Key("--autotune-warmup-samples"),
        "steps_per_sample": _Key("--autotune-steps-per-sample"),
        "bayes_opt_max_samples": _Key("--autotune-bayes-opt-max-samples"),
        "gaussian_process_noise": _Key("--autotune-gaussian-process-noise"),
    },
    "timeline": {"filename": _Key("--timeline-filename"), "mark_cycles": _Key(true="--timeline-mark-cycles")},
    "stall_check": {
        "enabled": _Key(true="--stall-check", false="--no-stall-check", unless=("stall_check", "no_stall_check")),
        "warning_time_seconds": _valued("--stall-check-warning-time-seconds"),
        "shutdown_time_seconds": _valued("--stall-check-shutdown-time-seconds"),
    },
    "library_options": {
        "mpi_threads_disable": _Key(true="--mpi-threads-disable"),
        "num_nccl_streams": _Key("--num-nccl-streams"),
        "thread_affinity": _Key("--thread-affinity"),
        "gloo_timeout_seconds": _Key("--gloo-timeout-seconds"),
    },
    "logging": {"level": _valued("--log-level"), "with_timestamp": _Key(true="--log-with-timestamp")},
}
_LAUNCHER = ("launcher",)


def config_words(path: str, given: Collection[str], spellings: Mapping[str, str]) -> list[str]:
    """The options that a file stands for, less those that the command line replaces.

    Args:
        path: of the file.
        given: destinations of the options on the command line.
        spellings: the destination of every option, for the section ``options``.

    Raises:
        JobError: the file cannot be read, or has a key or value that is not known; names it.
    """
    file = _File(path, given)
    words: list[str] = []
    for section, content in file.read().items():
        if section == "controller":
            words += file.controller(content)
        elif section == "options":
            words += file.options(content, spellings)
        else:
            keys = file.known(section, _SECTIONS, "section", also=("controller", "options"))
            for name, value in file.mapping(content, section).items():
                words += file.words(f"{section}: {name}", file.known(name, keys, f"key of {section}"), value)
    return words


class _File:
    def __init__(self, path: str, given: Collection[str]) -> None:
        self._path, self._given = path, given

    def read(self) -> Mapping[str, Any]:
        try:
            import yaml  # noqa: PLC0415 - only for this option
        except ImportError:
            raise JobError("--config-file needs PyYAML: pip install pyyaml") from None
        try:
            content = yaml.safe_load(Path(self._path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            reason = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
            raise self.error(f"cannot be read: {reason}") from None
        return self.mapping({} if content is None else content, "the file")

    def error(self, text: str) -> JobError:
        return JobError(f"--config-file {self._path}: {text}")

    def mapping(self, content: object, what: str) -> Mapping[str, Any]:
        if content is None:
            return {}
        if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
            raise self.error(f"{what} is no mapping of names to values")
        return content

    def known(self, name: str, names: Mapping[str, Any], what: str, also: Sequence[str] = ()) -> Any:
        if name in names:
            return names[name]
        similar = difflib.get_close_matches(name, [*names, *also], n=1)
        raise self.error(f"{name!r} is no {what}" + (f": did you mean {similar[0]!r}?" if similar else ""))

    def controller(self, value: object) -> list[str]:
        if value not in ("gloo", "mpi"):
            raise self.error(f"controller: {value!r} is neither 'gloo' nor 'mpi'")
        return [] if self._replaced(_LAUNCHER) else [f"--{value}"]

    def options(self, content: object, spellings: Mapping[str, str]) -> list[str]:
        words: list[str] = []
        for name, value in self.mapping(content, "options").items():
            option = f"--{name.replace('_', '-')}"
            destination = self.known(option, spellings, "option")
            words += self.words(f"options: {name}", _any_form(option, value, (destination,)), value)
        return words

    def words(self, where: str, key: _Key, value: object) -> list[str]:
        if self._replaced(key.unless) or value is None:
            return []
        if key.option:
            if isinstance(value, (bool, dict, list)):
                raise self.error(f"{where}: {value!r} is no value of {key.option}")
            return [f"{key.option}={value}"]
        if not isinstance(value, bool):
            raise self.error(f"{where}: {value!r} is neither true nor false")
        word = key.true if value else key.false
        return [word] if word else []

    def _replaced(self, destinations: Sequence[str]) -> bool:
        return any(each in self._given for each in destinations)


def _any_form(option: str, value: object, unless: tuple[str, ...]) -> _Key:
    return _Key(true=option, unless=unless) if isinstance(value, bool) else _Key(option, unless=unless)
