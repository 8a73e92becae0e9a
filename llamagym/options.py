"""What all configurations share: options are read by name and checked when they are given."""

from __future__ import annotations

import functools
import inspect
import logging
import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from numbers import Integral, Real
from pathlib import Path
from types import UnionType
from typing import (
    Any,
    ClassVar,
    Literal,
    ParamSpec,
    SupportsFloat,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import numpy as np

from .errors import ConfigError, did_you_mean, excerpt

logger = logging.getLogger(__name__)

OptionsT = TypeVar("OptionsT", bound="Options")
Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")
# Whole numbers are counted in 64 bits, all others end up in float32.
_LARGEST_WHOLE, _LARGEST_NUMBER = 2**63 - 1, 3.4e38
_LARGEST_RATE = 3.4e37
# NumPy's kinds of types whose values are real numbers.
_NUMBER_KINDS = "biuf"


class _OptionsMeta(type):
    """Accepts old names of options in the constructors of configurations, which dataclasses generate."""

    def __call__(cls, *args: Any, **options: Any) -> Any:
        """Creates a configuration."""
        config_class: Any = cls
        return super().__call__(*args, **config_class.with_current_names(options))

    @property
    def __signature__(cls) -> inspect.Signature:
        """The signature of the dataclass's constructor, which `inspect` would miss."""
        config_class: Any = cls
        return inspect.Signature(list(inspect.signature(config_class.__init__).parameters.values())[1:])


@dataclass(frozen=True)
class Options(metaclass=_OptionsMeta):
    """A configuration, a frozen dataclass; types are checked here, ranges by a subclass's `__post_init__`.

    Attributes:
        advice: By the name of an option that other libraries have: what to do here instead.
    """

    advice: ClassVar[Mapping[str, str]] = {}
    # Current names of options by their old names, which are accepted with a logged hint.
    renamed: ClassVar[Mapping[str, str]] = {}

    def __new__(cls: type[OptionsT], *_: Any, **options: Any) -> OptionsT:
        """Check names, which a dataclass would reject by a TypeError without advice."""
        cls._check_names(options)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        """Check types, and that numbers are not too large to compute with; all become Python's own."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        _check_types(get_type_hints(type(self)), values)
        for name, value in values.items():
            if isinstance(value, Real) and not isinstance(value, bool):
                plain = int(value) if isinstance(value, Integral) else float(value)
                largest = _LARGEST_WHOLE if isinstance(value, Integral) else _LARGEST_NUMBER
                if largest < abs(plain) < math.inf:
                    raise ConfigError(f"{name}={excerpt(value)} is too large. Pass a number up to {largest:.1e}.")
                # NumPy's numbers are not taken everywhere, and not saved.
                object.__setattr__(self, name, plain)
        as_seed(values.get("seed"))

    @classmethod
    def from_dict(cls: type[OptionsT], options: Mapping[str, Any] | Options) -> OptionsT:
        """Read options by name; a configuration that is one already is taken as it is.

        Raises:
            ConfigError: An option is unknown or out of range, or `options` is something else.
        """
        if isinstance(options, cls):
            return options
        if not isinstance(options, Mapping):
            raise ConfigError(f"expected {cls.__name__} or a dictionary of its options, received {excerpt(options)}.")
        options = cls.with_current_names(options)
        cls._check_names(options)
        return cls(**options)

    @classmethod
    def with_current_names(cls, options: Mapping[Any, Any]) -> dict[Any, Any]:
        """Returns options with old names replaced.

        Raises:
            ConfigError: An option is passed by both its names.
        """
        current = dict(options)
        for old, new in cls.renamed.items():
            if old not in current:
                continue
            if new in current:
                raise ConfigError(f"{cls.__name__} received {new} and also {old}, its old name. Pass {new} alone.")
            logger.warning("%s: the option %s is now called %s.", cls.__name__, old, new)
            current[new] = current.pop(old)
        return current

    @classmethod
    def _check_names(cls, options: Mapping[Any, Any]) -> None:
        """Rejects options that the configuration does not have.

        Raises:
            ConfigError: There is one.
        """
        known = {field.name for field in fields(cls) if field.init}
        for key in options:
            if key not in known:
                raise ConfigError(f"Unknown option {excerpt(key)} of {cls.__name__}. {cls._hint(str(key), known)}")

    def given(self) -> dict[str, Any]:
        """The options by name, as `from_dict` takes them."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.init}

    @classmethod
    def _hint(cls, key: str, known: Collection[str]) -> str:
        return cls.advice[key] if key in cls.advice else did_you_mean(key, known)

    def _require_at_least(self, least: int, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name}={value} is too small. Pass at least {least}.")

    def _require_positive(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"{name}={value} is not positive.")

    def _require_finite(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise ConfigError(f"{name}={value} is negative or infinite.")

    def _require_rate(self, *names: str) -> None:
        self._require_finite(*names)
        for name in names:
            if (getattr(self, name) or 0.0) > _LARGEST_RATE:
                raise ConfigError(
                    f"{name}={getattr(self, name)} is more than {_LARGEST_RATE:.1e}: Adam's first step is up to ten "
                    "times that, which float32 cannot hold. Rates from 1e-5 to 1e-2 are usual."
                )

    def _require_fraction(self, *names: str) -> None:
        for name in names:
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name}={getattr(self, name)} is outside [0, 1].")

    def _require_one_of(self, allowed: Sequence[str], name: str) -> None:
        if getattr(self, name) not in allowed:
            raise ConfigError(
                f"{name}={excerpt(getattr(self, name))}. {did_you_mean(str(getattr(self, name)), allowed)}"
            )


def explains_wrong_calls(
    positional: int, removed: Mapping[str, str] | None = None
) -> Callable[[Callable[Parameters, Returned]], Callable[Parameters, Returned]]:
    """Decorates a function whose wrong calls are a `ConfigError` that says what to write instead of a `TypeError`.

    Args:
        positional: Number of arguments that may be passed by position.
        removed: Arguments of earlier versions by name, with what to do instead.
    """

    def decorate(function: Callable[Parameters, Returned]) -> Callable[Parameters, Returned]:
        parameters = [each for each in inspect.signature(function).parameters.values() if each.name != "self"]
        names = [each.name for each in parameters]
        keywords = [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]
        by_position = [name for name in names if name not in keywords]
        title = function.__qualname__.removesuffix(".__init__")

        @functools.wraps(function)
        def checked(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Returned:
            extra = args[positional:]
            if extra:
                pairs = ", ".join(f"{name}={excerpt(value)}" for name, value in zip(keywords, extra, strict=False))
                raise ConfigError(
                    f"{title}() takes {' and '.join(by_position)} by position, got {len(extra)} more arguments. Pass "
                    f"the others by keyword: {pairs}."
                )
            for name in kwargs:
                if name not in names:
                    hint = (removed or {}).get(name) or did_you_mean(name, names)
                    raise ConfigError(f"{title}() has no argument {name!r}. {hint}")
            return function(*args, **kwargs)

        return checked

    return decorate


def check_arguments(function: Callable[..., Any], given: Mapping[str, Any], **names: Any) -> None:
    """Rejects arguments of other types than the function's annotations say.

    Args:
        function: Whose annotations count.
        given: Its arguments by name, as `locals()` has them at its beginning.
        **names: What names in the annotations mean that the function's module does not import at run time.

    Raises:
        ConfigError: One is of another type.
    """
    _check_types(get_type_hints(function, localns=names), given)


def require_positive(**counts: int | None) -> None:
    """Rejects counts below 1; None is no count.

    Raises:
        ConfigError: One is below 1.
    """
    for name, count in counts.items():
        if count is not None and count < 1:
            raise ConfigError(f"{name}={count!r}. Pass a whole number of at least 1.")


def require_text(**texts: str | Path | None) -> None:
    """Rejects empty names and paths; None is not one.

    Raises:
        ConfigError: One is empty.
    """
    for name, text in texts.items():
        if text is not None and not str(text):
            raise ConfigError(f"{name} must not be empty, got {text!r}.")


def as_seed(seed: int | None) -> int | None:
    """A seed that every generator of random numbers takes, as Python's own number.

    Raises:
        ConfigError: It is negative or has more than 63 bits.
    """
    if seed is None or 0 <= seed < 2**63:
        return None if seed is None else int(seed)
    raise ConfigError(f"seed={excerpt(seed)} is out of range. Pass a whole number from 0 to 2**63 - 1.")


def user_path(path: str | os.PathLike[str], name: str = "path") -> Path:
    """The absolute path of a file or folder that a user passed, with `~` expanded.

    Args:
        path: The path.
        name: Name of the argument, for errors.

    Raises:
        ConfigError: It is empty, not a path, too long, or names the home of an unknown user.
    """
    text: Any = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
    if not isinstance(text, str):
        raise ConfigError(
            f"{name} must be a path, got {excerpt(path)} ({type(path).__name__}). Pass a str or pathlib.Path."
        )
    if not text:
        raise ConfigError(f"{name}='' is not a folder and cannot be created: it is empty. Pass the path of a folder.")
    if "\0" in text:
        raise ConfigError(f"{name}={excerpt(text)} contains a NUL byte, which no path can. Pass another path.")
    try:
        os.fsencode(text)
        expanded = Path(os.path.abspath(Path(text).expanduser()))
        # Other errors depend on what the path is used for.
        with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            os.lstat(expanded)
        return expanded
    except (RuntimeError, OSError, UnicodeEncodeError) as error:
        raise ConfigError(f"{name}={excerpt(text)}: {shortened(str(error))} Pass another path.") from error


def as_number(value: object) -> float:
    """A single number of any library as a float; NaN where there is none, and for what no float can hold.

    >>> as_number(True), as_number("1"), as_number(10**400)
    (1.0, nan, nan)
    """
    if isinstance(value, np.ndarray):
        # Some releases of NumPy warn about float() of an array, others raise.
        value = value.item() if value.size == 1 else None
    if isinstance(value, np.generic) and value.dtype.kind not in _NUMBER_KINDS:
        # float() would drop imaginary parts, and read texts and times.
        return math.nan
    # Python's and NumPy's numbers first: asking for the protocol takes ten times as long.
    if not isinstance(value, (float, int, np.number, np.bool_, SupportsFloat)) or isinstance(value, (str, complex)):
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        # Arrays and tensors of several numbers say so in many ways.
        return math.nan


def as_json(part: Any) -> Any:
    """The same as JSON holds it: lists for tuples, and nothing of numpy's.

    >>> as_json({"seed": np.int64(3), "actions": (np.zeros(2), None)})
    {'seed': 3, 'actions': [[0.0, 0.0], None]}
    """
    if isinstance(part, np.generic | np.ndarray):
        return part.tolist()
    if isinstance(part, Mapping):
        return {key: as_json(value) for key, value in part.items()}
    return [as_json(value) for value in part] if isinstance(part, (list, tuple)) else part


def as_statistics(stats: Mapping[str, Any]) -> dict[str, Any]:
    """Returns statistics that users may have added to with the numbers of any library as Python's own.

    Raises:
        ConfigError: A name is not a string, or a value is neither a number nor a string.

    >>> as_statistics({"updates": np.int64(3), "loss": np.float32(0.5), "note": "x"})
    {'updates': 3, 'loss': 0.5, 'note': 'x'}
    """
    return {_statistic_name(name): _statistic(name, value) for name, value in stats.items()}


def _statistic_name(name: object) -> str:
    if isinstance(name, str):
        return name
    raise ConfigError(f"The name of a statistic must be a string, got {excerpt(name)} ({type(name).__name__}).")


def _statistic(name: str, value: Any) -> float | str:
    if isinstance(value, str):
        return str(value) if isinstance(value, np.str_) else value
    if isinstance(value, (np.generic, np.ndarray)):
        # float() would drop imaginary parts, and read texts and times.
        is_number = value.ndim == 0 and value.dtype.kind in _NUMBER_KINDS
    else:
        is_number = isinstance(value, SupportsFloat)
    if is_number:
        with suppress(TypeError, ValueError, OverflowError, RuntimeError):
            number = float(value)
            if isinstance(value, np.integer):
                return int(value)
            is_plain = isinstance(value, (int, float)) and not isinstance(value, np.generic)
            return value if is_plain else number
    raise ConfigError(
        f"The statistic {name!r} must be a number or a string, got {excerpt(value)} ({type(value).__name__})."
    )


def shortened(value: object, longest: int = 200) -> str:
    """A value as an error shows it, however large or deeply nested it is.

    >>> shortened(["left"] * 100, longest=20)
    "['left', 'left', 'le..."
    """
    plain = json_safe(value, longest, depth=3)
    if isinstance(plain, (list, tuple)):
        plain = plain[:longest]
    text = repr(plain)
    return text if len(text) <= longest else text[:longest] + "..."


def json_safe(part: Any, longest: int = 10_000, depth: int = 20) -> Any:
    """The same as every JSON parser takes it: numbers that are not finite, and what JSON has no word for, as text.

    Args:
        part: Dictionaries, lists and values, of whatever origin.
        longest: Characters of a text that are kept.
        depth: Levels of nesting that are kept.

    >>> json_safe({"rate": float("nan"), 3: [10**400, None, {1}]}) == {"rate": "nan", "3": ["inf", None, "{1}"]}
    True
    """
    if part is None or isinstance(part, bool):
        return part
    if isinstance(part, (int, float)):
        number = as_number(part)
        if math.isnan(number) and isinstance(part, int):
            number = math.inf if part > 0 else -math.inf
        return part if math.isfinite(number) else str(number)
    if depth and isinstance(part, Mapping):
        return {json_safe(str(key), longest): json_safe(value, longest, depth - 1) for key, value in part.items()}
    if depth and isinstance(part, (list, tuple)):
        return [json_safe(value, longest, depth - 1) for value in part]
    text = part if isinstance(part, str) else "..." if isinstance(part, (Mapping, list, tuple)) else str(part)
    # Half of a character pair is no character.
    text = text.encode("utf-8", "replace").decode()
    return text if len(text) <= longest else text[:longest] + "..."


def _check_types(hints: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    for name in hints.keys() & given.keys():
        hint = hints[name]
        allowed = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        value = given[name]
        if not any(_fits(value, kind) for kind in allowed):
            raise ConfigError(f"{name} must be {_named(allowed)}, got {excerpt(value)} ({type(value).__name__}).")


def _fits(value: object, kind: Any) -> bool:
    """Whether a value is of an annotated type; NaN is no number, and whole numbers count as numbers."""
    origin = get_origin(kind) or kind
    if origin is Any:
        return True
    if isinstance(origin, type) and issubclass(origin, Options):
        # Which one is for `from_dict` to say, which knows what is meant.
        return isinstance(value, Options)
    if origin is Literal:
        return isinstance(value, str) or any(value is allowed for allowed in get_args(kind))
    if origin is Sequence and isinstance(value, str):
        return False
    if origin in (int, float):
        is_number = isinstance(value, Integral if origin is int else Real) and not isinstance(value, bool)
        return is_number and not math.isnan(as_number(value))
    if get_args(kind) == (str,):
        return isinstance(value, origin) and all(isinstance(item, str) for item in value)
    return isinstance(value, origin)


def _named(kinds: Sequence[Any]) -> str:
    """The types as an error message lists them."""
    names: dict[Any, str] = {
        int: "an int",
        float: "a number",
        bool: "True or False",
        str: "a string",
        type(None): "None",
        Literal: "a string",
        Mapping: "a dictionary",
        Sequence: "a list",
        Sequence[str]: "a list of strings",
        Callable: "a function",
    }
    titles = []
    for kind in kinds:
        origin = get_origin(kind) or kind
        titles.append(names.get(kind) or names.get(origin) or f"a {getattr(origin, '__name__', origin)}")
    return " or ".join(titles)
