"""What all configurations share: options are read by name and checked when they are given."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral, Real
from types import UnionType
from typing import Any, ClassVar, TypeVar, Union, get_args, get_origin, get_type_hints

from .errors import ConfigError, did_you_mean

OptionsT = TypeVar("OptionsT", bound="Options")


@dataclass(frozen=True)
class Options:
    """A configuration, a frozen dataclass; types are checked here, ranges by a subclass's `__post_init__`.

    Attributes:
        advice: By the name of an option that other libraries have: what to do here instead.
    """

    advice: ClassVar[Mapping[str, str]] = {}

    def __post_init__(self) -> None:
        """Check the types."""
        hints = get_type_hints(type(self))
        for field in fields(self):
            value, hint = getattr(self, field.name), hints[field.name]
            allowed = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
            if not any(_fits(value, kind) for kind in allowed):
                raise ConfigError(f"{field.name}={value!r} is no {_named(allowed)}. Pass one.")

    @classmethod
    def from_dict(cls: type[OptionsT], options: Mapping[str, Any] | Options) -> OptionsT:
        """Read options by name; a configuration that is one already is taken as it is.

        Raises:
            ConfigError: An option is unknown or out of range, or `options` is something else.
        """
        if isinstance(options, cls):
            return options
        if not isinstance(options, Mapping):
            raise ConfigError(f"expected {cls.__name__} or a dictionary of its options, received {options!r}.")
        known = {field.name for field in fields(cls) if field.init}
        for key in options:
            if key not in known:
                raise ConfigError(f"Unknown option {key!r} of {cls.__name__}. {cls._hint(key, known)}")
        return cls(**options)

    def given(self) -> dict[str, Any]:
        """The options by name, as `from_dict` takes them."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.init}

    @classmethod
    def _hint(cls, key: str, known: Collection[str]) -> str:
        return cls.advice[key] if key in cls.advice else did_you_mean(key, known)

    def _require_at_least(self, least: int, *names: str) -> None:
        for name in names:
            if getattr(self, name) < least:
                raise ConfigError(f"{name}={getattr(self, name)} is too small. Pass at least {least}.")

    def _require_positive(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"{name}={value} is not positive.")

    def _require_finite(self, *names: str) -> None:
        for name in names:
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name}={getattr(self, name)} is negative or infinite.")

    def _require_fraction(self, *names: str) -> None:
        for name in names:
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name}={getattr(self, name)} is outside [0, 1].")

    def _require_one_of(self, allowed: Sequence[str], name: str) -> None:
        if getattr(self, name) not in allowed:
            raise ConfigError(f"{name}={getattr(self, name)!r}. {did_you_mean(str(getattr(self, name)), allowed)}")


def _fits(value: object, kind: Any) -> bool:
    """Whether a value is of an annotated type; NaN is no number, and whole numbers count as numbers."""
    if kind in (int, float):
        is_number = isinstance(value, Integral if kind is int else Real) and not isinstance(value, bool)
        return is_number and not math.isnan(value)  # type: ignore[arg-type]
    if choices := get_args(kind):
        return isinstance(value, str) and all(isinstance(choice, str) for choice in choices)
    return isinstance(value, kind)


def _named(kinds: Sequence[Any]) -> str:
    """The types as an error says them."""
    names = {int: "whole number", float: "number", bool: "True or False", str: "string", type(None): "None"}
    return " or ".join(names.get(kind, "string") for kind in kinds)
