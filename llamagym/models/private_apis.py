"""Private APIs of dependencies: each is checked once, before its first use.

Only the files named `*_internals.py` use undocumented APIs of a dependency, and they declare each of them as a
`PrivateApi`. If the installed version has changed it, the features that use it are switched off with a single warning,
and the library falls back to its general path.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cached_property
from importlib.metadata import version

from ..errors import ModelLoadError

logger = logging.getLogger(__name__)

DECLARED: list[PrivateApi] = []
"""The private APIs that the imported `*_internals.py` files declare."""


class PrivateApi:
    """A private API of a dependency.

    Attributes:
        package: Name of the distribution.
        name: The attributes and functions that are used.
        fallback: One sentence on what the library does without it.
    """

    def __init__(self, package: str, name: str, fallback: str, check: Callable[[], bool]) -> None:
        """Declares the API.

        Args:
            package: Name of the distribution.
            name: The attributes and functions that are used.
            fallback: One sentence on what the library does without it.
            check: Uses the API on something small, and returns whether the result is as expected. Any exception counts
                as a change of the API.
        """
        self.package = package
        self.name = name
        self.fallback = fallback
        self._check = check
        DECLARED.append(self)

    @cached_property
    def works(self) -> bool:
        """Whether the API works as this library expects; if not, the first call logs a warning."""
        if self._fault is None:
            return True
        logger.warning("%s %s", self._message(self._fault), self.fallback)
        return False

    def disable(self, fault: str) -> None:
        """Switches the API off although it passed its check, because its use gave another result than expected."""
        if self.works:
            del self.works
            self._fault = fault
            assert not self.works

    def require(self) -> None:
        """Checks an API that has no fallback.

        Raises:
            ModelLoadError: The API has changed.
        """
        if self._fault is not None:
            raise ModelLoadError(f"{self._message(self._fault)} {self.fallback}")

    @cached_property
    def _fault(self) -> str | None:
        try:
            return None if self._check() else "another result"
        except Exception as error:  # whatever a changed API raises
            return f"{type(error).__name__}: {error}"

    def _message(self, fault: str) -> str:
        return f"{self.package} {version(self.package)} has changed a private API, {self.name} ({fault})."


def changed_apis() -> list[str]:
    """The private APIs that were checked and have changed, each as "package version: name"."""
    names = []
    for api in DECLARED:
        if not vars(api).get("works", True):
            names.append(f"{api.package} {version(api.package)}: {api.name}")
    return names
