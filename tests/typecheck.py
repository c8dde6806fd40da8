"""The type checker that tests put over the package: shapes and types of every call are checked, by jaxtyping and beartype."""

from collections.abc import Callable
from typing import Any

import jax
from beartype import BeartypeConf, beartype

# By the rules of Python's type hints an int is a float.
_CONF = BeartypeConf(is_pep484_tower=True)


def check(function: Callable[..., Any]) -> Callable[..., Any]:
    """`beartype`, but for the constructors of two kinds of record.

    A pytree: JAX rebuilds it out of whatever it carries (shapes, shardings, stacked arrays). What its fields hold is checked where a
    function takes them. A record with a `__post_init__`: it checks itself, and its own message is what a user gets to read.
    """
    checked = beartype(function, conf=_CONF)
    if function.__name__ != "__init__":
        return checked

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if jax.tree_util.all_leaves([self]) and not hasattr(self, "__post_init__"):
            checked(self, *args, **kwargs)

    return init
