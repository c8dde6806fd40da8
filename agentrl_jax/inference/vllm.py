"""A `Sampler` over vLLM servers (0.32 or newer): token ids to and fro over HTTP, several servers as one.

Each completion comes from `POST /inference/v1/generate`, which answers with ids, log-probs and the version of the weights behind every
token; a server started without `--enable-scale-out` is asked by `POST /v1/completions` instead, which does not tell versions. Text is
never exchanged. Servers have to run with `--logprobs-mode processed_logprobs` (vLLM's default ignores the temperature): `check` makes
sure of that. What is compared with an independent forward, and how closely, is in tests/inference/test_sampler.py.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self, get_args

import httpx
import numpy as np
from numpy.typing import NDArray

from agentrl_jax.inference.fleet import Fleet, Server, ServerError
from agentrl_jax.inference.protocol import Completion, FinishReason, InferenceError, Sampling

Reference = Callable[[NDArray[np.int32], float], NDArray[np.float32]]
"""Log-probs by a forward of ours: tokens i32[n] and a temperature to f32[n - 1], of each token after the first."""

Push = Callable[[str], Awaitable[None]]
"""Gives weights to the server at a URL, under the name of their version. Raises InferenceError where the server does not take them."""

PUSHES = 4
"""Pushes in a row that a server may fail before an update gives up on it."""

TOKENS, COMPLETIONS = "/inference/v1/generate", "/v1/completions"

MIN_TEMPERATURE = 0.01
"""vLLM samples at this temperature whatever lower one is asked for; 0 is greedy (vllm/sampling_params.py)."""

FLOOR = -9999.0
"""What vLLM writes for a log-prob of minus infinity."""

_CONNECT = 5.0  # seconds to a connection
_CHECKED = 16  # tokens that `check` samples


@dataclass(eq=False)
class Endpoint(Server):
    """A server, as it described itself.

    model:   name it serves the policy under
    limit:   tokens of prompt and completion together
    path:    where it takes token ids
    version: of its weights, as far as known; salts its prefix cache, so that no prompt meets keys of other weights
    given:   what gave it its weights; None for those of its start, or for none that can be relied on
    refused: pushes in a row that failed
    """

    model: str = ""
    limit: int = 0
    path: str = TOKENS
    version: int = 0
    given: Push | None = None
    refused: int = 0


class VLLM:
    """A `Sampler` over the servers at `urls`: `async with VLLM(urls) as sampler`, from one event loop.

    version:     of the weights that the servers were started with; they call it "default"
    concurrency: requests that run at a server at once, best its --max-num-seqs; others wait here, which `Completion.queued` counts
    deadline:    seconds for one completion, retries and waiting included
    poll:        seconds from one health check of a server to the next
    patience:    seconds that an answer to a health check may take, twice in a row
    restart:     kills the server at a URL and starts it again with the weights of its start; None for servers that others look after

    Entering raises InferenceError for a server that does not answer or is no vLLM: all of `urls` have to be up once.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        version: int = 0,
        concurrency: int = 256,
        deadline: float = 600.0,
        poll: float = 2.0,
        patience: float = 30.0,
        restart: Callable[[str], Awaitable[None]] | None = None,
    ) -> None:
        self._urls = [url.rstrip("/") for url in urls]
        if not urls or len(set(self._urls)) < len(urls):
            raise ValueError(f"urls must name every server once, got {list(urls)}")
        for url in urls:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"{url}: the URL of a server begins with http:// or https://")
        self._first, self._version = version, version
        self._concurrency, self._deadline, self._poll, self._patience = concurrency, deadline, poll, patience
        self._restarter, self._push = restart, None
        self._fleet: Fleet[Endpoint] | None = None

    async def __aenter__(self) -> Self:
        # No proxy of the environment stands between us and our servers. A connection serves one request: of idle ones, the pool would close
        # many within whichever call comes next, and leave them open if that call is cancelled meanwhile.
        timeout, limits = httpx.Timeout(None, connect=_CONNECT), httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._http = httpx.AsyncClient(timeout=timeout, limits=limits, trust_env=False)
        try:
            servers = await asyncio.gather(*(self._describe(url) for url in self._urls))
        except BaseException:
            await self._http.aclose()
            raise
        self._limit = min(server.limit for server in servers)
        restart = None if self._restarter is None else self._restart
        self._fleet = Fleet(servers, self._probe, poll=self._poll, deadline=self._deadline, restart=restart)
        self._fleet.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        fleet, self._fleet = self._fleet, None
        if fleet is not None:
            await fleet.close()
        await self._http.aclose()

    @property
    def context_limit(self) -> int:
        return self._limit

    @property
    def version(self) -> int:
        """Version of the weights that every server should have."""
        return self._version

    @property
    def servers(self) -> tuple[Endpoint, ...]:
        return self._running.servers

    async def update(self, push: Push, version: int) -> None:
        """Have every server that is well serve new weights: `push(url)` gives them. Later prompts share no cache with earlier ones.

        `push` is kept: a server that is out of service now, or comes back with other weights, gets no requests until it was given these.
        Raises InferenceError where no server takes them within the deadline, or all fail PUSHES times.
        """
        fleet, self._push, self._version = self._running, push, version
        for server in self.servers:
            server.refused = 0
            server.doubt()

        def served() -> bool:
            well = [server for server in self.servers if server.well]
            return bool(well) and all(server.given is self._push for server in well)

        def hopeless() -> bool:
            return all(server.lost or server.refused >= PUSHES for server in self.servers)

        with suppress(TimeoutError):
            async with asyncio.timeout(self._deadline):
                await fleet.until(lambda: served() or hopeless())
        if not served():
            raise InferenceError(f"no server takes version {version}: {fleet.faults() or f'not done after {self._deadline:g} s'}")

    async def generate(self, prompt: NDArray[np.int32], sampling: Sampling, *, session: str) -> Completion:
        """See `Sampler.generate`. Cancelling closes the connection, at which the server stops sampling.

        After a fault of a server the same request goes to another one. Where the servers' weights change meanwhile, `versions` says
        which token came from which; by /v1/completions it says which weights the server had when the request was sent.
        """
        if not 0 < len(prompt) < self._limit:
            raise ValueError(f"a prompt of {len(prompt)} tokens: it needs at least 1, and at most {self._limit - 1} for one more to fit")
        if 0 < sampling.temperature < MIN_TEMPERATURE:
            raise ValueError(f"vLLM cannot sample at temperature {sampling.temperature}: use 0, or {MIN_TEMPERATURE} and more")
        began = time.perf_counter()

        async def send(server: Endpoint) -> Completion:
            return await self._sample(server, prompt, sampling, queued=time.perf_counter() - began)

        return await self._running.call(session, send)

    async def release(self, session: str) -> None:
        """The session is over; the server drops its cache when it needs the room."""
        self._running.release(session)

    async def check(self, reference: Reference, *, tolerance: float = 1e-3) -> None:
        """Sample at temperature 0.5 from every server and compare its log-probs with `reference`, which runs in a thread.

        tolerance: largest difference; 1e-4 is usual in float32, where a server in bfloat16 is off by up to 0.1

        Raises InferenceError where they differ: raw log-probs, other weights, or another precision.
        """
        await asyncio.gather(*(self._check(server, reference, tolerance) for server in self.servers))

    async def _check(self, server: Endpoint, reference: Reference, tolerance: float) -> None:
        prompt = np.arange(1, max(2, min(9, self._limit - 1)), dtype=np.int32)
        count = min(_CHECKED, self._limit - len(prompt))
        try:
            done = await server.attempt(lambda: self._sample(server, prompt, Sampling(count, seed=0, temperature=0.5), queued=0.0))
        except ServerError as fault:
            raise InferenceError(f"{server.url}: {fault}") from fault
        whole = np.concatenate([prompt, done.tokens])
        apart = {}
        for temperature in (0.5, 1.0):
            expected = await asyncio.to_thread(reference, whole, temperature)
            apart[temperature] = float(np.max(np.abs(done.logprobs - expected[len(prompt) - 1 :])))
        if apart[0.5] <= tolerance:
            return
        if apart[1.0] <= tolerance:
            raise InferenceError(
                f"{server.url} ignores the temperature in its log-probs: start vLLM with --logprobs-mode processed_logprobs"
            )
        raise InferenceError(
            f"{server.url}: log-probs differ from ours by up to {apart[0.5]:.2g} (tolerance {tolerance:g}): it has other weights, or "
            "another precision. Push the weights, or start vLLM with --dtype float32"
        )

    @property
    def _running(self) -> Fleet[Endpoint]:
        if self._fleet is None:
            raise InferenceError("the client is not running: use it within `async with VLLM(...)`")
        return self._fleet

    async def _describe(self, url: str) -> Endpoint:
        """What the server says of itself at the start."""
        try:
            models = _json(await self._http.get(f"{url}/v1/models", timeout=self._patience))
            model, limit = models["data"][0]["id"], models["data"][0]["max_model_len"]
            # An empty request is refused by a server that would take a better one.
            taken = (await self._http.post(url + TOKENS, json={}, timeout=self._patience)).status_code in (400, 422)
        except (httpx.RequestError, ServerError) as error:
            raise InferenceError(f"{url}: no answer ({_told(error)}); start the server, or take it off the list") from error
        except (KeyError, IndexError, TypeError) as error:
            raise InferenceError(f"{url}: /v1/models does not answer as vLLM does ({error!r}); is this a vLLM server?") from error
        if not isinstance(model, str) or not isinstance(limit, int) or limit < 2:
            raise InferenceError(f"{url}: serves {model!r} with max_model_len {limit!r}; is this a vLLM server?")
        return Endpoint(
            url,
            asyncio.Semaphore(self._concurrency),
            model=model,
            limit=limit,
            path=TOKENS if taken else COMPLETIONS,
            version=self._first,
        )

    async def _probe(self, server: Endpoint) -> None:
        """Is the engine alive, and are its weights those of the fleet? If not, it is given them. No one else gives it any meanwhile."""
        healthy, info, paused = [await self._look(server, path) for path in ("/health", "/weight_info", "/is_paused")]
        if healthy.status_code != 200:
            raise ServerError(f"/health answers HTTP {healthy.status_code}")
        # Without VLLM_SERVER_DEV_MODE=1 it tells neither, and cannot get other weights than those of its start.
        label = "default" if info.status_code == 404 else _json(info)["weight_version"]
        # The engine's own word, unlike that of /health, so that one that hangs is found out.
        halted = paused.status_code != 404 and _json(paused)["is_paused"]
        if self._push is None:
            server.version = self._number(label)
            if server.version < self._version:
                raise ServerError(f"it has weights of version {server.version}, the fleet those of {self._version}: push them to it")
        elif server.given is not self._push or label != str(self._version) or halted:
            await self._give(server, self._push, self._version)

    async def _look(self, server: Endpoint, path: str) -> httpx.Response:
        """Asks twice: while a step trains our own event loop stands still, and then an answer may lie there too late."""
        for last in (False, True):
            try:
                return await self._http.get(server.url + path, timeout=self._patience)
            except httpx.TimeoutException:
                if last:
                    raise ServerError(f"{path}: no answer in {self._patience:g} s, twice") from None
            except httpx.RequestError as error:
                raise ServerError(f"{path}: {_told(error)}") from error
        raise AssertionError

    async def _give(self, server: Endpoint, push: Push, version: int) -> None:
        """Where it fails, the server may have any weights, or be paused: it is given them anew however well it looks."""
        server.given = None
        try:
            await push(server.url)
        except InferenceError as error:
            server.refused += 1
            raise ServerError(str(error)) from error
        server.given, server.version, server.refused = push, version, 0

    async def _restart(self, server: Endpoint) -> None:
        server.given = None
        assert self._restarter is not None
        await self._restarter(server.url)

    async def _sample(self, server: Endpoint, prompt: NDArray[np.int32], sampling: Sampling, *, queued: float) -> Completion:
        """Raises ServerError for what another try may mend, InferenceError for what none will."""
        budget, version = min(sampling.max_tokens, self._limit - len(prompt)), server.version
        try:
            reply = await self._http.post(server.url + server.path, json=_request(server, prompt, sampling, budget))
        except httpx.RequestError as error:
            raise ServerError(_told(error)) from error
        answer = _json(reply)
        try:
            completion = self._read(answer, len(prompt), version, queued, by_tokens=server.path == TOKENS)
            _verify(completion, sampling, budget)
        except (KeyError, IndexError, TypeError, AttributeError, ValueError, OverflowError) as error:
            raise InferenceError(f"{server.url}{server.path}: not an answer of vLLM 0.32 or newer: {_told(error)}") from error
        return completion

    def _read(self, answer: Any, prompt_size: int, version: int, queued: float, *, by_tokens: bool) -> Completion:
        choice, usage = answer["choices"][0], answer["usage"]
        if choice["finish_reason"] not in get_args(FinishReason):
            raise ValueError(f"finish_reason {choice['finish_reason']!r}")
        if usage["prompt_tokens"] != prompt_size:
            raise ValueError(f"{usage['prompt_tokens']} prompt tokens where {prompt_size} were sent")
        tokens = np.array(choice["token_ids"], np.int32)
        scores = choice["logprobs"] or {}
        versions = np.full(len(tokens), version, np.int32)
        if by_tokens:
            content = scores.get("content") or []
            if [entry["token_id"] for entry in content] != tokens.tolist():
                raise ValueError("log-probs of other tokens than those sampled")
            logprobs = np.array([entry["logprob"] for entry in content], np.float32)
            end = 0
            for span in choice["weight_versions"] or []:
                if span["start"] != end:
                    raise ValueError("weight_versions leaves tokens out")
                end = span["end"]
                versions[span["start"] : end] = self._number(span["version"])
            if end != len(tokens):
                raise ValueError(f"weight_versions covers {end} of {len(tokens)} tokens")
        else:
            logprobs = np.array(scores.get("token_logprobs") or [], np.float32)
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return Completion(tokens, logprobs, versions, choice["finish_reason"], int(cached), queued)

    def _number(self, label: str) -> int:
        """The version behind a server's label of its weights."""
        if label == "default":
            return self._first
        if not label.isdecimal():
            raise ServerError(f"its weights are labelled {label!r}: the label has to be the number of their version")
        return int(label)


def _request(server: Endpoint, prompt: NDArray[np.int32], sampling: Sampling, budget: int) -> dict[str, Any]:
    """A request that leaves nothing to the defaults of the server or of the model folder."""
    params = {
        "max_tokens": budget,
        "temperature": sampling.temperature,
        "seed": _seed(sampling.seed),
        "stop_token_ids": list(sampling.stop),
        "ignore_eos": True,  # `stop` says where to stop, and nothing else does
        "logprobs": 0,  # that of the sampled token alone
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
    }
    common = {"model": server.model, "cache_salt": f"version {server.version}"}
    if server.path == TOKENS:
        return common | {"token_ids": prompt.tolist(), "sampling_params": params | {"detokenize": False}}
    return common | params | {"prompt": prompt.tolist(), "return_token_ids": True}


def _seed(seed: int) -> int:
    """All 63 bits mixed into all bits: torch's CPU generator looks at the lower 32 alone, and neighbouring seeds should not be alike."""
    return int(np.random.SeedSequence(seed).generate_state(1, np.uint64)[0] >> np.uint64(1))


def _verify(completion: Completion, sampling: Sampling, budget: int) -> None:
    """Raises ValueError for a completion that the request cannot have led to."""
    n, reason = len(completion.tokens), completion.finish_reason
    if n > budget or (n < budget and reason == "length") or (n == 0 and reason == "stop"):
        raise ValueError(f"{n} tokens of {budget}, finish_reason {reason!r}")
    if reason == "stop" and completion.tokens[-1] not in sampling.stop:
        raise ValueError(f"it stopped at id {completion.tokens[-1]}, which is no stop id; start it with --generation-config vllm")
    if completion.logprobs.shape != completion.tokens.shape:
        raise ValueError(f"{n} tokens, but log-probs {completion.logprobs.shape}")
    if not ((completion.logprobs > FLOOR) & (completion.logprobs < 1e-3)).all():
        raise ValueError("a sampled token has a log-prob that is not finite, or above 0")


def _json(reply: httpx.Response) -> Any:
    """The body of a good answer. Raises ServerError where the server is at fault, InferenceError where the request is."""
    if reply.status_code in (408, 429) or reply.status_code >= 500:
        raise ServerError(f"{reply.url.path} answers HTTP {reply.status_code}: {_message(reply)}")
    if reply.status_code != 200:
        raise InferenceError(f"{reply.url}: HTTP {reply.status_code}: {_message(reply)}")
    try:
        return reply.json()
    except ValueError as error:
        raise InferenceError(f"{reply.url}: the answer is not JSON ({error})") from error


def _message(reply: httpx.Response) -> str:
    """What vLLM has to say about an error, or the beginning of whatever it was."""
    try:
        return str(reply.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return reply.text[:200]


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
