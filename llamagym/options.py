"""What all configurations share: options are read by name and checked when they are given."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeVar

from .errors import ConfigError, did_you_mean

OptionsT = TypeVar("OptionsT", bound="Options")


@dataclass(frozen=True)
class Options:
    """A configuration, a frozen dataclass; a subclass checks its ranges in `__post_init__`.

    Attributes:
        advice: By the name of an option that other libraries have: what to do here instead.
    """

    advice: ClassVar[Mapping[str, str]] = {}

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

    @classmethod
    def _hint(cls, key: str, known: Collection[str]) -> str:
        return cls.advice[key] if key in cls.advice else did_you_mean(key, known)

    def _require_at_least(self, least: int, *names: str) -> None:
        for name in names:
            if getattr(self, name) < least:
                raise ConfigError(f"{name}={getattr(self, name)} is too small. Pass at least {least}.")

    def _require_positive(self, *names: str) -> None:
        for name in names:
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name}={getattr(self, name)} is not positive.")

    def _require_fraction(self, *names: str) -> None:
        for name in names:
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name}={getattr(self, name)} is outside [0, 1].")

    def _require_one_of(self, allowed: Sequence[str], name: str) -> None:
        if getattr(self, name) not in allowed:
            raise ConfigError(f"{name}={getattr(self, name)!r}. {did_you_mean(str(getattr(self, name)), allowed)}")
