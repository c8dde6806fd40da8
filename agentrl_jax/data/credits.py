"""Credit that was computed later, in a file beside the store: what the viewer shows, and no part of any record."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgpack
import numpy as np
from numpy.typing import NDArray

from agentrl_jax.data.frames import Content, FrameWriter, encode, scan

_CONTENT = Content(b"CRED", "a credit file", "Delete it and compute the credit again from the episodes")


class CreditWriter(FrameWriter):
    """Appends credit; makes the file, or goes on with an earlier one."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, _CONTENT)

    def append(self, credit: Mapping[str, Sequence[NDArray[np.float32]]]) -> None:
        """Append in one write, by episode id, the advantages f32[n] of the tokens of each segment. A later one replaces an earlier one."""
        self.write(b"".join(encode(0, _pack(episode, segments)).raw for episode, segments in credit.items()))


def read_credits(path: Path) -> Iterator[tuple[str, tuple[NDArray[np.float32], ...]]]:
    """Episode ids with the advantages f32[n] of each segment, as written: `dict(read_credits(path))` has the newest of each."""
    for frame in scan(path, _CONTENT):
        episode, segments = msgpack.unpackb(frame.payload)
        yield episode, tuple(np.frombuffer(data, "<f4").astype(np.float32, copy=False) for data in segments)


def _pack(episode: str, segments: Sequence[NDArray[np.float32]]) -> bytes:
    for values in segments:
        if values.dtype != np.float32 or values.ndim != 1:
            raise ValueError(f"credit of episode {episode}: advantages must be f32[n] per segment, got {values.dtype}{list(values.shape)}")
    return msgpack.packb([episode, [values.astype("<f4", copy=False).tobytes() for values in segments]]) or b""
