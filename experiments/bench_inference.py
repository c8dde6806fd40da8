"""Speed of a real vLLM server on this machine's CPUs beside the embedded engine, of our client, and of weight pushes.

    make vllm                                          # once: vLLM in an environment of its own
    python -m experiments.bench_inference [--venv .venv-vllm]

speed   The 64 episodes of bench_engine, new ones in every repeat, at the engine and at a server by turns, with the same weights in
        f32. Both keep what they computed of an episode: the engine all of it, in its row of the cache; vLLM whole blocks of 32 tokens.
        Both have both cores: the engine for XLA's threads; vLLM for one thread that computes, its HTTP server, and our client, which the
        engine does without. Counted as in bench_engine. Before that both play a greedy turn, and our own forward scores what each
        samples at temperature 1.
client  What `VLLM.generate` adds to a request that was encoded before and whose answer nobody parses, sent by httpx: routing, building
        and encoding, parsing, checking. Differences in ms a request:
          time  of 1 token, nothing else running, to httpx over a connection that stays open: median of 200 pairs. Ours opens a connection
                for each request; "connection" is what the same costs httpx
          CPU   of this process, 64 requests at once, each of 200 tokens for 16, to httpx with a connection for each request. With
                connections that stay open httpx takes more: it looks through all of them at every request
push    `publish` through memory, after a first one: seconds for all of it; and those without a token of a completion that runs meanwhile:
        gaps between tokens longer than 99 % of those before and after, summed, and the longest. Another process watches, as this one is
        busy. After each, a completion bears the new version, and log-probs of the new weights by our own forward.

Four minutes; a busy machine shows in every figure. Exits with 1 where vLLM is missing, or a check does not hold.
"""

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx
import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from agentrl_jax.chat import tokenizer
from agentrl_jax.inference.engine import Engine
from agentrl_jax.inference.protocol import Completion, InferenceError, Sampling
from agentrl_jax.inference.publish import publish
from agentrl_jax.inference.vllm import VLLM
from agentrl_jax.inference.vllm_server import serve
from agentrl_jax.models.decoder import Decoder, ModelConfig, Params, init_params, unembed
from agentrl_jax.models.policy import Policy
from experiments import bench_engine
from experiments.bench_engine import EPISODES, Texts, greedy_turn, make_texts, play_all, report, tokens_of

SMALL = replace(bench_engine.CONFIG, head_dim=32)  # vLLM has no heads of 24 on CPUs
MIDDLE = ModelConfig(
    vocab_size=8192, hidden_size=384, num_layers=8, num_heads=6, num_kv_heads=2, head_dim=64, intermediate_size=1024, qk_norm=False
)
LARGE = ModelConfig(  # the shape of SmolLM2-135M
    vocab_size=49152, hidden_size=576, num_layers=30, num_heads=9, num_kv_heads=3, head_dim=64, intermediate_size=1536, qk_norm=False
)
CONTEXT = 1024
REPEATS, PAIRS, ROUNDS, PUSHES = 5, 200, 4, 3
TOLERANCE = 1e-4  # nats, between log-probs of two f32 forwards


@dataclass(frozen=True)
class Served:
    """A policy, and a server and a client that have it."""

    config: ModelConfig
    params: Params
    url: str
    sampler: VLLM

    @property
    def size(self) -> str:
        return f"{sum(x.size for x in jax.tree.leaves(self.params)) / 1e6:.1f}M"


@contextlib.asynccontextmanager
async def served(config: ModelConfig, venv: Path) -> AsyncIterator[Served]:
    """Random weights in a server of their own."""
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    # Scales of norms near 1, all else near 0.
    params = jax.tree.map(lambda x: jnp.asarray((x.ndim == 1) + np.float32(0.02) * rng.standard_normal(x.shape, np.float32)), shapes)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "policy"
        Policy(config, params, tokenizer.train(["two words"], 300)).write(folder, context_limit=CONTEXT)
        async with (
            serve(folder, venv=venv, cache_bytes=128 * 2**20) as server,
            VLLM([server.url], concurrency=EPISODES, deadline=120) as sampler,
        ):
            yield Served(config, params, server.url, sampler)


@partial(jax.jit, static_argnums=0)
def logprobs(config: ModelConfig, params: Params, rows: jax.Array) -> jax.Array:
    """f32[B, T - 1]: log-prob of each token after the first, by the trainer's forward."""
    at = jnp.broadcast_to(jnp.arange(rows.shape[1]), rows.shape)
    hidden = Decoder(config).apply({"params": params}, rows, at, jnp.ones_like(rows))
    assert isinstance(hidden, jax.Array)
    return jnp.take_along_axis(jax.nn.log_softmax(hidden[:, :-1] @ unembed(params).T), rows[:, 1:, None], axis=2)[:, :, 0]


def apart(config: ModelConfig, params: Params, texts: Texts, episodes: list[list[Completion]]) -> float:
    """Largest difference of the actions' log-probs, in nats, from those of our forward. Raises InferenceError above TOLERANCE."""
    rows, told = [], []
    for row, actions in zip(texts, episodes, strict=True):
        pairs = list(zip(row, actions, strict=True))
        rows.append(np.concatenate([part for text, action in pairs for part in (text, action.tokens)]))
        told.append(np.concatenate([part for text, action in pairs for part in (np.full(len(text), np.nan), action.logprobs)]))
    longest = max(map(len, rows))
    padded = np.stack([np.pad(row, (0, longest - len(row))) for row in rows])
    ours = np.asarray(logprobs(config, params, jnp.asarray(padded)))
    largest = max(float(np.nanmax(np.abs(own[: len(row) - 1] - row[1:]))) for own, row in zip(ours, told, strict=True))
    if not largest <= TOLERANCE:
        raise InferenceError(f"log-probs differ from those of our forward by {largest:.2g}, more than {TOLERANCE:g}: not the same model")
    return largest


async def speed(at: Served) -> None:
    async with Engine(at.config, at.params, context_limit=bench_engine.CONTEXT, slots=EPISODES) as engine:
        await engine.warm_up()
        samplers = {"embedded engine": engine, "vLLM server": at.sampler}
        texts = make_texts()
        greedy = [await greedy_turn(sampler, texts) for sampler in samplers.values()]
        found = [apart(at.config, at.params, texts, await play_all(sampler, texts)) for sampler in samplers.values()]
        same, off = np.mean(greedy[0] == greedy[1]), ", ".join(f"{each:.0e}" for each in found)
        print(f"speed   {at.size} parameters, {EPISODES} episodes; greedy tokens equal: {same:.1%}; log-probs off by {off}")
        speeds: dict[str, list[float]] = {name: [] for name in samplers}
        for repeat in range(REPEATS):
            texts = make_texts(1 + repeat)
            for name, sampler in samplers.items():
                began = time.perf_counter()
                await play_all(sampler, texts)
                speeds[name].append(tokens_of(texts) / (time.perf_counter() - began))
    ours, theirs = (report(name, each) for name, each in speeds.items())
    print(f"ratio of medians: {ours / theirs:.2f}", flush=True)


def request(at: Served, prompt: NDArray[np.int32], sampling: Sampling) -> bytes:
    """What `VLLM` sends, in bytes."""
    [server] = at.sampler.servers
    params = {"max_tokens": sampling.max_tokens, "temperature": 1.0, "seed": sampling.seed, "stop_token_ids": [], "ignore_eos": True}
    params |= {"logprobs": 0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "detokenize": False}
    params |= {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}
    return json.dumps(
        {
            "model": server.model,
            "cache_salt": f"version {server.version}",
            "token_ids": prompt.tolist(),
            "sampling_params": params,
        }
    ).encode()


async def client(at: Served) -> None:
    url = at.url + at.sampler.servers[0].path
    headers = {"Content-Type": "application/json"}
    rng = np.random.default_rng(0)
    open_ones, no_open_ones = (httpx.Limits(max_connections=None, max_keepalive_connections=count) for count in (None, 0))
    async with (
        httpx.AsyncClient(trust_env=False, timeout=60, limits=open_ones) as kept,
        httpx.AsyncClient(trust_env=False, timeout=60, limits=no_open_ones) as new,
    ):

        async def bare(http: httpx.AsyncClient, body: bytes) -> None:
            (await http.post(url, content=body, headers=headers)).raise_for_status()

        def ways(size: int, count: int) -> dict[str, Callable[[], Awaitable[object]]]:
            prompt, sampling = rng.integers(0, at.config.vocab_size, size).astype(np.int32), Sampling(count, seed=1)
            body = request(at, prompt, sampling)
            return {
                "ours": lambda: at.sampler.generate(prompt, sampling, session="client"),
                "kept": partial(bare, kept, body),
                "new": partial(bare, new, body),
            }

        seconds: dict[str, list[float]] = {"ours": [], "kept": [], "new": []}
        works = ways(60, 1)
        for pair in range(PAIRS + 10):
            for name in sorted(works, key=lambda name: (pair + list(works).index(name)) % 3):
                began = time.perf_counter()
                await works[name]()
                seconds[name].append(time.perf_counter() - began)
        ours, kept_open, anew = (1e3 * np.array(each[10:]) for each in seconds.values())
        print(
            f"client  time  {np.median(ours):.2f} ms, httpx alone {np.median(kept_open):.2f}: adds {np.median(ours - kept_open):.2f} ms, "
            f"of it connection {np.median(anew - kept_open):.2f}"
        )

        cpu: dict[str, list[float]] = {"ours": [], "kept": [], "new": []}
        for _ in range(ROUNDS):
            works = [ways(200, 16) for _ in range(EPISODES)]
            for name, found in cpu.items():
                began = time.process_time()
                for _ in range(3):
                    await asyncio.gather(*(work[name]() for work in works))
                found.append((time.process_time() - began) / (3 * EPISODES) * 1e3)
        await at.sampler.release("client")
    ours, kept_open, anew = (np.median(each[1:]) for each in cpu.values())
    print(
        f"client  CPU   {ours:.2f} ms, httpx alone {anew:.2f}: adds {ours - anew:.2f} ms; httpx over open connections {kept_open:.2f}",
        flush=True,
    )


def watch(url: str, body: bytes, pipe: Connection) -> None:
    """In a process of its own: sample on and on until there is something in the pipe, then send when each token came."""
    times: list[float] = []
    with httpx.Client(trust_env=False, timeout=60) as http:
        while not pipe.poll():
            with http.stream("POST", url, content=body, headers={"Content-Type": "application/json"}) as answer:
                for _ in answer.iter_raw():
                    times.append(time.monotonic())
                    if len(times) == 1:
                        pipe.send("first")
                    if pipe.poll():
                        break
    pipe.send(times)


async def push(at: Served) -> None:
    prompt = np.arange(1, 9, dtype=np.int32)
    body: dict[str, Any] = json.loads(request(at, prompt, Sampling(CONTEXT - len(prompt), seed=0)))
    ours, theirs = multiprocessing.Pipe()
    arguments = (at.url + at.sampler.servers[0].path, json.dumps(body | {"stream": True}).encode(), theirs)
    watcher = multiprocessing.get_context("spawn").Process(target=watch, args=arguments, daemon=True)
    watcher.start()
    theirs.close()
    params, largest = at.params, 0.0
    spans: list[tuple[float, float]] = []

    async def timed(url: str, *, params: Params, version: int) -> None:
        began = time.monotonic()
        await publish([url], at.config, params, version)
        spans.append((began, time.monotonic()))

    try:
        await asyncio.to_thread(ours.recv)
        for version in range(1, 2 + PUSHES):
            params = jax.tree.map(lambda x: 1.1 * x, params)
            await asyncio.sleep(0.5)
            await at.sampler.update(partial(timed, params=params, version=version), version)
            done = await at.sampler.generate(prompt, Sampling(16, seed=0), session="push")
            if not (done.versions == version).all():
                raise InferenceError(f"{at.url}: weights of version {version} were pushed, it samples from {done.versions}")
            largest = max(largest, apart(at.config, params, [[prompt]], [[done]]))
        await asyncio.sleep(0.5)
        ours.send("end")
        times = np.array(await asyncio.to_thread(ours.recv))
    finally:
        watcher.kill()
        watcher.join()
    seconds = [end - began for began, end in spans[1:]]
    gaps = np.diff(times)
    during = [(times[1:] > began) & (times[:-1] < end) for began, end in spans]
    usual = np.quantile(gaps[~np.any(during, axis=0)], 0.99)
    still = [gaps[those & (gaps > usual)].sum() for those in during[1:]]
    longest = [gaps[those].max() for those in during[1:]]
    print(
        f"push    {at.size:>6}  {np.median(seconds):.2f} s (min {min(seconds):.2f}, max {max(seconds):.2f}, {PUSHES} repeats)   no token "
        f"for {np.median(still):.2f} s, longest gap {np.median(longest):.2f}, without a push {usual:.3f}   log-probs off by {largest:.0e}",
        flush=True,
    )


async def bench(venv: Path) -> None:
    async with served(SMALL, venv) as small:
        await speed(small)
        await client(small)
        await push(small)
    for config in (MIDDLE, LARGE):
        async with served(config, venv) as larger:
            await push(larger)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench_inference", description="Speed of vLLM on CPUs, of our client, of weight pushes.")
    parser.add_argument("--venv", type=Path, default=Path(".venv-vllm"), help="where `make vllm` put vLLM (default .venv-vllm)")
    options = parser.parse_args(arguments)
    try:
        asyncio.run(bench(options.venv))
    except InferenceError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
