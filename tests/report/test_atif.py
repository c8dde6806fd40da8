"""ATIF: what is written keeps to the format's rules, which stand here as its documentation has them, and loses no token."""

import json
from datetime import datetime

import numpy as np
import pytest

from agentrl_jax.data.episode import Author, Ending, Episode, Outcome, Segment, Turn
from agentrl_jax.report.atif import main, trajectory
from tests.report import runs

TEXT, WHOLE, REAL, OBJECT, LIST, FLAG = str, int, (int, float), dict, list, bool
# name -> (type, required)
ROOT = {
    "schema_version": (TEXT, True),
    "agent": (OBJECT, True),
    "steps": (LIST, True),
    "session_id": (TEXT, False),
    "trajectory_id": (TEXT, False),
    "notes": (TEXT, False),
    "final_metrics": (OBJECT, False),
    "continued_trajectory_ref": (TEXT, False),
    "subagent_trajectories": (LIST, False),
    "extra": (OBJECT, False),
}
AGENT = {
    "name": (TEXT, True),
    "version": (TEXT, True),
    "model_name": (TEXT, False),
    "tool_definitions": (LIST, False),
    "extra": (OBJECT, False),
}
STEP = {
    "step_id": (WHOLE, True),
    "source": (TEXT, True),
    "message": (TEXT, True),
    "timestamp": (TEXT, False),
    "extra": (OBJECT, False),
    "is_copied_context": (FLAG, False),
    "observation": (OBJECT, False),
}
AGENTS_ONLY = {
    "model_name": (TEXT, False),
    "reasoning_effort": ((str, float), False),
    "reasoning_content": (TEXT, False),
    "tool_calls": (LIST, False),
    "metrics": (OBJECT, False),
    "llm_call_count": (WHOLE, False),
}
CALL = {"tool_call_id": (TEXT, True), "function_name": (TEXT, True), "arguments": (OBJECT, True), "extra": (OBJECT, False)}
RESULT = {"source_call_id": (TEXT, False), "content": (TEXT, False), "subagent_trajectory_ref": (LIST, False), "extra": (OBJECT, False)}
METRICS = {
    **dict.fromkeys(("prompt_tokens", "completion_tokens", "cached_tokens"), (WHOLE, False)),
    **dict.fromkeys(("prompt_token_ids", "completion_token_ids", "logprobs"), (LIST, False)),
    "cost_usd": (REAL, False),
    "extra": (OBJECT, False),
}
FINAL = {
    **dict.fromkeys(("total_prompt_tokens", "total_completion_tokens", "total_cached_tokens", "total_steps"), (WHOLE, False)),
    "total_cost_usd": (REAL, False),
    "extra": (OBJECT, False),
}


def check(value, schema, where):
    assert isinstance(value, dict), where
    assert not set(value) - set(schema), f"{where}: unknown {set(value) - set(schema)}"
    for name, (kind, required) in schema.items():
        assert name in value or not required, f"{where}.{name} is missing"
        if name in value:
            assert isinstance(value[name], kind), f"{where}.{name} is {value[name]!r}"
            assert kind is FLAG or not isinstance(value[name], bool), f"{where}.{name}"


def validate(document):
    """The rules of the RFC's tables, in its order."""
    check(document, ROOT, "root")
    assert document["schema_version"] == "ATIF-v1.7"
    check(document["agent"], AGENT, "agent")
    check(document.get("final_metrics", {}), FINAL, "final_metrics")
    assert document["steps"]
    for number, step in enumerate(document["steps"], 1):
        where = f"steps[{number}]"
        assert step.get("source") in ("system", "user", "agent"), where
        check(step, STEP | (AGENTS_ONLY if step["source"] == "agent" else {}), where)
        assert step["step_id"] == number, where
        assert "observation" not in step or step["source"] != "user", where
        if "timestamp" in step:
            datetime.fromisoformat(step["timestamp"])
        calls = step.get("tool_calls", [])
        for call in calls:
            check(call, CALL, f"{where}.tool_calls")
        ids = [call["tool_call_id"] for call in calls]
        assert len(set(ids)) == len(ids), where
        if "observation" in step:
            assert set(step["observation"]) == {"results"}, where
            for result in step["observation"]["results"]:
                check(result, RESULT, f"{where}.observation")
                assert result.get("source_call_id") is None or result["source_call_id"] in ids, where
        metrics = step.get("metrics", {})
        check(metrics, METRICS, f"{where}.metrics")
        for ids_, count in (
            ("prompt_token_ids", "prompt_tokens"),
            ("completion_token_ids", "completion_tokens"),
            ("logprobs", "completion_tokens"),
        ):
            assert ids_ not in metrics or len(metrics[ids_]) == metrics[count], f"{where}.metrics.{ids_}"
        assert all(type(token) is int for ids_ in ("prompt_token_ids", "completion_token_ids") for token in metrics.get(ids_, [])), where
        assert all(type(value) is float for value in metrics.get("logprobs", [])), where
    totals, summed = document.get("final_metrics", {}), [step.get("metrics", {}) for step in document["steps"]]
    for total in ("prompt_tokens", "completion_tokens"):
        assert totals.get(f"total_{total}") in (None, sum(metrics.get(total, 0) for metrics in summed))
    assert totals.get("total_steps", len(document["steps"])) == len(document["steps"]), "total_steps"


def test_a_dialogue_as_steps():
    episode = runs.episode(3, 0, 1)
    document = trajectory(episode, runs.tokenizer().decode)
    validate(json.loads(json.dumps(document, allow_nan=False)))
    user, *agents = document["steps"]
    assert (user["source"], user["message"]) == ("user", runs.TASK)
    assert [step["source"] for step in agents] == ["agent"] * 3
    first, _, last = agents
    assert first["message"] == "The even case is off\n\t→ run them.\n"
    assert first["tool_calls"] == [{"tool_call_id": "call_0", "function_name": "run", "arguments": {"command": "pytest -q"}}]
    assert first["observation"] == {"results": [{"source_call_id": "call_0", "content": runs.ANSWER}]}
    assert last["tool_calls"][0]["function_name"] == "submit"
    assert "observation" not in last
    assert document["final_metrics"]["extra"] == {"reward": 1.0, "components": {"tests": 1.0}, "true_success": True}
    assert document["extra"]["task"] == "median/0"


def test_no_token_and_no_log_prob_is_lost():
    episode = runs.episode(3, 0, 1)
    segment = episode.segments[0]
    steps = [step for step in trajectory(episode, runs.tokenizer().decode)["steps"] if step["source"] == "agent"]
    for step in steps:
        prompt, completion = step["metrics"]["prompt_token_ids"], step["metrics"]["completion_token_ids"]
        whole = segment.tokens[: len(prompt) + len(completion)].tolist()
        assert prompt + completion == whole
        assert segment.mask[len(prompt) : len(whole)].all()
    sampled = [span for span in segment.spans if span.author is Author.POLICY]
    written = np.concatenate([np.float32(step["metrics"]["logprobs"]) for step in steps])
    np.testing.assert_array_equal(written, np.concatenate([span.logprobs for span in sampled]))
    assert [v for step in steps for v in step["metrics"]["extra"]["weight_versions"]] == [3] * len(written)


def test_turns_that_are_no_calls_continued_turns_system_messages_and_failures():
    parts = [
        (Author.TEMPLATE, 0, "<|im_start|>system\nUse the tools.<|im_end|>\n<|im_start|>user\n"),
        (Author.TASK, 0, "Do it."),
        (Author.TEMPLATE, 0, "<|im_end|>\n<|im_start|>assistant\n"),
        (Author.POLICY, 0, "no "),
        (Author.POLICY, 0, "call"),
        (Author.ENVIRONMENT, 0, "error: no tool call"),
        (Author.POLICY, 1, '<tool_call>{"name": 3}</tool_call>'),
    ]
    segment = runs.segment(parts)
    turns = (Turn(valid=False), Turn(reward=0.5, valid=False))
    again = runs.segment([(Author.TASK, 1, "Do it."), (Author.SUMMARIZER, 1, "So far nothing."), (Author.POLICY, 2, "done")])
    known = Episode("a/b", "t", "g", 0, 0, (segment, again), (*turns, Turn(valid=False)), Ending.TURN_LIMIT, Outcome(0.0))
    document = trajectory(known, runs.tokenizer().decode)
    validate(document)
    system, task, first, second, copied, summary, last = document["steps"]
    assert (system["source"], system["message"], task["message"]) == ("system", "Use the tools.", "Do it.")
    assert (first["message"], first["llm_call_count"], "tool_calls" in first) == ("no call", 2, False)
    assert first["observation"] == {"results": [{"content": "error: no tool call"}]}
    assert second["metrics"]["extra"]["reward"] == 0.5
    assert (copied["is_copied_context"], summary["source"], last["message"]) == (True, "system", "done")
    assert "true_success" not in document["final_metrics"]["extra"]
    begun = Segment(segment.spans[:3])
    failed = Episode("x", "t", "g", 0, 0, (begun,), (), Ending.SANDBOX_FAILED, None)
    document = trajectory(failed, runs.tokenizer().decode)
    validate(document)
    assert document["final_metrics"]["extra"] == {}


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (lambda d: d.pop("agent"), "root.agent is missing"),
        (lambda d: d["steps"][0].update(metrics={}), "unknown {'metrics'}"),
        (lambda d: d["steps"][1].update(step_id=7), "steps"),
        (lambda d: d["steps"][1]["observation"]["results"][0].update(source_call_id="x"), "steps"),
        (lambda d: d["steps"][1]["metrics"]["logprobs"].pop(), "logprobs"),
        (lambda d: d["steps"][1]["tool_calls"][0].update(arguments="x"), "arguments is 'x'"),
        (lambda d: d["final_metrics"].update(total_steps=1), "total_steps"),
    ],
)
def test_the_rules_can_be_broken(change, where):
    document = trajectory(runs.episode(3, 0, 1), runs.tokenizer().decode)
    change(document)
    with pytest.raises(AssertionError, match=where):
        validate(document)


def test_all_episodes_of_a_run_are_written(tmp_path, capsys):
    runs.write(tmp_path / "run", 2, hostile=True)
    assert main([str(tmp_path / "run")]) == 0
    files = sorted((tmp_path / "run/atif").iterdir())
    for file in files:
        validate(json.loads(file.read_text("utf-8")))
    expected = {e.id for step in range(2) for e in runs.episodes_of(step)} | {"s1-g0-m99"}
    assert {json.loads(file.read_text("utf-8"))["trajectory_id"] for file in files} == expected
    assert f"({len(files)} episodes)" in capsys.readouterr().out
    assert main([str(tmp_path)]) == 2
    assert "no run here" in capsys.readouterr().err
