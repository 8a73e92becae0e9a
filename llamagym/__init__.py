"""llamagym: language models that learn by acting.

`import llamagym` registers the environments with Gymnasium. PyTorch and transformers are imported when a name such as
`llamagym.Agent` is used first, so that `python -m llamagym --help` need not wait for them.
"""

import os
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from .envs import register

if TYPE_CHECKING:
    from .api import *  # noqa: F403

# The only place that names the version; pyproject.toml reads it from here.
__version__ = "0.2.0"

# PyTorch reads it at its first allocation: on Linux, memory for large tensors then comes in pages of 2 MB. In pages of
# 4 kB, handing it out takes a tenth of a learning step on a CPU.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
register()


def __getattr__(name: str) -> Any:
    """Imports a module of the library, or all public names, on first use."""
    # Python asks for names such as __path__ and __wrapped__ in passing.
    if not name.startswith("_") and find_spec(f".{name}", __name__):
        return import_module(f".{name}", __name__)
    if name == "__all__" or not name.startswith("_"):
        api = import_module(".api", __name__)
        if name == "__all__" or name in api.__all__:
            return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Returns the public names."""
    return [*import_module(".api", __name__).__all__, "__version__"]
