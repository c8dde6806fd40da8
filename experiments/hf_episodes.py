"""The PyTorch half of bench_engine.py, for a Python without this package: task as JSON on stdin, result as JSON on stdout.

python experiments/hf_episodes.py MODEL_FOLDER
"""

# pyright: reportMissingImports=false

import json
import sys
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM


def generate(model: Any, contexts: list[list[int]], action: int, *, sample: bool) -> list[list[int]]:
    """`action` new ids for every context, in one call."""
    longest = max(map(len, contexts))
    ids = torch.tensor([[0] * (longest - len(c)) + c for c in contexts])
    mask = torch.tensor([[0] * (longest - len(c)) + [1] * len(c) for c in contexts])
    options = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0} if sample else {"do_sample": False}
    options |= {"max_new_tokens": action, "min_new_tokens": action, "eos_token_id": None, "pad_token_id": 0}
    out = model.generate(ids, attention_mask=mask, **options)
    return out[:, longest:].tolist()


def play(model: Any, texts: list[list[list[int]]], action: int) -> None:
    contexts: list[list[int]] = [[] for _ in texts]
    for turn in range(len(texts[0])):
        contexts = [context + row[turn] for context, row in zip(contexts, texts, strict=True)]
        sampled = generate(model, contexts, action, sample=True)
        contexts = [context + new for context, new in zip(contexts, sampled, strict=True)]


def main() -> None:
    task = json.load(sys.stdin)
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
    with torch.inference_mode():
        greedy = generate(model, [row[0] for row in task["texts"]], task["action"], sample=False)
        seconds = []
        for _ in range(task["repeats"]):
            begin = time.perf_counter()
            play(model, task["texts"], task["action"])
            seconds.append(time.perf_counter() - begin)
    json.dump({"seconds": seconds, "greedy": greedy}, sys.stdout)


if __name__ == "__main__":
    main()
