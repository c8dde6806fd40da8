"""verl's aggregation of token losses."""

from typing import Any

import jax.numpy as jnp

from agentrl_jax.kernels import reduce
from tests.golden.adapter import adapter, unsupported

VERL: dict[str, reduce.Reduction] = {
    "token-mean": "token",
    "token-sum": "sum",
    "seq-mean-token-mean": "episode",
    "seq-mean-token-sum": "episode_sum",
    "seq-mean-token-sum-norm": "constant",
}
"""Name of a mode -> our reduction."""


def verl_weights(mask: Any, params: dict[str, Any]) -> Any:
    """Token weights of one of verl's modes; its losses are multiplied with the number of data-parallel ranks, which we do not have."""
    mode = params["loss_agg_mode"]
    counted, ranks = ("batch_num_tokens" if mode == "token-mean" else "global_batch_size"), params.get("dp_size", 1)
    if ranks > 1 and mode != "token-sum" and params.get(counted) is None:
        raise ValueError(f"{counted} is required when dp_size > 1")
    return reduce.token_weights(
        jnp.asarray(mask) != 0,
        reduction=VERL[mode],
        horizon=(params.get("loss_scale_factor") or mask.shape[1]) if mode.endswith("norm") else None,
        tokens=params.get("batch_num_tokens"),
        episodes=params.get("global_batch_size"),
        scale=jnp.full(mask.shape[0], float(ranks)),
    )


@adapter("verl.agg_loss")
def agg_loss(inputs: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
    return {"loss": reduce.weighted_sum(inputs["loss_mat"], verl_weights(inputs["loss_mask"], params))}


@adapter("verl.agg_loss_microbatch")
def agg_loss_microbatch(inputs: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
    """Each part is weighted on its own, with the counts of the whole."""
    loss, mask = jnp.asarray(inputs["loss_mat"]), inputs["loss_mask"]
    parts = [verl_weights(mask[start:stop], params) for start, stop in params["splits"]]
    found = {
        f"part{i}": reduce.weighted_sum(loss[start:stop], weights)
        for i, ((start, stop), weights) in enumerate(zip(params["splits"], parts, strict=True))
    }
    whole = reduce.weighted_sum(loss, verl_weights(mask, params))
    return found | {"sum_of_parts": reduce.weighted_sum(loss, jnp.concatenate(parts)), "whole": whole}


unsupported(
    "a micro-batch without a token in the loss is 0/0 there, 0 here",
    *(f"verl.agg_loss.{number}" for number in ("40", "43", "46")),
    output="loss",
)
