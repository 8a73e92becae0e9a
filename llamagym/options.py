"""The base class of configurations, and checks of arguments, paths and numbers that users pass."""

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
# Integers are stored in 64 bits; other numbers become float32.
_LARGEST_INT = 2**63 - 1
_LARGEST_FLOAT = 3.4e38
# Adam's first step is up to ten times the learning rate.
_LARGEST_RATE = 3.4e37
# `dtype.kind` of NumPy's real numbers.
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
    """Base class of configurations; it checks types, and the `__post_init__` of a subclass checks ranges.

    Attributes:
        advice: Hints for options of other libraries, by the option's name there.
    """

    advice: ClassVar[Mapping[str, str]] = {}
    # Current names of options by their old names, which are accepted with a logged hint.
    renamed: ClassVar[Mapping[str, str]] = {}

    def __new__(cls: type[OptionsT], *_: Any, **options: Any) -> OptionsT:
        """Checks names, which a dataclass would reject with a TypeError without a hint."""
        cls._check_names(options)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        """Checks types and sizes, and converts numbers to built-in ones."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        _check_types(get_type_hints(type(self)), values)
        for name, value in values.items():
            if isinstance(value, Real) and not isinstance(value, bool):
                number = int(value) if isinstance(value, Integral) else float(value)
                largest = _LARGEST_INT if isinstance(value, Integral) else _LARGEST_FLOAT
                if largest < abs(number) < math.inf:
                    raise ConfigError(f"{name}={excerpt(value)} is too large. Pass a number up to {largest:.1e}.")
                # NumPy's numbers cannot be saved as JSON.
                object.__setattr__(self, name, number)
        as_seed(values.get("seed"))

    @classmethod
    def from_dict(cls: type[OptionsT], options: Mapping[str, Any] | Options) -> OptionsT:
        """Creates a configuration from options by name; returns an instance of this class unchanged.

        Raises:
            ConfigError: An option is unknown or out of range, or `options` is neither a dictionary nor an instance.
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
        """Raises a `ConfigError` for an unknown option."""
        known = {field.name for field in fields(cls) if field.init}
        for key in options:
            if key not in known:
                raise ConfigError(f"Unknown option {excerpt(key)} of {cls.__name__}. {cls._hint(str(key), known)}")

    def to_dict(self) -> dict[str, Any]:
        """Returns the options by name, as `from_dict` accepts them."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.init}

    @classmethod
    def _hint(cls, key: str, known: Collection[str]) -> str:
        return cls.advice[key] if key in cls.advice else did_you_mean(key, known)

    def _require_at_least(self, minimum: int, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if value is not None and value < minimum:
                raise ConfigError(f"{name}={value} is too small. Pass at least {minimum}.")

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
        value = getattr(self, name)
        if value not in allowed:
            raise ConfigError(f"{name}={excerpt(value)}. {did_you_mean(str(value), allowed)}")


def explains_wrong_calls(
    positional: int, old_names: Collection[str] = ()
) -> Callable[[Callable[Parameters, Returned]], Callable[Parameters, Returned]]:
    """Decorates a function so that wrong calls raise a `ConfigError` with a hint instead of a `TypeError`.

    Args:
        positional: Number of arguments that may be passed by position.
        old_names: Arguments of earlier versions that the function takes as further keyword arguments.
    """

    def decorate(function: Callable[Parameters, Returned]) -> Callable[Parameters, Returned]:
        parameters = dict(inspect.signature(function).parameters)
        parameters.pop("self", None)
        parameters = {name: each for name, each in parameters.items() if each.kind is not each.VAR_KEYWORD}
        keywords = [name for name, parameter in parameters.items() if parameter.kind is parameter.KEYWORD_ONLY]
        by_position = [name for name in parameters if name not in keywords]
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
                if name not in parameters and name not in old_names:
                    raise ConfigError(f"{title}() has no argument {name!r}. {did_you_mean(name, parameters)}")
            return function(*args, **kwargs)

        return checked

    return decorate


def check_arguments(function: Callable[..., Any], arguments: Mapping[str, Any], **names: Any) -> None:
    """Rejects arguments whose types differ from the function's annotations.

    Args:
        function: The function.
        arguments: The function's arguments by name, such as `locals()` at its beginning.
        **names: Types by the names that annotations use and the function's module does not import at run time.

    Raises:
        ConfigError: An argument has another type.
    """
    _check_types(get_type_hints(function, localns=names), arguments)


def require_positive(**counts: int | None) -> None:
    """Raises a `ConfigError` for a count below 1; None is allowed."""
    for name, count in counts.items():
        if count is not None and count < 1:
            raise ConfigError(f"{name}={count!r}. Pass a whole number of at least 1.")


def require_text(**texts: str | Path | None) -> None:
    """Raises a `ConfigError` for an empty name or path; None is allowed."""
    for name, text in texts.items():
        if text is not None and not str(text):
            raise ConfigError(f"{name} must not be empty, got {text!r}.")


def as_seed(seed: int | None) -> int | None:
    """Returns a seed as a built-in int; raises a `ConfigError` for a negative seed or one of more than 63 bits."""
    if seed is None:
        return None
    if 0 <= seed < 2**63:
        return int(seed)
    raise ConfigError(f"seed={excerpt(seed)} is out of range. Pass a whole number from 0 to 2**63 - 1.")


def user_path(path: str | os.PathLike[str], name: str = "path") -> Path:
    """Returns the absolute path of a file or folder that a user passed, with `~` expanded.

    Args:
        path: The path.
        name: Name of the argument, for errors.

    Raises:
        ConfigError: The path is empty, not a path, too long, or in the home of an unknown user.
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
        # Whether these are errors depends on the use of the path.
        with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            os.lstat(expanded)
        return expanded
    except (RuntimeError, OSError, UnicodeEncodeError) as error:
        raise ConfigError(f"{name}={excerpt(text)}: {shortened(str(error))} Pass another path.") from error


def as_number(value: object) -> float:
    """Converts a single number of any library to a float; NaN for other values and for numbers beyond a float.

    >>> as_number(True), as_number("1"), as_number(10**400)
    (1.0, nan, nan)
    """
    if isinstance(value, np.ndarray):
        # Some releases of NumPy warn about float() of an array, others raise.
        value = value.item() if value.size == 1 else None
    if isinstance(value, np.generic) and value.dtype.kind not in _NUMBER_KINDS:
        # float() would drop imaginary parts, and convert strings and times.
        return math.nan
    # Python's and NumPy's numbers first: the check of the protocol takes ten times as long.
    if not isinstance(value, (float, int, np.number, np.bool_, SupportsFloat)) or isinstance(value, (str, complex)):
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        # Libraries raise different errors for arrays and tensors of several numbers.
        return math.nan


def as_json(value: Any) -> Any:
    """Converts a value to what JSON would return for it: lists for tuples, built-in values for NumPy's.

    >>> as_json({"seed": np.int64(3), "actions": (np.zeros(2), None)})
    {'seed': 3, 'actions': [[0.0, 0.0], None]}
    """
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, Mapping):
        return {key: as_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return list(map(as_json, value))
    return value


def as_statistics(stats: Mapping[str, Any]) -> dict[str, Any]:
    """Converts statistics, to which users may have added numbers of any library, to built-in values.

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
        # float() would drop imaginary parts, and convert strings and times.
        is_number = value.ndim == 0 and value.dtype.kind in _NUMBER_KINDS
    else:
        is_number = isinstance(value, SupportsFloat)
    if is_number:
        with suppress(TypeError, ValueError, OverflowError, RuntimeError):
            number = float(value)
            if isinstance(value, np.integer):
                return int(value)
            is_built_in = isinstance(value, (int, float)) and not isinstance(value, np.generic)
            return value if is_built_in else number
    raise ConfigError(
        f"The statistic {name!r} must be a number or a string, got {excerpt(value)} ({type(value).__name__})."
    )


def shortened(value: object, longest: int = 200) -> str:
    """Returns a short repr of a value for an error message, however large or deeply nested the value is.

    >>> shortened(["left"] * 100, longest=20)
    "['left', 'left', 'le..."
    """
    plain = json_safe(value, longest, depth=3)
    if isinstance(plain, (list, tuple)):
        plain = plain[:longest]
    text = repr(plain)
    return text if len(text) <= longest else text[:longest] + "..."


def json_safe(value: Any, longest: int = 10_000, depth: int = 20) -> Any:
    """Converts a value to one that every JSON parser accepts: numbers that are not finite and other types become text.

    Args:
        value: A value of any type; dictionaries and lists are converted recursively.
        longest: Maximum number of characters of a text.
        depth: Maximum depth of nesting.

    >>> json_safe({"rate": float("nan"), 3: [10**400, None, {1}]}) == {"rate": "nan", "3": ["inf", None, "{1}"]}
    True
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, (int, float)):
        number = as_number(value)
        if math.isnan(number) and isinstance(value, int):
            number = math.inf if value > 0 else -math.inf
        return value if math.isfinite(number) else str(number)
    if depth and isinstance(value, Mapping):
        return {json_safe(str(key), longest): json_safe(item, longest, depth - 1) for key, item in value.items()}
    if depth and isinstance(value, (list, tuple)):
        return [json_safe(item, longest, depth - 1) for item in value]
    if isinstance(value, (Mapping, list, tuple)):
        value = "..."
    text = value if isinstance(value, str) else str(value)
    # UTF-8 cannot encode half of a surrogate pair.
    text = text.encode("utf-8", "replace").decode()
    return text if len(text) <= longest else text[:longest] + "..."


def _check_types(hints: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    for name in values:
        if name not in hints:
            continue
        hint = hints[name]
        allowed = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        value = values[name]
        if not any(_has_type(value, annotation) for annotation in allowed):
            raise ConfigError(f"{name} must be {_describe(allowed)}, got {excerpt(value)} ({type(value).__name__}).")


def _has_type(value: object, annotation: Any) -> bool:
    """Whether a value has an annotated type; an int is also a float, and NaN is not a number."""
    origin = get_origin(annotation) or annotation
    if origin is Any:
        return True
    if isinstance(origin, type) and issubclass(origin, Options):
        # `from_dict` checks the class of the configuration.
        return isinstance(value, Options)
    if origin is Literal:
        return isinstance(value, str) or any(value is allowed for allowed in get_args(annotation))
    if origin is Sequence and isinstance(value, str):
        return False
    if origin in (int, float):
        number_class = Integral if origin is int else Real
        is_number = isinstance(value, number_class) and not isinstance(value, bool)
        return is_number and not math.isnan(as_number(value))
    if get_args(annotation) == (str,):
        return isinstance(value, origin) and all(isinstance(item, str) for item in value)
    return isinstance(value, origin)


def _describe(annotations: Sequence[Any]) -> str:
    """Describes annotated types for an error message."""
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
    descriptions = []
    for annotation in annotations:
        origin = get_origin(annotation) or annotation
        name = str(getattr(origin, "__name__", origin))
        article = "an" if name[0] in "AEIOUaeiou" else "a"
        descriptions.append(names.get(annotation) or names.get(origin) or f"{article} {name}")
    return " or ".join(descriptions)
