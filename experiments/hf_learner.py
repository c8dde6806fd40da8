"""The PyTorch half of bench_learner.py and bench_gpu.py, for a Python without this package.

    python experiments/hf_learner.py MODEL_FOLDER BATCHES.npz LEARNING_RATE cpu|cuda|DEVICE:bfloat16

f32; with `:bfloat16` autocast, and layers are computed again in the backward pass.

BATCHES.npz holds, by name of a batch and number of a piece: ids, positions and action, each [rows, length]. Positions begin again with
every segment; from them transformers makes the mask of rows that hold several.

Reads lines `VERB BATCH ATTENTION` on stdin: `train` trains one step on all pieces of that batch, `gradient` does all but change weights.
Answers one line of JSON: loss, norm of its gradient, wall and CPU seconds, peak bytes of the device (0 on CPUs).

ATTENTION is sdpa, eager, or by_segment: causal sdpa of every segment alone, what FlashAttention's variable lengths are on a GPU. (CPUs have
no FlashAttention in transformers, and PyTorch's FlexAttention has no gradient there.)
"""

# pyright: reportMissingImports=false

import json
import sys
import time
from collections import defaultdict
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.utils import logging


def by_segment(
    _module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _mask: None, **given: Any
) -> tuple[torch.Tensor, None]:
    """Attention of one row [1, H, T, d], whose segments have the lengths that are given."""
    parts = zip(*(x.split(given["segment_lengths"], dim=2) for x in (query, key, value)), strict=True)
    mixed = [scaled_dot_product_attention(*qkv, is_causal=True, scale=given["scaling"], enable_gqa=True) for qkv in parts]
    return torch.cat(mixed, dim=2).transpose(1, 2), None


def loss_of(piece: dict[str, torch.Tensor], count: int) -> torch.Tensor:
    """Negative log-likelihood of the actions over `count`. Logits are made for actions alone."""
    ids, positions = piece["ids"].long(), piece["positions"].long()
    starts = torch.nonzero(positions.ravel() == 0).ravel().tolist()
    lengths = np.diff([*starts, positions.numel()]).tolist()  # of use where there is one row
    picked = piece["action"][:, 1:]
    with torch.autocast(device, torch.bfloat16, enabled=bool(half)):
        hidden = model.model(input_ids=ids, position_ids=positions, use_cache=False, segment_lengths=lengths).last_hidden_state
        logits = model.lm_head(hidden[:, :-1][picked])
    return cross_entropy(logits.float(), ids[:, 1:][picked], reduction="sum") / count


def step(verb: str, batch: str, attention: str) -> tuple[float, float]:
    model.set_attn_implementation(attention)
    found = list(pieces[batch].values())
    count, total = sum(int(piece["action"].sum()) for piece in found), 0.0
    for piece in found:
        loss = loss_of(piece, count)
        loss.backward()
        total += loss.item()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
    if verb == "train":
        optimizer.step()
    optimizer.zero_grad()
    return total, norm


logging.disable_progress_bar()
AttentionInterface.register("by_segment", by_segment)
folder, batches, learning_rate, device = sys.argv[1:]
device, _, half = device.partition(":")
model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa", dtype=torch.float32)
torch.nn.Module.to(model, device)
if half:
    model.gradient_checkpointing_enable()
    model.train()  # checkpoints are made while training alone
optimizer = torch.optim.AdamW(model.parameters(), lr=float(learning_rate), betas=(0.9, 0.95), weight_decay=0.0, fused=True)
pieces = defaultdict(lambda: defaultdict(dict))
for name, array in np.load(batches).items():
    batch, number, part = name.split("/")
    pieces[batch][number][part] = torch.from_numpy(array).to(device)

for line in sys.stdin:
    wall, cpu = time.perf_counter(), time.process_time()
    loss, norm = step(*line.split())
    peak = 0
    if device == "cuda":
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated()
    print(json.dumps([loss, norm, time.perf_counter() - wall, time.process_time() - cpu, peak]), flush=True)
