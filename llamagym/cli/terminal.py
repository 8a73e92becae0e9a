"""Paths from a command line, and text for a terminal."""

from __future__ import annotations

import os
from typing import Any

import click

from ..options import shortened


class UserPath(click.Path):
    """A path in which `~` is the home folder, also after an equals sign, where a shell does not expand it."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Returns the expanded path; an invalid or inaccessible path is a usage error."""
        path = os.path.expanduser(value)
        try:
            os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError as error:
            self.fail(f"{shortened(path)} cannot be used: {error.strerror}. Pass another path.", param, ctx)
        return super().convert(path, param, ctx)


class ContextType(click.ParamType):
    """The option `context` of an agent: "turn", "episode" or a number of turns."""

    name = "turn|episode|N"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str | int:
        """Returns the word or the number; anything else is a usage error."""
        if value in ("turn", "episode"):
            return str(value)
        if not str(value).isdecimal() or int(value) == 0:
            self.fail(f"{shortened(value)!r} is not one of turn, episode and a number of turns.", param, ctx)
        return int(value)


def printable(text: str) -> str:
    r"""Escapes characters that could control the terminal.

    >>> print(printable("red: \x1b[31m"))
    red: \x1b[31m
    """
    return "".join(map(_printable_char, text))


def _printable_char(char: str) -> str:
    if char.isprintable() or char in "\n\t":
        return char
    return char.encode("unicode_escape").decode()
