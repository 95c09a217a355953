"""One variable of the environment: its names, its kind and range, and the options of hororun that stand for it."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

from horo.errors import UsageError

__all__ = [
    "Option",
    "Variable",
    "check_settings",
    "exact_variable",
    "names_of",
    "parse_ports",
    "read_variables",
    "variable",
    "variables_of",
]

_Group = TypeVar("_Group")

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})
_PORT_FIRST, _PORT_LAST = 1024, 65535


@dataclass(frozen=True)
class Option:
    """An option of hororun that sets a variable for all ranks."""

    name: str
    """With its dashes."""
    meaning: str
    """For ``--help``."""
    metavar: str = ""
    """Stands for its value in texts; empty: it takes none, and sets the variable to ``value``."""
    value: str = ""
    scale: int = 1
    """The variable's number for each 1 of the option's, where their units differ."""
    unit: str = ""
    """The unit of the option's value, if it is not the variable's."""
    key: str = ""
    """Its place in Horovod's file, ``section: key``; empty: under ``options``, like every option."""
    stands_for: bool = True
    """The value of the key for which an option without a value stands."""
    is_shared: bool = False
    """hororun needs its value as well, and declares it among its own options."""

    @property
    def destination(self) -> str:
        """The name of its value among the options of hororun."""
        return self.name.strip("-").replace("-", "_")


@dataclass(frozen=True)
class Variable:
    """One variable of the environment."""

    names: tuple[str, ...]
    """The first that is set counts."""
    kind: type
    """int, float, bool, str or bytes (written in hexadecimal)."""
    default: Any
    meaning: str
    unit: str = ""
    low: float = -math.inf
    high: float = math.inf
    choices: tuple[str, ...] = ()
    multiple_of: int = 1
    secret: bool = False
    form: str = ""
    """The texts that it allows, as a phrase; empty: any."""
    check_form: Callable[[str], object] = str
    """Raises ValueError for a text of another form."""
    options: tuple[Option, ...] = ()
    is_argument: bool = True
    """Whether ``init()`` takes it; only settings are asked."""

    def allowed(self) -> str:
        """The allowed values, as a phrase."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        if self.kind is bool:
            return "0 or 1"
        if self.kind is str:
            return self.form or "a text"
        if self.kind is bytes:
            return f"hexadecimal digits for at least {self.low:g} bytes"
        phrase = "an integer" if self.kind is int else "a number"
        high = f" to {self.high:.15g}" if math.isfinite(self.high) else " up"
        phrase += f" from {self.low:.15g}{high}" + (f" {self.unit}" if self.unit else "")
        return phrase + (f", a multiple of {self.multiple_of}" if self.multiple_of > 1 else "")

    def allowed_argument(self) -> str:
        """The allowed values of an argument of ``init()``, as a phrase."""
        if self.choices:
            return "one of " + ", ".join(map(repr, self.choices))
        if self.kind is bool:
            return "True or False"
        if self.kind is str and not self.form:
            return "a string with a character other than spaces; None leaves it unset"
        return self.allowed()

    def set_name(self, environ: Mapping[str, str]) -> str:
        """The name whose value counts; empty: none of its names is set."""
        return next((name for name in self.names if environ.get(name, "").strip()), "")

    def read(self, environ: Mapping[str, str]) -> Any:
        """The value in ``environ``, or the default.

        Raises:
            UsageError: names the variable, its value (never a secret one) and the allowed values.
        """
        name = self.set_name(environ)
        if not name:
            return self.default
        text = environ[name].strip()
        try:
            return self.parse(text)
        except ValueError:
            shown = f" ({len(text)} characters)" if self.secret else f"={text!r}"
            raise UsageError(f"{name}{shown} is not {self.allowed()}") from None

    def parse(self, text: str) -> Any:
        """The value that a text stands for.

        Raises:
            ValueError: it is not what the variable allows.
        """
        value: Any
        if self.choices:
            value = text.lower()
            if value not in self.choices:
                raise ValueError(text)
            return value
        if self.kind is bool:
            if text.lower() not in _TRUE | _FALSE:
                raise ValueError(text)
            return text.lower() in _TRUE
        if self.kind is bytes:
            value = bytes.fromhex(text)
            if len(value) < self.low:
                raise ValueError(text)
            return value
        if self.kind is str:
            self.check_form(text)
            return text
        value = self.kind(text)
        if not self.low <= value <= self.high or (self.multiple_of > 1 and value % self.multiple_of):
            raise ValueError(text)
        return value

    def check(self, value: Any) -> Any:
        """A value of Python, as the variable would have it.

        Raises:
            ValueError: it is not what the variable allows.
        """
        if (isinstance(value, str) != (self.kind is str)) or (isinstance(value, bool) != (self.kind is bool)):
            raise ValueError(value)
        text = str(value).strip()
        if not text:
            raise ValueError(value)
        return self.parse(text)

    def of_option(self, option: Option) -> Variable:
        """The same in the unit of one of its options."""
        if option.scale == 1:
            return self
        return replace(
            self, low=math.ceil(self.low / option.scale), high=self.high // option.scale, unit=option.unit or self.unit
        )

    def text_of_option(self, option: Option, text: str) -> str:
        """The variable's text for a value of one of its options.

        Raises:
            ValueError: the value is not what the option allows.
        """
        value = self.of_option(option).parse(text)
        return f"{value * option.scale:.15g}" if isinstance(value, (int, float)) else str(value)


def variable(name: str, default: Any, meaning: str, *options: Option, **details: Any) -> Any:
    """A field for a variable of horo: ``HORO_name`` or, if that is not set, ``HOROVOD_name``."""
    kind = details.pop("kind", type(default))
    described = Variable((f"HORO_{name}", f"HOROVOD_{name}"), kind, default, meaning, options=options, **details)
    return field(default=default, metadata={"variable": described})


def exact_variable(name: str, kind: type, meaning: str, *options: Option, **details: Any) -> Any:
    """A field for a variable that has only this name: another program's, or one that Horovod does not have."""
    default = details.pop("default", None)
    described = Variable((name,), kind, default, meaning, options=options, **details)
    return field(default=default, repr=not described.secret, metadata={"variable": described})


def check_settings(variables: Mapping[str, Variable], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The settings among the arguments of ``init()``, by name, less those that are None: not given.

    Raises:
        UsageError: a value is not what its setting allows, or an argument is no setting.
    """
    settings = {name: variable for name, variable in variables.items() if variable.is_argument}
    checked = {}
    for name, value in arguments.items():
        if name not in settings:
            near = difflib.get_close_matches(name, settings, 1)
            raise UsageError(
                f"init({name}=...): there is no setting of this name"
                + (f": did you mean {near[0]}?" if near else "; after hvd.init(), print(hvd.config()) lists all")
            )
        if value is not None:
            try:
                checked[name] = settings[name].check(value)
            except ValueError:
                allowed = settings[name].allowed_argument()
                raise UsageError(f"init({name}={value!r}): {value!r} is not {allowed}") from None
    return checked


def parse_ports(text: str) -> range:
    """The ports of ``"40000-40100"``, the last one included.

    Raises:
        ValueError: it is no range of ports that every process may use.
    """
    found = re.fullmatch(r"([0-9]{1,5}) ?- ?([0-9]{1,5})", text)
    if found is None or not _PORT_FIRST <= int(found[1]) <= int(found[2]) <= _PORT_LAST:
        raise ValueError(text)
    return range(int(found[1]), int(found[2]) + 1)


def variables_of(group: type[Any]) -> dict[str, Variable]:
    """The variables of a group of settings, by field name."""
    return {item.name: item.metadata["variable"] for item in fields(group) if "variable" in item.metadata}


def names_of(*groups: type[Any]) -> frozenset[str]:
    """All names under which the variables of some groups may be set."""
    return frozenset(name for group in groups for each in variables_of(group).values() for name in each.names)


def read_variables(group: type[_Group], environ: Mapping[str, str]) -> _Group:
    """Reads a group of settings from ``environ``.

    Raises:
        UsageError: a value is not what its variable allows.
    """
    return group(**{name: variable.read(environ) for name, variable in variables_of(group).items()})
