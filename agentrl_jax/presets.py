"""Published recipes, as far as they concern credit, loss and correction: fields for an experiment.

    experiment = replace(base, **presets.dapo())
    experiment = Experiment(name=..., environment=..., expert=..., **presets.gigpo_paper())

Each says what it takes from where. Sizes, learning rates and schedules are the experiment's. Where paper and public code differ, both
are here under their own names.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, TypedDict

from agentrl_jax import correction, credit, objective, selection
from agentrl_jax.config import Critic, Limits
from agentrl_jax.kernels import policy_loss, sequence_loss
from agentrl_jax.kernels.reduce import Reduction


class Recipe(TypedDict, total=False):
    """Fields of `config.Experiment`."""

    advantage: Callable[..., Any]
    loss: Callable[..., Any]
    reduction: Reduction
    horizon: int | None
    reference: Literal["none", "held", "offloaded"]
    correction: Callable[..., Any] | None
    rewrite: Callable[..., Any] | None
    limits: Limits
    critic: Critic


# --- one reward per episode -----------------------------------------------------------------------------------------------------


def grpo_deepseek() -> Recipe:
    """GRPO of DeepSeekMath (https://arxiv.org/abs/2402.03300, Eq. 3 and 4): std of the group, every episode the same weight, k3 to the
    reference with 0.04. The paper does not say which std; here that of the population."""
    loss = partial(objective.ppo, kl=0.04, kl_estimator="k3")
    return {"advantage": credit.grpo, "loss": loss, "reduction": "episode", "reference": "held"}


def dapo(*, limit: int | None = None, margin: int = 0) -> Recipe:
    """DAPO (https://arxiv.org/abs/2503.14476): clip-higher 0.2/0.28, every token the same weight, no KL, groups that differ; with `limit`,
    in tokens of the policy, its soft overlong punishment. Groups that are left out are not sampled anew."""
    rules = (selection.informative,)
    if limit is not None:
        rules = (selection.informative, partial(selection.overlong_penalty, limit=limit, margin=margin))
    loss = partial(objective.ppo, clip_high=0.28)
    return {"advantage": credit.grpo, "loss": loss, "reduction": "token", "rewrite": partial(selection.each, rules=rules)}


def dr_grpo(*, horizon: int) -> Recipe:
    """Dr. GRPO (https://arxiv.org/abs/2503.20783): no std, and a constant length instead of the episode's: no bias to length."""
    return {"advantage": partial(credit.grpo, std="none"), "loss": objective.ppo, "reduction": "constant", "horizon": horizon}


def rloo() -> Recipe:
    """RLOO (https://arxiv.org/abs/2402.14740): the mean of the others as baseline, REINFORCE on whole episodes."""
    advantage = partial(credit.grpo, baseline="leave_one_out", std="none")
    return {"advantage": advantage, "loss": partial(objective.policy, term=policy_loss.reinforce), "reduction": "episode_sum"}


def opo() -> Recipe:
    """OPO (https://arxiv.org/abs/2505.23585): the baseline of least variance weighs rewards by length; strictly on policy, no clip."""
    advantage = partial(credit.grpo, baseline="length", std="none")
    return {"advantage": advantage, "loss": partial(objective.policy, term=policy_loss.reinforce), "reduction": "token"}


def reinforce_pp() -> Recipe:
    """REINFORCE++ (https://arxiv.org/abs/2501.03262): returns whitened over the batch, PPO's clip."""
    return {"advantage": credit.reinforce_pp, "loss": objective.ppo, "reduction": "token"}


def deepswe(*, horizon: int) -> Recipe:
    """DeepSWE's GRPO++ (Agentica and Together, 2025): clip-higher, no KL, no entropy, leave-one-out without std, a constant length, and
    compact filtering: episodes that ran into a limit are in neither loss nor baseline."""
    return {
        "advantage": partial(credit.grpo, baseline="leave_one_out", std="none"),
        "loss": partial(objective.ppo, clip_high=0.28),
        "reduction": "constant",
        "horizon": horizon,
        "limits": Limits(handling="drop"),
    }


def gspo() -> Recipe:
    """GSPO (https://arxiv.org/abs/2507.18071): the ratio of a sequence is the geometric mean of its tokens', clipped at 3e-4/4e-4."""
    return {"advantage": credit.grpo, "loss": partial(objective.policy, term=sequence_loss.gspo), "reduction": "episode"}


def gmpo() -> Recipe:
    """GMPO (https://arxiv.org/abs/2507.20673): the geometric mean of clipped ratios, at e^-0.4 and e^0.4."""
    return {"advantage": credit.grpo, "loss": partial(objective.policy, term=sequence_loss.gmpo), "reduction": "episode"}


def cispo(*, max_ratio: float = 1.28) -> Recipe:
    """CISPO of MiniMax-M1 (https://arxiv.org/abs/2506.13585, Eq. 4): the truncated ratio is a weight, so no token loses its gradient;
    no lower bound. The paper does not print its upper one."""
    loss = partial(objective.policy, term=partial(policy_loss.cispo, max_ratio=max_ratio))
    return {"advantage": credit.grpo, "loss": loss, "reduction": "token"}


def sapo() -> Recipe:
    """SAPO (https://arxiv.org/abs/2511.20347): a soft gate instead of the clip, harder where the advantage is negative."""
    return {"advantage": credit.grpo, "loss": partial(objective.policy, term=policy_loss.sapo), "reduction": "episode"}


def kl_cov() -> Recipe:
    """KL-Cov (https://arxiv.org/abs/2505.22617): a KL pull on the few tokens that take the entropy away."""
    return {"advantage": credit.grpo, "loss": objective.kl_cov, "reduction": "token"}


# --- turns ----------------------------------------------------------------------------------------------------------------------


def gigpo_paper() -> Recipe:
    """GiGPO (https://arxiv.org/abs/2505.10978, Eq. 3-8, appendix E.1): omega 1, gamma 0.95, std of the population, statistics over
    episodes, KL 0.01."""
    loss = partial(objective.ppo, kl=0.01, kl_estimator="k3")
    return {"advantage": credit.gigpo, "loss": loss, "reduction": "episode", "reference": "held"}


def gigpo_code() -> Recipe:
    """GiGPO as its public code runs by default: no std ("mean_norm"), a lone episode keeps its reward, episodes count once per turn."""
    advantage = partial(credit.gigpo, std="none", singleton="raw", stats="rows")
    return {"advantage": advantage, "loss": partial(objective.ppo, kl=0.01, kl_estimator="k3"), "reduction": "token", "reference": "held"}


def mt_grpo() -> Recipe:
    """MT-GRPO (https://arxiv.org/abs/2505.11821, Eq. 5-6): rewards of turns and the outcome, each against its group; no KL."""
    return {"advantage": partial(credit.mt_grpo, std="sample", eps=1e-4), "loss": objective.ppo, "reduction": "token"}


def starpo_s() -> Recipe:
    """StarPO-S of RAGEN (https://arxiv.org/abs/2504.20073, section 4.2): the quarter of the groups that vary most, clip-higher, no KL; here
    without its critic."""
    rewrite = partial(selection.most_uncertain, fraction=0.25)
    return {"advantage": credit.grpo, "loss": partial(objective.ppo, clip_high=0.28), "reduction": "token", "rewrite": rewrite}


def kimi_researcher() -> Recipe:
    """Kimi-Researcher (https://moonshotai.github.io/Kimi-Researcher/): REINFORCE, later turns of a success count more."""
    return {"advantage": credit.decayed, "loss": partial(objective.policy, term=policy_loss.reinforce), "reduction": "token"}


# --- tokens that other weights sampled ------------------------------------------------------------------------------------------


def areal(*, max_weight: float = 5.0) -> Recipe:
    """AReaL's decoupled PPO (https://arxiv.org/abs/2505.24298, Eq. 5): clipped around the weights before the update, times
    proximal / behaviour, without the tokens where that exceeds `max_weight`."""
    return {
        "advantage": credit.grpo,
        "loss": partial(objective.ppo, old="proximal"),
        "reduction": "token",
        "correction": partial(correction.importance, mode="mask", upper=max_weight),
    }


def icepop(*, lower: float = 0.5, upper: float = 5.0) -> Recipe:
    """IcePop (Ling team, https://arxiv.org/abs/2510.18855): tokens on which trainer and sampler differ too much are masked."""
    recipe = areal()
    recipe["correction"] = partial(correction.importance, mode="mask", lower=lower, upper=upper)
    return recipe


def glm5_agentic(*, low: float = 0.2, high: float = 0.28) -> Recipe:
    """GLM-5's agentic RL (https://arxiv.org/abs/2602.15763, section 4.1.2): rewards less the mean, straight against the sampler's
    log-probs, no token whose ratio leaves (1 - low, 1 + high); groups that lost half of their members are left out."""
    term = partial(policy_loss.dis, min_ratio=1.0 - low, max_ratio=1.0 + high)
    return {
        "advantage": partial(credit.grpo, std="none"),
        "loss": partial(objective.policy, term=term),
        "reduction": "token",
        "rewrite": selection.mostly_valid,
    }


def m2po() -> Recipe:
    """M2PO (https://arxiv.org/abs/2510.01161): tokens leave until the second moment of the log-ratio is 0.04."""
    return {"advantage": credit.grpo, "loss": objective.ppo, "reduction": "token", "correction": correction.m2po}


def deepseek_v32(*, delta: float) -> Recipe:
    """DeepSeek-V3.2 (https://arxiv.org/abs/2512.02556, section 3.1): bad sequences that the policy has left behind are masked (OPSM)."""
    return {
        "advantage": partial(credit.grpo, std="none"),
        "loss": objective.ppo,
        "reduction": "episode",
        "correction": partial(correction.opsm, delta=delta),
    }


def topr() -> Recipe:
    """Tapered off-policy REINFORCE (https://arxiv.org/abs/2503.14286): good episodes unweighted, bad ones with a ratio of at most 1. The
    sign is that of the advantage, the ratio the token's; the paper's are the reward's and the episode's."""
    return {"advantage": credit.grpo, "loss": partial(objective.policy, term=policy_loss.topr), "reduction": "token"}


# --- with a critic --------------------------------------------------------------------------------------------------------------


def search_r1_ppo() -> Recipe:
    """Search-R1's PPO (https://arxiv.org/abs/2503.09516): gamma and lambda 1, KL 0.001, tool output masked out of the loss, values
    held within 0.5 (verl's default). Its public code lets the advantage run through tool output; here it does not."""
    loss = partial(objective.ppo, kl=0.001, kl_estimator="k3")
    advantage = partial(credit.gae, normalise=True)
    return {"advantage": advantage, "loss": loss, "reduction": "token", "reference": "held", "critic": Critic(clip=0.5)}


def sao(*, low: float = 0.3, high: float = 5.0) -> Recipe:
    """SAO (https://arxiv.org/abs/2607.07508): one episode a task, GAE over actions with a lambda that grows with the length, critic's
    targets with lambda 1, double-sided mask (0.3/5.0 with tools, 0.8/3.0 for code)."""
    term = partial(policy_loss.dis, min_ratio=1.0 - low, max_ratio=1.0 + high)
    advantage = partial(credit.gae, adaptive=1.5, value_lam=1.0)
    return {"advantage": advantage, "loss": partial(objective.policy, term=term), "reduction": "token", "critic": Critic()}


def ragen_bi_level() -> Recipe:
    """RAGEN's bi-level GAE (https://arxiv.org/abs/2504.20073 and its public code): turns with gamma 0.95, tokens inside a turn with 1."""
    return {"advantage": credit.bi_level_gae, "loss": partial(objective.ppo, clip_high=0.28), "reduction": "token", "critic": Critic()}
