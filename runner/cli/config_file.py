"""``--config-file``: a YAML file in Horovod's form, as options of hororun."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from horo.config.table import Config, Option, variables_of
from horo.runner.cli.combinations import excluded_by
from horo.runner.config import JobError

__all__ = ["SECTIONS", "config_words"]


class _Key(NamedTuple):
    """The meaning of a key.

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


def _switch(option: str) -> _Key:
    return _Key(true=option, false=option.replace("--", "--no-", 1), unless=("refused",))


_REFUSED: dict[str, dict[str, _Key]] = {
    "params": {
        "hierarchical_allreduce": _switch("--hierarchical-allreduce"),
        "hierarchical_allgather": _switch("--hierarchical-allgather"),
        "torus_allreduce": _switch("--torus-allreduce"),
    },
    "autotune": {"gaussian_process_noise": _Key("--autotune-gaussian-process-noise")},
    "library_options": {
        "mpi_threads_disable": _Key(true="--mpi-threads-disable"),
        "num_nccl_streams": _Key("--num-nccl-streams"),
        "thread_affinity": _Key("--thread-affinity"),
        "gloo_timeout_seconds": _Key("--gloo-timeout-seconds"),
    },
    "logging": {"with_timestamp": _Key(true="--log-with-timestamp")},
}
"""Keys of Horovod that stand for options that horo refuses, each with its reason."""


def _sections() -> dict[str, dict[str, _Key]]:
    """Horovod's keys by section: those of the table of settings, and the refused ones."""
    sections: dict[str, dict[str, _Key]] = {}
    for variable in variables_of(Config).values():
        for option in variable.options:
            if option.key:
                section, key = option.key.split(": ")
                keys = sections.setdefault(section, {})
                keys[key] = _with(keys.get(key, _Key()), option)
    for section, refused in _REFUSED.items():
        sections.setdefault(section, {}).update(refused)
    return sections


def _with(key: _Key, option: Option) -> _Key:
    """The key, which stands for this option, too."""
    key = key._replace(unless=(*key.unless, option.destination))
    if option.metavar:
        return key._replace(option=option.name)
    return key._replace(true=option.name) if option.stands_for else key._replace(false=option.name)


SECTIONS = _sections()
_LAUNCHER = ("launcher",)
_INSTEAD = {"hosts": "hostfile", "hostfile": "hosts"}
"""Options that stand in for each other."""


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
            keys = file.known(section, SECTIONS, "section", also=("controller", "options"))
            for name, value in file.mapping(content, section).items():
                words += file.words(f"{section}: {name}", file.known(name, keys, f"key of {section}"), value)
    if "--no-stall-check" in words:  # Horovod's files keep the times beside "enabled: false"
        words = [word for word in words if not word.startswith("--stall-check-")]
    return words


class _File:
    def __init__(self, path: str, given: Collection[str]) -> None:
        self._path, self._given = path, given
        self._others = _INSTEAD | excluded_by(given)
        """By destination, that of an option on the command line that makes a key useless."""

    def read(self) -> Mapping[str, Any]:
        try:
            import yaml  # noqa: PLC0415 - only for this option
        except ImportError:
            raise JobError("--config-file needs PyYAML: pip install pyyaml") from None
        try:
            text = Path(self._path).read_text(encoding="utf-8")
            repeated = _repeated_key(yaml.compose(text, Loader=yaml.SafeLoader))
            content = yaml.safe_load(text)
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            reason = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
            raise self.error(f"cannot be read: {reason}") from None
        if repeated:
            raise self.error(repeated)
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
        seen: set[str] = set()
        for name, value in self.mapping(content, "options").items():
            option = f"--{name.replace('_', '-')}"
            if option in seen:
                raise self.error(f"options: {name}: {option!r} is there twice")
            seen.add(option)
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
        return any(each in self._given or self._others.get(each) in self._given for each in destinations)


def _repeated_key(root: Any) -> str:
    """A sentence about a key that a mapping of a YAML document has twice, of which YAML would drop one; empty: none."""
    nodes, known = [root], {id(root)}
    while nodes:
        node = nodes.pop()
        if node is None or isinstance(node.value, str):
            continue
        lines: dict[tuple[str, str], int] = {}
        for item in node.value:
            key, value = item if isinstance(item, tuple) else (None, item)
            if key is not None and isinstance(key.value, str):
                line = key.start_mark.line + 1
                if (key.tag, key.value) in lines:
                    first = lines[key.tag, key.value]
                    return f"line {line}: {key.value!r} is there twice, first in line {first}"
                lines[key.tag, key.value] = line
            if id(value) not in known:  # an alias may lead back
                known.add(id(value))
                nodes.append(value)
    return ""


def _any_form(option: str, value: object, unless: tuple[str, ...]) -> _Key:
    return _Key(true=option, unless=unless) if isinstance(value, bool) else _Key(option, unless=unless)
