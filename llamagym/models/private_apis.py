"""Private APIs of dependencies: each is tried once, before the first use.

Only the files named `*_internals.py` use what a dependency does not document, and they declare each such API as a
`PrivateApi`. If the installed version has changed it, what is built on it is switched off with a single warning, and
the library goes on by its general path.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cached_property
from importlib.metadata import version

from ..errors import ModelLoadError

logger = logging.getLogger(__name__)

DECLARED: list[PrivateApi] = []
"""All private APIs of the internals files that have been imported."""


class PrivateApi:
    """A private API of a dependency.

    Attributes:
        package: The distribution that it belongs to.
        name: Attributes and functions that are used.
        fallback: What the library does without it, one sentence.
    """

    def __init__(self, package: str, name: str, fallback: str, check: Callable[[], bool]) -> None:
        """Declare it.

        Args:
            package: The distribution that it belongs to.
            name: Attributes and functions that are used.
            fallback: What the library does without it, one sentence.
            check: Uses it on something small; returns whether the result is the expected one. Any exception counts as
                a change of the API.
        """
        self.package, self.name, self.fallback, self._check = package, name, fallback, check
        DECLARED.append(self)

    @cached_property
    def works(self) -> bool:
        """Whether it does what this library relies on; if not, a warning is logged the first time."""
        if self._fault is None:
            return True
        logger.warning("%s %s", self._message(self._fault), self.fallback)
        return False

    def disable(self, fault: str) -> None:
        """Switch it off, though it passed its check: where it was used, it did not do what was expected."""
        if self.works:
            del self.works
            self._fault = fault
            assert not self.works

    def require(self) -> None:
        """Check it where there is no way to go on without.

        Raises:
            ModelLoadError: It has changed.
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


def changed() -> list[str]:
    """The private APIs that were tried and have changed, each as "package version: name"."""
    broken = [api for api in DECLARED if not vars(api).get("works", True)]
    return [f"{api.package} {version(api.package)}: {api.name}" for api in broken]
