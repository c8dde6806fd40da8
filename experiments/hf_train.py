"""The PyTorch half of bench_train.py, for a Python without this package.

    python experiments/hf_train.py MODEL_FOLDER BATCHES.npz LEARNING_RATE

Reads names of batches on stdin; for each it trains one step and answers one line of JSON: loss before the step, wall and CPU seconds.
"""

# pyright: reportMissingImports=false

import json
import sys
import time

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

logging.disable_progress_bar()
folder, batches, learning_rate = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa", dtype=torch.float32)
optimizer = torch.optim.AdamW(model.parameters(), lr=float(learning_rate), betas=(0.9, 0.95), weight_decay=0.0, fused=True)
arrays = {name: torch.from_numpy(array) for name, array in np.load(batches).items()}


def step(ids: torch.Tensor, action: torch.Tensor) -> float:
    """Mean negative log-likelihood of the actions. Padding is on the right: under causal attention it needs no mask, which sdpa likes."""
    hidden = model.model(input_ids=ids).last_hidden_state[:, :-1]
    picked = action[:, 1:]
    loss = torch.nn.functional.cross_entropy(model.lm_head(hidden[picked]), ids[:, 1:][picked])
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


for line in sys.stdin:
    name = line.strip()
    wall, cpu = time.perf_counter(), time.process_time()
    loss = step(arrays[f"{name}/ids"].long(), arrays[f"{name}/action"])
    print(json.dumps([loss, time.perf_counter() - wall, time.process_time() - cpu]), flush=True)
