"""The environment: defaults, aliases, and bad values that are named."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horo.config.init_settings import InitSettings
from horo.config.table import (
    GROUPS,
    LOG_LEVELS,
    Config,
    LaunchVariables,
    TorchrunVariables,
    Variable,
    read_config,
    read_variables,
    variables_of,
)
from horo.errors import UsageError

ROOT = Path(__file__).resolve().parents[2]


def test_empty_environment_gives_the_defaults() -> None:
    config = read_config({})
    assert config == Config()
    assert config.fusion_threshold == 134217728
    assert config.cache_capacity == 4096
    assert (config.cycle_time_ms, config.spin_us, config.segment_bytes) == (0.0, 1000, None)
    assert (config.start_timeout_s, config.peer_timeout_s) == (60.0, 30.0)
    assert (config.stall_check_disable, config.stall_check_time_s, config.stall_shutdown_time_s) == (False, 60.0, 600.0)


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
        return ["1024-65535", "4000 - 4000"], [
            "4000",
            "4001-4000",
            "1023-2000",
            "2000-65536",
            "-",
            "a-b",
            "2-3-4",
            "+2000-3000",
        ]
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
def test_every_variable_takes_what_it_allows_and_refuses_the_rest(
    group: type[object], variable: Variable, name: str
) -> None:
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


def test_switches_read_the_usual_words() -> None:
    for word in ("1", "true", "YES", "on"):
        assert read_config({"HORO_STALL_CHECK_DISABLE": word}).stall_check_disable
    for word in ("0", "False", "no", "off"):
        assert not read_config({"HORO_STALL_CHECK_DISABLE": word}).stall_check_disable


def test_log_levels_are_those_of_the_core() -> None:
    for level in LOG_LEVELS:
        assert read_config({"HORO_LOG_LEVEL": level.upper()}).log_level == level
    assert read_config({"HOROVOD_LOG_LEVEL": "fatal"}).log_level_number == LOG_LEVELS.index("off")
    header = (ROOT / "native/include/horo.h").read_text(encoding="utf-8")
    for number, level in enumerate(LOG_LEVELS):
        assert f"HORO_LOG_{level.upper()} = {number}," in header


def test_launch_variables_read_both_families() -> None:
    launch = read_variables(LaunchVariables, {"HOROVOD_RANK": "3", "HORO_SIZE": "8", "HOROVOD_HOSTNAME": "h1"})
    assert (launch.rank, launch.size, launch.hostname, launch.store) == (3, 8, "h1", None)
    torch = read_variables(TorchrunVariables, {"RANK": "3", "MASTER_PORT": "29500", "HORO_RANK": "9"})
    assert (torch.rank, torch.master_port, torch.world_size) == (3, 29500, None)


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


def test_every_variable_is_described_once_and_belongs_to_one_group() -> None:
    names: list[str] = []
    for group in GROUPS:
        for variable in variables_of(group).values():
            assert variable.meaning.endswith(".")
            names += variable.names
    assert len(names) == len(set(names))
    assert all(each.default == getattr(Config(), name) for name, each in variables_of(Config).items())
    assert {item.name for item in fields(Config)} - variables_of(Config).keys() == {"sources"}


def test_reference_page_is_current() -> None:
    path = ROOT / "docs/reference/generate_environment.py"
    spec = importlib.util.spec_from_file_location("generate_environment", path)
    if spec is None or spec.loader is None:
        raise AssertionError(path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    hint = f"run python {path.relative_to(ROOT)}"
    assert module.PAGE.read_text(encoding="utf-8") == module.page(), hint
    assert module.OPTIONS_PAGE.read_text(encoding="utf-8") == module.options_page(), hint


def test_init_takes_each_setting_by_its_type() -> None:
    """What type checkers and editors know is the table."""
    wanted = {name: f"{row.kind.__name__} | None" for name, row in variables_of(Config).items() if row.is_argument}
    assert {name: kind.__forward_arg__ for name, kind in InitSettings.__annotations__.items()} == wanted


def test_the_longest_times_fit_the_milliseconds_of_the_core() -> None:
    """They are of type int32_t there."""
    for name in ("stall_check_time_s", "stall_shutdown_time_s", "peer_timeout_s"):
        assert variables_of(Config)[name].high * 1000 < 2**31
    assert read_config({"HORO_PEER_TIMEOUT": "1e6"}).peer_timeout_s == 1e6
