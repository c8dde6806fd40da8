"""Episodes as trajectories in ATIF, the interchange format of agents' trajectories, version 1.7 (Harbor's RFC 0001).

    python -m agentrl_jax.report.atif RUN        # writes RUN/atif/ID.json for every finished episode of the run

Token ids and log-probs go where the format has places for them: each agent step has its prompt, its completion and the log-probs of that,
so the episode's tokens can be had back exactly. What has no place of its own is `extra`: weight versions, temperature, rewards.

It lives here, beside the page, as it needs both the episodes and the tokenizer, which do not know of each other.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from agentrl_jax import __version__
from agentrl_jax.chat.tokenizer import ChatTokenizer
from agentrl_jax.data.episode import Author, Episode, Segment, Span, Turn
from agentrl_jax.data.frames import StoreError
from agentrl_jax.data.store import read
from agentrl_jax.report.load import EPISODES, TOKENIZER

SCHEMA = "ATIF-v1.7"
FOLDER = "atif"
Decode = Callable[[Sequence[int]], str]
_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_SYSTEM = re.compile(r"<\|im_start\|>system\n(.*?)<\|im_end\|>", re.DOTALL)


def trajectory(episode: Episode, decode: Decode) -> dict[str, Any]:
    """One episode. `decode`: token ids -> text."""
    steps = [{"step_id": number, **step} for number, step in enumerate(_steps(episode, decode), 1)]
    metrics = [step["metrics"] for step in steps if "metrics" in step]
    outcome = episode.outcome
    scores = {} if outcome is None else {"reward": outcome.reward, "components": dict(outcome.components)}
    if outcome is not None and outcome.true_success is not None:
        scores["true_success"] = outcome.true_success
    return {
        "schema_version": SCHEMA,
        "session_id": episode.id,
        "trajectory_id": episode.id,
        "agent": {"name": "agentrl_jax", "version": __version__},
        "steps": steps,
        "final_metrics": {
            "total_prompt_tokens": sum(each["prompt_tokens"] for each in metrics),
            "total_completion_tokens": sum(each["completion_tokens"] for each in metrics),
            "total_steps": len(steps),
            "extra": scores,
        },
        "extra": {
            "task": episode.task,
            "group": episode.group,
            "seed": episode.seed,
            "step": episode.step,
            "ending": episode.ending.value,
            "counters": dict(episode.counters),
            "timings": dict(episode.timings),
        },
    }


def _steps(episode: Episode, decode: Decode) -> Iterator[dict[str, Any]]:
    """In their order: the system message, the task, and one step per turn of the policy with what it was answered."""
    for number, segment in enumerate(episode.segments):
        copied = {"is_copied_context": True} if number else {}  # a rewritten history says again what was said
        for turn, group in groupby(_placed(segment), key=lambda placed: placed[0].turn):
            placed = list(group)
            first = next((i for i, (span, _) in enumerate(placed) if span.author is Author.POLICY), len(placed))
            for span, _ in placed[:first]:
                text = decode(span.tokens.tolist())
                if span.author is Author.TEMPLATE:
                    if system := _SYSTEM.search(text):
                        yield {"source": "system", "message": system[1], **copied}
                else:
                    yield {"source": "user" if span.author is Author.TASK else "system", "message": text, **copied}
            if first < len(placed):
                yield _agent_step(turn, placed[first:], segment, episode.turns[turn], decode)


def _placed(segment: Segment) -> Iterator[tuple[Span, int]]:
    """Spans and where they begin."""
    at = 0
    for span in segment.spans:
        yield span, at
        at += len(span.tokens)


def _agent_step(turn: int, placed: Sequence[tuple[Span, int]], segment: Segment, record: Turn, decode: Decode) -> dict[str, Any]:
    sampled = [span for span, _ in placed if span.author is Author.POLICY]
    tokens = [token for span in sampled for token in span.tokens.tolist()]
    prompt = segment.tokens[: placed[0][1]].tolist()
    text = decode(tokens).removesuffix("<|im_end|>")
    call = _call(text) if record.valid else None
    answers = [decode(span.tokens.tolist()) for span, _ in placed if span.author not in (Author.POLICY, Author.TEMPLATE)]
    step: dict[str, Any] = {"source": "agent", "message": text if call is None else text.partition("<tool_call>")[0]}
    known: dict[str, Any] = {}
    if call is not None:
        known["source_call_id"] = f"call_{turn}"
        step["tool_calls"] = [{"tool_call_id": f"call_{turn}", "function_name": call["name"], "arguments": call["arguments"]}]
    if answers:
        step["observation"] = {"results": [{**known, "content": "".join(answers)}]}
    step["llm_call_count"] = len(sampled)
    step["metrics"] = {
        "prompt_tokens": len(prompt),
        "completion_tokens": len(tokens),
        "prompt_token_ids": prompt,
        "completion_token_ids": tokens,
        "logprobs": np.concatenate([span.logprobs for span in sampled if span.logprobs is not None]).astype(float).tolist(),
        "extra": {
            "weight_versions": [v for span in sampled if span.versions is not None for v in span.versions.tolist()],
            "temperature": sampled[-1].temperature,
            "finish_reason": sampled[-1].finish_reason,
            **({} if record.reward is None else {"reward": record.reward}),
        },
    }
    if not record.valid:
        step["extra"] = {"invalid_call": True}
    return step


def _call(text: str) -> Mapping[str, Any] | None:
    """The tool call in a turn that is known to be one."""
    found = _CALL.search(text)
    try:
        call = json.loads(found[1]) if found else None
    except ValueError:
        return None
    return call if isinstance(call, dict) and isinstance(call.get("name"), str) and isinstance(call.get("arguments"), dict) else None


def export(run: Path) -> int:
    """Write all finished episodes of a run folder; how many. Raises OSError, ValueError."""
    if not (run / EPISODES).is_file():
        raise FileNotFoundError(f"{run}: no run here; a run folder holds {EPISODES}")
    tokenizer = ChatTokenizer.load(run / TOKENIZER)
    folder, count = run / FOLDER, 0
    folder.mkdir(exist_ok=True)
    for episode in read(run / EPISODES):
        name = re.sub(r"[^\w.~-]", "_", episode.id)
        text = json.dumps(trajectory(episode, tokenizer.decode), ensure_ascii=False, allow_nan=False)
        (folder / f"{name}.json").write_text(text, "utf-8")
        count += 1
    return count


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0, or 2 where the folder holds no run that can be read."""
    parser = argparse.ArgumentParser(prog="python -m agentrl_jax.report.atif", description="Write RUN/atif/ID.json for every episode.")
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder, with the episodes and the tokenizer")
    folder = parser.parse_args(arguments).run
    try:
        count = export(folder)
    except (OSError, ValueError, StoreError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    sys.stdout.write(f"{folder / FOLDER}  ({count} episodes)\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
