"""While a model is cut or cast in place: what breaks off leaves one that is not as it was, not done, and says so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, final

from torch import nn

from megatron.config.setting import require
from megatron.errors import ConfigError

LOAD_AGAIN = "this model was refused by init_inference and is partly cut or cast: load it again"


@contextmanager
def changing(model: nn.Module) -> Iterator[None]:
    try:
        yield
    except BaseException:
        model.forward = _Refusal()
        raise


def check_unbroken(model: nn.Module) -> None:
    require(not isinstance(model.forward, _Refusal), f"init_inference: {LOAD_AGAIN}")


@final
class _Refusal:
    """In place of a forward."""

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ConfigError(LOAD_AGAIN)
