"""A `tokenizers` file with two ways in: ordinary text, which can never become markup, and markup that we wrote ourselves.

Ids are the only currency between host and model; text is made of them to read tool calls and to show people, never to make ids again.
"""

import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

# Alternatives, in order: an escape such as \n in JSON (else it would stick to the next word); a word with one leading space or sign;
# a single digit; a run of punctuation; line ends; spaces. Every character is matched by exactly one of them.
_PIECES = r"\\\S?|[^\r\n\p{L}\p{N}\\]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\\]+|\s*[\r\n]+|\s+(?!\S)|\s+"


def train(texts: Iterable[str], vocab_size: int, scaffold: Sequence[str] = ()) -> "ChatTokenizer":
    """Train a byte-level BPE of at most `vocab_size` ids; the same texts give the same file.

    texts:    what the policy will read and write, tool calls in their JSON form included
    scaffold: fixed strings of the tool calls that become one token each (see `renderer.scaffolding`)

    Ids in order: 256 bytes, merges, `CONTROL`, `TAGS`, `scaffold`. Raises ValueError where no room is left for a merge.
    """
    merges = vocab_size - len(CONTROL) - len(TAGS) - len(scaffold)
    if merges < 256:
        raise ValueError(f"vocab_size {vocab_size} is too small: 256 bytes and {vocab_size - merges} added tokens are needed")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=merges, initial_alphabet=alphabet, show_progress=False))
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in CONTROL])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in (*TAGS, *scaffold)])
    return ChatTokenizer(tokenizer.to_str())


class ChatTokenizer:
    """Encodes and decodes by a `tokenizer.json`, ours or a byte-level one of a pretrained model. `text` is that file's content.

    added: its control tokens and tags, as text
    """

    def __init__(self, source: str) -> None:
        """`source` is the text of a tokenizer.json. Raises ValueError where it has no added tokens."""
        self.text = source
        self._markup = Tokenizer.from_str(source)
        # Without its added tokens the same BPE can only make ordinary tokens: no text of a task or a tool can forge a turn or a call.
        self._plain = Tokenizer.from_str(json.dumps(json.loads(source) | {"added_tokens": []}))
        # Tags may be ordinary text: only a policy's own turn is searched for them. What ends turns is added, so text cannot spell it.
        self.added = frozenset(token.content for token in self._markup.get_added_tokens_decoder().values())
        if not self.added:
            raise ValueError("tokenizer.json: no added tokens; a chat needs one that ends a turn and that no text can spell")

    @classmethod
    def load(cls, path: Path) -> "ChatTokenizer":
        """Read a tokenizer.json."""
        return cls(path.read_text("utf-8"))

    def save(self, path: Path) -> None:
        """Write the tokenizer.json; `load` of it encodes alike."""
        path.write_text(self.text, "utf-8")

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included; a model's embedding needs at least as many rows."""
        return len(self._bytes)

    def has(self, token: str) -> bool:
        """Whether there is such an added token."""
        return token in self.added

    def id(self, token: str) -> int:
        """Id of an added token such as `<|im_end|>`. Raises KeyError where there is none."""
        found = self._markup.token_to_id(token)
        if found is None:
            raise KeyError(token)
        return found

    def encode(self, text: str) -> NDArray[np.int32]:
        """i32[n] of text that others wrote: ordinary tokens only, whatever the text spells."""
        return np.array(self._plain.encode(text, add_special_tokens=False).ids, np.int32)

    def encode_markup(self, text: str) -> NDArray[np.int32]:
        """i32[n] of text that we wrote: control tokens, tags and scaffolding become their own ids."""
        return np.array(self._markup.encode(text, add_special_tokens=False).ids, np.int32)

    def decode_bytes(self, tokens: NDArray[np.int32] | Sequence[int]) -> bytes:
        """The bytes the ids stand for, exactly. An id beyond the file (a padded embedding row) stands for nothing."""
        return b"".join(self._bytes[t] for t in map(int, tokens) if t < len(self._bytes))

    def decode(self, tokens: NDArray[np.int32] | Sequence[int]) -> str:
        """The text for people: bytes that are not UTF-8 are replaced."""
        return self.decode_bytes(tokens).decode("utf-8", errors="replace")

    @cached_property
    def _bytes(self) -> tuple[bytes, ...]:
        vocab = self._markup.get_vocab(with_added_tokens=True)
        added = self._markup.get_added_tokens_decoder()
        table = [b""] * (max(vocab.values()) + 1)
        for text, index in vocab.items():
            table[index] = text.encode() if index in added else bytes(_BYTE_OF[character] for character in text)
        return tuple(table)


def _byte_of_character() -> dict[str, int]:
    """The byte-level alphabet: printable Latin-1 bytes stand for themselves, the rest for U+0100 and on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_of_character()
