"""Settings: the environment and its bad values, arguments, options and files, which of them counts."""

import math
import runpy
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jobs import run_python

from horo.bootstrap.tuned_values import tuned_settings
from horo.config.init_settings import InitSettings
from horo.config.settings import settings_of
from horo.config.sources import encode_sources
from horo.config.table import (
    GROUPS,
    LOG_LEVELS,
    Config,
    LaunchVariables,
    Variable,
    read_config,
    read_variables,
    variables_of,
)
from horo.core.setup import KNOBS
from horo.errors import NotInitializedError, UsageError

ROOT = Path(__file__).resolve().parents[2]


def test_horovod_names_are_accepted_and_horo_names_win() -> None:
    assert read_config({"HOROVOD_FUSION_THRESHOLD": "0"}).fusion_threshold == 0
    both = {"HOROVOD_CYCLE_TIME": "5", "HORO_CYCLE_TIME": "2.5"}
    assert read_config(both).cycle_time_ms == 2.5
    assert read_config({"HORO_CYCLE_TIME": " ", "HOROVOD_CYCLE_TIME": "5"}).cycle_time_ms == 5


EVERY = [(group, variable) for group in GROUPS for variable in variables_of(group).values()]


def edges(variable: Variable) -> tuple[list[str], list[str]]:
    """Values just inside of what the variable allows, and values outside."""
    if variable.choices:
        return list(variable.choices), ["nonsense", "0"]
    if variable.kind is bool:
        return ["0", "1"], ["2", "-1", "maybe"]
    if variable.kind is bytes:
        return ["ab" * int(variable.low)], ["ab" * int(variable.low - 1), "xy" * int(variable.low)]
    if variable.form:
        wrong = "4000 4001-4000 1023-2000 2000-65536 - a-b 2-3-4 +2000-3000"
        return ["1024-65535", "4000 - 4000"], wrong.split()
    if variable.kind is str:
        return ["any text"], []
    step = variable.multiple_of
    inside = [f"{edge:.15g}" for edge in (variable.low, variable.high) if math.isfinite(edge)]
    outside = ["x", "1 2", f"{variable.low - step:.15g}"]
    outside += [f"{variable.high + step:.15g}"] if math.isfinite(variable.high) else []
    outside += [f"{variable.low + 1:.15g}"] if step > 1 else []
    outside += ["1.5"] if variable.kind is int else ["nan", "inf"]
    return inside, outside


@pytest.mark.parametrize(
    ("group", "variable", "name"),
    [pytest.param(group, variable, name, id=name) for group, variable in EVERY for name in variable.names],
)
def test_variables_take_what_they_allow_and_refuse_the_rest(group: type[object], variable: Variable, name: str) -> None:
    field = next(key for key, each in variables_of(group).items() if each is variable)
    inside, outside = edges(variable)
    for text in inside:
        value = getattr(read_variables(group, {name: text}), field)
        assert value is not None
        assert isinstance(value, variable.kind)
    for text in outside:
        with pytest.raises(UsageError) as caught:
            read_variables(group, {name: text})
        shown = f"{name} ({len(text)} characters)" if variable.secret else f"{name}={text!r}"
        assert str(caught.value) == f"{shown} is not {variable.allowed()}"


def test_a_range_of_ports_has_its_last_one() -> None:
    assert read_config({}).ports is None
    assert read_config({"HORO_PORT_RANGE": "40000-40002"}).ports == range(40000, 40003)
    assert read_config({}, {"port_range": "4000-4000"}).ports == range(4000, 4001)
    with pytest.raises(UsageError, match=r"init\(port_range='4000'\): '4000' is not a range of ports as 40000-40100"):
        read_config({}, {"port_range": "4000"})


def test_secret_never_appears_in_messages() -> None:
    for secret in ("abcdefg" * 8, "abcd"):
        with pytest.raises(UsageError) as caught:
            read_variables(LaunchVariables, {"HORO_SECRET": secret})
        assert secret not in str(caught.value)
        assert "hexadecimal digits for at least 16 bytes" in str(caught.value)
    launch = read_variables(LaunchVariables, {"HORO_SECRET": "ab" * 32})
    assert launch.secret == b"\xab" * 32
    assert "ab" * 8 not in repr(launch)
    assert repr(launch.secret) not in repr(launch)


def test_switches_read_the_usual_words_and_log_levels_are_those_of_the_core() -> None:
    for word in ("1", "true", "YES", "on"):
        assert read_config({"HORO_STALL_CHECK_DISABLE": word}).stall_check_disable
    for word in ("0", "False", "no", "off"):
        assert not read_config({"HORO_STALL_CHECK_DISABLE": word}).stall_check_disable
    for level in LOG_LEVELS:
        assert read_config({"HORO_LOG_LEVEL": level.upper()}).log_level == level
    assert read_config({"HOROVOD_LOG_LEVEL": "fatal"}).log_level_number == LOG_LEVELS.index("off")
    header = (ROOT / "native/include/horo.h").read_text(encoding="utf-8")
    for number, level in enumerate(LOG_LEVELS):
        assert f"HORO_LOG_{level.upper()} = {number}," in header


@given(st.sampled_from(sorted(name for v in variables_of(Config).values() for name in v.names)), st.text(max_size=20))
def test_any_text_is_a_value_in_range_or_a_usage_error(name: str, text: str) -> None:
    try:
        config = read_config({name: text})
    except UsageError as error:
        assert name in str(error)
        return
    for key, variable in variables_of(Config).items():
        value = getattr(config, key)
        if variable.kind in {int, float} and value is not None:
            assert variable.low <= value <= variable.high


def test_every_variable_is_described_once_and_the_reference_page_is_current() -> None:
    names: list[str] = []
    for group in GROUPS:
        for variable in variables_of(group).values():
            assert variable.meaning.endswith(".")
            names += variable.names
    assert len(names) == len(set(names))
    assert read_config({}) == Config()
    assert all(each.default == getattr(Config(), name) for name, each in variables_of(Config).items())
    assert {item.name for item in fields(Config)} - variables_of(Config).keys() == {"sources"}
    path = ROOT / "docs/reference/generate_environment.py"
    module = runpy.run_path(str(path))
    hint = f"run python {path.relative_to(ROOT)}"
    for name, text in (("PAGE", module["page"]), ("OPTIONS_PAGE", module["options_page"])):
        assert module[name].read_text(encoding="utf-8") == text(), hint


def test_init_takes_each_setting_by_its_type() -> None:
    """What type checkers and editors know is the table."""
    wanted = {name: f"{row.kind.__name__} | None" for name, row in variables_of(Config).items() if row.is_argument}
    assert {name: kind.__forward_arg__ for name, kind in InitSettings.__annotations__.items()} == wanted


def test_the_longest_times_fit_the_milliseconds_of_the_core() -> None:
    """They are of type int32_t there."""
    for name in ("stall_check_time_s", "stall_shutdown_time_s", "peer_timeout_s"):
        assert variables_of(Config)[name].high * 1000 < 2**31
    assert read_config({"HORO_PEER_TIMEOUT": "1e6"}).peer_timeout_s == 1e6


hvd = pytest.importorskip("horo.torch")

SETTINGS = variables_of(Config)
SHARE_NO_VALUE = {"controller", "host_id"}
"""Settings without an option: hororun's launcher decides the first, the second differs from rank to rank."""


def test_every_setting_is_an_argument_and_an_option_or_known_not_to_be() -> None:
    assert {name for name, each in SETTINGS.items() if not each.is_argument} == {"horovod"}
    assert {name for name, each in SETTINGS.items() if not each.options} == SHARE_NO_VALUE
    for name, each in SETTINGS.items():
        for option in each.options:
            assert bool(option.metavar) != bool(option.value), name


def test_an_argument_comes_before_a_variable() -> None:
    environ = {"HORO_CYCLE_TIME": "2", "HOROVOD_CACHE_CAPACITY": "9"}
    config = read_config(environ, {"cycle_time_ms": 1, "log_level": "INFO", "host_id": None})
    assert (config.cycle_time_ms, config.cache_capacity, config.log_level, config.host_id) == (1.0, 9, "info", None)
    assert read_config({"HORO_CYCLE_TIME": "soon"}, {"cycle_time_ms": 1}).cycle_time_ms == 1.0


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"cycle_time_ms": -1}, "init(cycle_time_ms=-1): -1 is not a number from 0 to 1000 ms"),
    ({"cache_capacity": 1.5}, "init(cache_capacity=1.5): 1.5 is not an integer from 0 to 1048576"),
    ({"cache_capacity": "9"}, "init(cache_capacity='9'): '9' is not an integer from 0"),
    ({"cache_capacity": True}, "init(cache_capacity=True): True is not an integer from 0"),
    ({"stall_check_disable": 1}, "init(stall_check_disable=1): 1 is not True or False"),
    ({"overlap": "maybe"}, "init(overlap='maybe'): 'maybe' is not one of 'auto', 'always', 'never'"),
    ({"host_id": ""}, "init(host_id=''): '' is not a string with a character other than spaces; None leaves it unset"),
    ({"host_id": 3}, "init(host_id=3): 3 is not a string with a character"),
    ({"overlap": ["auto"]}, "init(overlap=['auto']): ['auto'] is not one of 'auto', 'always', 'never'"),
    ({"cycle_tim_ms": 1}, "init(cycle_tim_ms=...): there is no setting of this name: did you mean cycle_time_ms?"),
    ({"horovod": True}, "init(horovod=...): there is no setting of this name"),
    ({"rank": 0}, "init(rank=...): there is no setting of this name; after hvd.init(), print(hvd.config()) lists all"),
]


@pytest.mark.parametrize(("arguments", "sentence"), WRONG, ids=[sentence[:40] for _, sentence in WRONG])
def test_a_wrong_argument_is_refused_with_name_value_and_range(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError) as caught:
        hvd.init(**arguments)
    assert str(caught.value).startswith(sentence)
    assert not hvd.is_initialized()


def test_config_says_what_is_in_force_and_where_it_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotInitializedError):
        hvd.config()
    monkeypatch.setenv("HOROVOD_CACHE_CAPACITY", "9")
    hvd.init(cycle_time_ms=1, stall_check_disable=False)
    try:
        settings = hvd.config()
        assert list(settings) == list(SETTINGS)
        assert (settings["cycle_time_ms"], settings.source("cycle_time_ms")) == (1.0, "init()")
        assert (settings["cache_capacity"], settings.source("cache_capacity")) == (9, "HOROVOD_CACHE_CAPACITY")
        assert (settings["fusion_threshold"], settings.source("fusion_threshold")) == (128 << 20, "default")
        assert settings["segment_bytes"] == 256 << 10  # what horo has chosen
        assert settings["gradients_ready"] == "backward"
        lines = {line.split()[0]: line.split()[1:] for line in str(settings).splitlines()}
        assert lines["cycle_time_ms"] == ["1.0", "ms", "init()"]
        assert lines["cache_capacity"] == ["9", "HOROVOD_CACHE_CAPACITY"]
        assert lines.keys() == SETTINGS.keys()
        with pytest.raises(KeyError):
            settings.source("nothing")
        hvd.init(cycle_time_ms=1.0)  # no change
        with pytest.raises(UsageError, match=r"init\(cycle_time_ms=2\): horo is initialized already"):
            hvd.init(cycle_time_ms=2)
    finally:
        hvd.shutdown()


def test_a_second_init_reads_its_arguments_as_the_first_does() -> None:
    arguments = {"overlap": "ALWAYS", "host_id": " a ", "cycle_time_ms": 1, "log_level": "Error", "timeline": None}
    hvd.init(**arguments)
    try:
        hvd.init(**arguments)  # a cell of a notebook that runs again
        hvd.init(overlap="always", host_id="a")
        for wrong, sentence in WRONG:
            with pytest.raises(UsageError) as caught:
                hvd.init(**wrong)
            assert str(caught.value).startswith(sentence)
        with pytest.raises(UsageError, match=r"init\(overlap='NEVER'\): horo is initialized already"):
            hvd.init(overlap="NEVER")
    finally:
        hvd.shutdown()


def test_what_hororun_has_set_is_said_to_be_from_there() -> None:
    variables = {"HORO_CYCLE_TIME": "2", "HORO_SPIN_US": "7", "OTHER": "x"}
    sources = {"HORO_CYCLE_TIME": "hororun --cycle-time-ms", "HORO_SPIN_US": "file job.yaml"}
    environ = {**variables, **encode_sources(variables, sources)}
    settings = settings_of(read_config(environ))
    assert settings.source("cycle_time_ms") == "hororun --cycle-time-ms"
    assert settings.source("spin_us") == "file job.yaml"
    changed = {**environ, "HORO_SPIN_US": "8"}  # by the script
    assert settings_of(read_config(changed)).source("spin_us") == "HORO_SPIN_US"
    assert settings_of(read_config(environ, {"spin_us": 7})).source("spin_us") == "init()"
    assert encode_sources(variables, {}) == {}


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"HORO_SPIN_US": 3}', '{"HORO_SPIN_US": ["7"]}', "null"])
def test_a_list_of_sources_that_is_none_is_ignored(text: str) -> None:
    environ = {"HORO_SPIN_US": "7", "HORO_CONFIG_SOURCES": text}
    assert settings_of(read_config(environ)).source("spin_us") == "HORO_SPIN_US"


def tuned_context(values: dict[str, int]) -> Any:
    """It has what autotuning has come to."""
    return Mock(tuning=lambda: ({**dict.fromkeys(KNOBS, 1), **values}, False))


def test_what_autotuning_has_changed_is_shown_in_the_unit_of_the_setting() -> None:
    start = {"segment": 1 << 20, "sockets": 1, "fusion": 1 << 27, "cycle": 2500, "overlap": 2}
    assert tuned_settings(tuned_context(start), start) == {}
    changed = {"segment": 4096, "sockets": 3, "fusion": 0, "cycle": 1250, "overlap": 1, "piece": 8192}
    expected = {"segment_bytes": 4096, "sockets_per_peer": 3, "fusion_threshold": 0, "cycle_time_ms": 1.25}
    expected |= {"overlap": "never"}
    assert tuned_settings(tuned_context(changed), start) == expected
    settings = settings_of(read_config({"HORO_OVERLAP": "always", "HORO_SPIN_US": "7"})).tuned(expected)
    assert {name: settings[name] for name in expected} == expected
    assert {settings.source(name) for name in expected} == {"autotune"}
    assert (settings["spin_us"], settings.source("spin_us")) == (7, "HORO_SPIN_US")
    assert settings_of(read_config({})).tuned({}).source("overlap") == "default"


AT_INIT = """
import os
os.environ["HORO_CYCLE_TIME"] = "nonsense"
import horo.torch as hvd
os.environ["HORO_CYCLE_TIME"] = "2"
hvd.init()
os.environ["HORO_CYCLE_TIME"] = "3"
first = hvd.config()["cycle_time_ms"]
hvd.shutdown()
os.environ["HOROVOD_CACHE_CAPACITY"] = "9"
hvd.init()
print(first, hvd.config()["cycle_time_ms"], hvd.config()["cache_capacity"])
"""


def test_the_environment_is_read_by_init_and_not_by_import() -> None:
    done = run_python("-c", AT_INIT)
    assert (done.stdout, done.stderr) == ("2.0 3.0 9\n", "")


def test_a_message_names_a_setting_as_it_was_set() -> None:
    environ = {"HOROVOD_CONTROLLER": "mpi", "HORO_NETWORK_INTERFACES": "nope0"}
    assert read_config(environ).told("controller") == "HOROVOD_CONTROLLER=mpi"
    assert read_config(environ).told("network_interfaces") == "HORO_NETWORK_INTERFACES='nope0'"
    assert read_config(environ, {"controller": "GLOO"}).told("controller") == "init(controller='gloo')"
    told = {**environ, **encode_sources(environ, {"HORO_NETWORK_INTERFACES": "hororun --network-interfaces"})}
    assert (
        read_config(told).told("network_interfaces") == "HORO_NETWORK_INTERFACES='nope0' (hororun --network-interfaces)"
    )
    assert read_config({}).told("controller") == Config().told("controller") == "HORO_CONTROLLER=auto"
    assert read_config({"HOROVOD_AUTOTUNE": "yes"}).told("autotune") == "HOROVOD_AUTOTUNE=1"
