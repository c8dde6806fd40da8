"""Speed of the embedded engine, and of `transformers.generate` on PyTorch playing the same episodes with the same weights.

    python -m experiments.bench_engine [--torch PYTHON]

64 episodes at once, 6 turns each: a prompt of 60 tokens, actions of 16 sampled tokens, answers of 20 to 40 fixed random ids. The engine
keeps every episode's cache; `generate` is called once a turn on all 64 histories, left-padded, and computes them again each time, which
is what its interface offers. Both use all cores and f32, sample at temperature 1, and stop at no token.

Counted are tokens that an episode gained per second: prompt, actions and answers, each once, however often it was computed. Before the
clock starts both play one greedy turn; the share of equal tokens shows that they run the same model. --torch names a Python with torch
and transformers, default this one. Half a minute; a busy machine slows PyTorch far more than the engine, so run nothing else.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from agentrl_jax.inference.engine import Engine
from agentrl_jax.inference.protocol import Completion, Sampler, Sampling
from agentrl_jax.models import pretrained
from agentrl_jax.models.decoder import ModelConfig, init_params

CONFIG = ModelConfig(vocab_size=512, hidden_size=96, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=24, intermediate_size=256)
EPISODES, TURNS, PROMPT, ACTION, ANSWER = 64, 6, 60, 16, (20, 41)
CONTEXT = 512
REPEATS = 5
HF_SIDE = Path(__file__).with_name("hf_episodes.py")

Texts = list[list[NDArray[np.int32]]]


def make_texts(seed: int = 0) -> Texts:
    """For every episode its prompt, then the answer to each of its actions."""
    rng = np.random.default_rng(seed)
    lengths = [[PROMPT, *rng.integers(*ANSWER, TURNS - 1)] for _ in range(EPISODES)]
    return [[rng.integers(0, CONFIG.vocab_size, n).astype(np.int32) for n in row] for row in lengths]


def tokens_of(texts: Texts) -> int:
    """What all episodes gain: the texts, and the actions sampled between them."""
    return sum(len(text) + ACTION for row in texts for text in row)


async def play(sampler: Sampler, name: str, texts: list[NDArray[np.int32]], temperature: float) -> list[Completion]:
    """One episode; returns its actions."""
    context, actions = np.zeros(0, np.int32), []
    for turn, text in enumerate(texts):
        context = np.concatenate([context, text])
        done = await sampler.generate(context, Sampling(ACTION, seed=turn, temperature=temperature), session=name)
        actions.append(done)
        context = np.concatenate([context, done.tokens])
    await sampler.release(name)
    return actions


async def play_all(sampler: Sampler, texts: Texts, temperature: float = 1.0) -> list[list[Completion]]:
    return await asyncio.gather(*(play(sampler, str(i), row, temperature) for i, row in enumerate(texts)))


async def greedy_turn(sampler: Sampler, texts: Texts) -> NDArray[np.int32]:
    """i32[episodes, ACTION]: first actions, sampled greedily."""
    return np.stack([actions[0].tokens for actions in await play_all(sampler, [row[:1] for row in texts], temperature=0.0)])


async def run_engine(folder: Path, texts: Texts) -> tuple[list[float], NDArray[np.int32]]:
    """Seconds of each repeat, and the greedy first turn i32[episodes, ACTION]."""
    config, params = pretrained.read(folder)
    async with Engine(config, params, context_limit=CONTEXT, slots=EPISODES) as engine:
        await engine.warm_up()
        greedy = await greedy_turn(engine, texts)
        seconds = []
        for _ in range(REPEATS):
            begin = time.perf_counter()
            await play_all(engine, texts)
            seconds.append(time.perf_counter() - begin)
        print(f"engine programs: {engine.stats.programs}, at most {engine.max_programs}")
    return seconds, greedy


def run_torch(python: str, folder: Path, texts: Texts) -> tuple[list[float], NDArray[np.int32]]:
    task = {"texts": [[text.tolist() for text in row] for row in texts], "action": ACTION, "repeats": REPEATS}
    done = subprocess.run([python, HF_SIDE, folder], input=json.dumps(task), stdout=subprocess.PIPE, text=True, check=True)
    result = json.loads(done.stdout)
    return result["seconds"], np.array(result["greedy"], np.int32)


def report(name: str, speeds: list[float]) -> float:
    """Print tokens per second of each repeat; returns the median."""
    print(f"{name:24} {np.median(speeds):9,.0f} tokens/s  (min {min(speeds):,.0f}, max {max(speeds):,.0f}, {len(speeds)} repeats)")
    return float(np.median(speeds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", default=sys.executable, metavar="PYTHON", help="a Python that has torch and transformers")
    python = parser.parse_args().torch
    texts = make_texts()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        words = Tokenizer(WordLevel({"<end>": 0, "<padding>": 1}, unk_token="<end>")).to_str()
        chat = pretrained.Chat(words, template="", end="<end>", padding="<padding>", context_limit=CONTEXT)
        pretrained.write(folder, CONFIG, init_params(CONFIG, jax.random.key(0)), chat)
        ours, our_greedy = asyncio.run(run_engine(folder, texts))
        theirs, their_greedy = run_torch(python, folder, texts)
    tokens = tokens_of(texts)
    print(f"{EPISODES} episodes x {TURNS} turns, {tokens:,} tokens; greedy tokens equal: {np.mean(our_greedy == their_greedy):.1%}")
    fast = report("embedded engine", [tokens / each for each in ours])
    slow = report("transformers.generate", [tokens / each for each in theirs])
    print(f"ratio of medians: {fast / slow:.1f}")


if __name__ == "__main__":
    main()
