"""What a small job of a shell's user consists of, and what such jobs are made of."""

import io
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

WORDS = """
amber anchor apple arrow atlas badge basin beacon birch bottle branch bridge canyon carbon castle cedar cellar circle cobalt comet copper
coral cotton crane crystal delta desert ember engine falcon feather forest garden glacier granite hammer harbor hazel island ivory jasper
kettle ladder lantern lemon linen lotus maple marble meadow mirror needle nickel ocean olive orchid oyster paper pebble pepper pillow
planet plaster pocket prairie quartz rabbit ribbon river rocket saddle saffron sailor salmon shadow silver sparrow spiral spruce stone
summit sunset tunnel turtle valley velvet violet walnut willow window winter yarrow zephyr zinc
""".split()  # noqa: SIM905 - a list of a line each would hide them


@dataclass(frozen=True)
class Want:
    """What has to be at a path; a final line end more or less does not matter.

    content: of a regular file; None for any
    mode:    its permission bits; None for any
    link:    a symbolic link that leads there, as a relative path
    members: an archive of exactly these regular files, name -> content
    gone:    nothing
    """

    content: bytes | None = None
    mode: int | None = None
    link: str | None = None
    members: Mapping[str, bytes] | None = None
    gone: bool = False


@dataclass(frozen=True)
class Draft:
    """A job. `right` and `nearly` are commands; files that `want` does not name have to stay as they are."""

    prompt: str
    files: Mapping[str, bytes]
    want: Mapping[str, Want]
    right: Sequence[str]
    nearly: Sequence[str]


@dataclass
class Names:
    """Words, each drawn once."""

    rng: Random
    left: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.left = self.rng.sample(WORDS, len(WORDS))

    def __call__(self) -> str:
        return self.left.pop()

    def many(self, least: int, most: int) -> list[str]:
        return [self() for _ in range(self.rng.randint(least, most))]


def some_text(rng: Random, lines: int = 3) -> bytes:
    """Lines of words."""
    return "".join(" ".join(rng.choices(WORDS, k=rng.randint(2, 6))) + "\n" for _ in range(lines)).encode()


def as_lines(lines: Sequence[object]) -> bytes:
    """Each on a line."""
    return "".join(f"{line}\n" for line in lines).encode()


def spread(rng: Random, names: Names, top: str, ending: str, least: int) -> list[str]:
    """`least` + 2 paths with an ending, below a folder: one right in it, one deeper, the others anywhere."""
    a, b = names(), names()
    deep = [f"{top}/{a}", f"{top}/{a}/{b}", f"{top}/{b}"]
    return [
        f"{folder}/{name}.{ending}"
        for folder, name in zip((top, rng.choice(deep), *rng.choices([top, *deep], k=least)), names.many(least + 2, least + 2), strict=True)
    ]


def as_tar(members: Mapping[str, bytes]) -> bytes:
    """An archive, the same bytes everywhere, which a compressed one would not be."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name, content in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()
