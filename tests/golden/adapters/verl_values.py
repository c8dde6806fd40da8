"""verl's value loss and functions of logits."""

from typing import Any

from agentrl_jax.kernels import entropy
from tests.golden.adapter import adapter


@adapter("verl.logits_ops", gradients={"grad_entropy": ("logits", "entropy"), "grad_logprobs": ("logits", "logprobs")})
def logits_ops(x: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
    return {
        "entropy": entropy.entropy(x["logits"]),
        "logprobs": entropy.log_prob(x["logits"], x["labels"]),
        "sum_pi_squared": entropy.collision(x["logits"]),
        "logprobs_at_temperature": entropy.log_prob(x["logits"], x["labels"], temperature=p["temperature"]),
    }
