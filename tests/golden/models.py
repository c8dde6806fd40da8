"""Model folders with stored numbers: logits, log-probs, greedy tokens, losses and gradient norms of transformers.

A folder holds config.json, config_v4_style.json (the same model with the hub's field names), weights, and io.npz with keys CASE/in/NAME and
CASE/out/NAME; what the manifest says about it adds losses, gradient norms and the error that float32 makes. We compute in float32, as
training does, and may differ by ten such errors.
"""

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict

from agentrl_jax.models import pretrained
from agentrl_jax.models.decoder import Cache, Decoder, ModelConfig, Params, init_cache, unembed
from agentrl_jax.models.hf_config import PretrainedError, parse_config

Arrays: TypeAlias = dict[str, np.ndarray]

UNRECORDED = 1e-5
"""Error of float32 where none is recorded: that of the other tiny models."""


def described(folder: Path) -> dict[Path, dict[str, Any]]:
    """Every model folder under FOLDER/hf_models, and what the manifest says about it: {} where it says nothing."""
    manifest = json.loads((folder / "manifest.json").read_text("utf-8")) if (folder / "manifest.json").exists() else {}
    entries = [case for family in manifest.get("families", ()) for case in family.get("cases", ()) if "dir" in case]
    said = {(folder / case["dir"]).name: case for case in entries}
    return {path.parent: said.get(path.parent.name, {}) for path in sorted(folder.glob("hf_models/*/config.json"))}


def judged(folder: Path, facts: dict[str, Any], first: bool = False) -> tuple[list[int], list[str]]:
    """(passed, failed, unsupported) numbers of one model, and a line for everything that differs or cannot be looked at."""
    name, row, lines = f"hf.{folder.name}", [0, 0, 0], []
    try:
        parse_config(folder / "config.json")
    except PretrainedError as error:
        return [0, 0, 1], [f"{name}  unsupported: {error}"]
    try:
        with jax.enable_x64(False):
            for number, trouble in islice(checks(folder, facts), 1 if first else None):
                row[1 if trouble else 0] += 1
                lines += [f"{name}  {number}: {trouble}"] if trouble else []
    except Exception as error:  # noqa: BLE001 - whatever it is, it is a failure of this model and of no other
        row[1] += 1
        lines.append(f"{name}  {type(error).__name__}: {str(error)[:300]}")
    return row, lines


def checks(folder: Path, facts: dict[str, Any]) -> Iterator[tuple[str, str | None]]:
    """(what was compared, what differs or None)."""
    config, params = pretrained.read(folder)
    with np.load(folder / "io.npz", allow_pickle=False) as io:
        stored = dict(io)
    recorded = {case: entry["float32_vs_float64_max_abs_err"] for case, entry in facts.get("inputs", {}).items()}
    within = {case: 10 * recorded.get(case, max(recorded.values(), default=UNRECORDED)) for case in cases(stored)}
    whole = [case for case in cases(stored) if f"{case}/out/logits" in stored]
    for case, logits in forward(config, params, stored, whole).items():
        seen = rows(stored, case)["seen"]
        yield f"{case} logits", far(logits[seen], stored[f"{case}/out/logits"][seen], within[case])
        if f"{case}/out/next_token_logprobs" in stored:
            scores = np.asarray(jax.nn.log_softmax(logits[:, :-1]))
            scores = np.take_along_axis(scores, stored[f"{case}/in/input_ids"][:, 1:, None], 2)[..., 0]
            both = seen[:, 1:] & seen[:, :-1]
            yield f"{case} log-probs", far(scores[both], stored[f"{case}/out/next_token_logprobs"][both], within[case])
    for case in cases(stored):
        if f"{case}/out/new_tokens" in stored:
            yield f"{case} tokens", other_tokens(config, params, stored, case, max(within.values()))
        elif case not in whole:
            yield case, "neither logits nor new_tokens are stored, which is all that is known"
    for case in whole:
        if f"nll_{case}" in facts or f"grad_norms_{case}" in facts:
            yield from learnt(config, params, rows(stored, case), facts, case, within[case])
    if (folder / "config_v4_style.json").exists():
        other = parse_config(folder / "config_v4_style.json")
        yield "config_v4_style.json", None if other == config else f"is {other}, config.json is {config}"


def cases(stored: Arrays) -> list[str]:
    """Names, in the order of the file."""
    return list(dict.fromkeys(key.split("/")[0] for key in stored))


def rows(stored: Arrays, case: str) -> Arrays:
    """[B, T] tokens, positions, segments, mask (no padding), and seen: where logits count."""
    tokens = stored[f"{case}/in/input_ids"].astype(np.int32)

    def given(name: str, default: np.ndarray) -> np.ndarray:
        return stored.get(f"{case}/in/{name}", default)

    mask = given("attention_mask", np.ones_like(tokens)).astype(bool)
    positions = given("position_ids", np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)).astype(np.int32)
    segments = np.where(mask, given("segment_ids", np.zeros_like(tokens)).astype(np.int32) + 1, 0).astype(np.int32)
    seen = given("compare_mask", mask).astype(bool)
    return {"tokens": tokens, "positions": positions, "segments": segments, "mask": mask, "seen": seen}


def forward(config: ModelConfig, params: Params, stored: Arrays, names: list[str]) -> Arrays:
    """Logits f32[B, T, V] of each case, from one program: rows of all, padded to the longest."""
    if not names:
        return {}
    each = [rows(stored, case) for case in names]
    longest = max(x["tokens"].shape[1] for x in each)
    joined = [
        np.concatenate([np.pad(x[part], ((0, 0), (0, longest - x[part].shape[1]))) for x in each])
        for part in ("tokens", "positions", "segments")
    ]
    logits = np.asarray(jax.jit(lambda params, *x: logits_of(config, params, *x))(params, *joined))
    ends = np.cumsum([len(x["tokens"]) for x in each])
    parts = np.split(logits, ends[:-1])
    return {case: part[:, : x["tokens"].shape[1]] for case, part, x in zip(names, parts, each, strict=True)}


def logits_of(config: ModelConfig, params: Params, tokens: jax.Array, positions: jax.Array, segments: jax.Array) -> jax.Array:
    """f32[B, T, V]."""
    hidden: Any = Decoder(config).apply({"params": params}, tokens, positions, segments)
    return hidden @ unembed(params).T


def other_tokens(config: ModelConfig, params: Params, stored: Arrays, case: str, within: float) -> str | None:
    """Continue the prompts greedily with a key-value cache; a row counts until its two best logits are too near each other."""
    shown, want = rows(stored, case), stored[f"{case}/out/new_tokens"]
    margin = stored.get(f"{case}/out/top2_margin", np.full(want.shape, np.inf))
    lengths = shown["mask"].sum(1).astype(np.int32)
    prompts = np.zeros_like(shown["tokens"])
    for row, tokens, mask in zip(prompts, shown["tokens"], shown["mask"], strict=True):
        row[: mask.sum()] = tokens[mask]
    model = Decoder(config)

    @jax.jit
    def extend(params: Params, tokens: jax.Array, start: jax.Array, last: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        extended: Any = model.apply({"params": params}, tokens, start, cache, method=model.extend)
        hidden, cache = extended
        best = (jnp.take_along_axis(hidden, last[:, None, None], 1)[:, 0] @ unembed(params).T).argmax(-1)
        return best.astype(jnp.int32), cache

    cache = init_cache(config, len(want), prompts.shape[1] + want.shape[1])
    best, cache = extend(params, prompts, np.zeros_like(lengths), lengths - 1, cache)
    found = [best]
    for i in range(want.shape[1] - 1):
        best, cache = extend(params, best[:, None], lengths + np.int32(i), np.zeros_like(lengths), cache)
        found.append(best)
    sure = np.logical_and.accumulate(margin > within, axis=1)
    wrong = sure & (np.stack(found, 1) != want)
    return f"{np.stack(found, 1).tolist()}, stored {want.tolist()}" if wrong.any() else None


def learnt(
    config: ModelConfig, params: Params, case: Arrays, facts: dict[str, Any], name: str, within: float
) -> Iterator[tuple[str, str | None]]:
    """The mean next-token loss over the mask, and the norm of its gradient for every tensor."""

    def loss(params: Params, case: dict[str, jax.Array]) -> jax.Array:
        scores = jax.nn.log_softmax(logits_of(config, params, case["tokens"], case["positions"], case["segments"])[:, :-1])
        scores = jnp.take_along_axis(scores, case["tokens"][:, 1:, None], 2)[..., 0]
        return -jnp.mean(scores, where=case["mask"][:, 1:])

    value, gradient = jax.jit(jax.value_and_grad(loss))(params, case)
    if f"nll_{name}" in facts:
        yield f"{name} loss", far(value, facts[f"nll_{name}"], within)
    if wanted := facts.get(f"grad_norms_{name}"):
        norms = {path: float(jnp.linalg.norm(x)) for path, x in flatten_dict(gradient).items()}
        ours = {tensor: norms[path] for tensor, path in pretrained.tensor_names(config).items()}
        if ours.keys() != wanted.keys():
            yield f"{name} gradient norms", f"tensors differ: {sorted(ours.keys() ^ wanted.keys())}"
        else:
            # A norm is a sum of as many errors as it is large.
            apart = [tensor for tensor in wanted if far(ours[tensor], wanted[tensor], within * max(1.0, wanted[tensor]))]
            yield f"{name} gradient norms", f"{apart[0]}: {ours[apart[0]]:.8g}, stored {wanted[apart[0]]:.8g}" if apart else None


def far(found: Any, stored: Any, within: float) -> str | None:
    """One line where numbers are further apart than `within`, or are none."""
    found, stored = np.asarray(found, np.float64), np.asarray(stored, np.float64)
    if found.shape != stored.shape:
        return f"shape {found.shape}, stored {stored.shape}"
    largest = np.abs(found - stored).max(initial=0.0)
    return None if largest <= within else f"largest difference {largest:.3g}, allowed {within:.3g}"
