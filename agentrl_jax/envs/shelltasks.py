"""Small jobs of a shell's user, drawn at random: what is asked for, the files, and what has to be there in the end.

Each kind knows commands that do the job and commands that do it nearly: those look right to whoever runs them, and something among the
files always tells the two apart.
"""

import hashlib
from collections.abc import Callable, Sequence
from random import Random
from typing import TypeAlias

from agentrl_jax.envs.shelljobs import WORDS, Draft, Names, Want, as_lines, as_tar, some_text, spread


def count(rng: Random) -> Draft:
    """How many files of a kind. Nearly: in the top folder only."""
    names = Names(rng)
    top, answer = names(), f"{names()}.txt"
    ending, other = rng.sample(("csv", "log", "md", "py", "txt"), 2)
    paths = spread(rng, names, top, ending, rng.randint(3, 8))
    files = {path: some_text(rng, 1) for path in (*paths, *spread(rng, names, top, other, 2))}
    return Draft(
        f"How many .{ending} files are there in {top} and the folders below it? Write the number to {answer}.",
        files,
        {answer: Want(as_lines([len(paths)]))},
        [f"find {top} -name '*.{ending}' | wc -l > {answer}"],
        [f"ls {top} | grep -c '\\.{ending}$' > {answer}"],
    )


def rename(rng: Random) -> Draft:
    """Another ending. Nearly: in the top folder only."""
    names = Names(rng)
    top = names()
    old, new, other = rng.sample(("bak", "dat", "md", "old", "text", "txt"), 3)
    paths = spread(rng, names, top, old, rng.randint(2, 5))
    files = {path: some_text(rng, 1) for path in (*paths, *spread(rng, names, top, other, 1))}
    want = {path: Want(gone=True) for path in paths}
    want |= {f"{path.removesuffix(old)}{new}": Want(files[path]) for path in paths}
    move = f'mv "$f" "${{f%.{old}}}.{new}"; done'
    return Draft(
        f"Rename every .{old} file in {top} and the folders below it so that it ends in .{new} instead.",
        files,
        want,
        [f"find {top} -name '*.{old}' | while read f; do {move}"],
        [f"for f in {top}/*.{old}; do {move}"],
    )


def large(rng: Random) -> Draft:
    """Files of more than so many bytes. Nearly: or as many."""
    names = Names(rng)
    top, answer, size = names(), f"{names()}.txt", rng.randint(40, 400)
    paths = spread(rng, names, top, rng.choice(("bin", "dat")), rng.randint(4, 7))
    sizes = [size, size + rng.randint(1, 90), *(rng.choice((rng.randint(1, size), rng.randint(size + 1, 2 * size))) for _ in paths[2:])]
    right = sorted(path for path, n in zip(paths, sizes, strict=True) if n > size)
    return Draft(
        f"Write the paths of all files below {top} that have more than {size} bytes to {answer}, one a line, sorted, as {top}/... .",
        {path: b"x" * n for path, n in zip(paths, sizes, strict=True)},
        {answer: Want(as_lines(right))},
        [f"find {top} -type f -size +{size}c | sort > {answer}"],
        [f"find {top} -type f -size +{size - 1}c | sort > {answer}"],
    )


def addresses(rng: Random) -> Draft:
    """Who got a status. Nearly: or as many bytes."""
    names = Names(rng)
    log, answer, status = f"{names()}.log", f"{names()}.txt", rng.choice((403, 404, 500, 502))
    hosts = sorted({f"10.{rng.randint(0, 9)}.{rng.randint(0, 99)}.{rng.randint(1, 250)}" for _ in range(9)})
    decoy, *others = rng.sample(hosts, len(hosts))
    lines = [(host, rng.choice((200, 200, 301, status)), rng.randint(1000, 9999)) for host in rng.choices(others, k=14)]
    lines += [(others[0], status, 77), (decoy, 200, int(f"{status}{rng.randint(0, 9)}"))]
    rng.shuffle(lines)
    right = sorted({host for host, got, _ in lines if got == status})
    return Draft(
        f"Each line of {log} is: address, method, path, status, bytes. Write the addresses that got status {status} to {answer}, "
        "each once, sorted.",
        {log: as_lines([f"{host} GET /{rng.choice(WORDS)} {got} {size}" for host, got, size in lines])},
        {answer: Want(as_lines(right))},
        [f"awk '$4 == {status} {{print $1}}' {log} | sort -u > {answer}"],
        [f"grep ' {status}' {log} | cut -d' ' -f1 | sort -u > {answer}"],
    )


def busiest(rng: Random) -> Draft:
    """Who did something most often. Nearly: or anything else."""
    names = Names(rng)
    log, answer = f"{names()}.log", f"{names()}.txt"
    first, second, *others = names.many(5, 7)
    verb, other = rng.sample(("login", "logout", "upload", "delete"), 2)
    n = rng.randint(3, 6)
    lines = [(first, verb)] * n + [(second, verb)] * (n - 1) + [(second, other)] * 3
    lines += [(user, rng.choice((verb, other))) for user in others for _ in range(2)]
    rng.shuffle(lines)
    count = "sort | uniq -c | sort -nr | head -n 1 | awk '{print $2, $1}'"
    return Draft(
        f"Each line of {log} is a time, a user and what the user did. Who did {verb} most often? Write the user, a space and the number of "
        f"times to {answer}.",
        {log: as_lines([f"{i // 60:02}:{i % 60:02} {user} {what}" for i, (user, what) in enumerate(lines)])},
        {answer: Want(as_lines([f"{first} {n}"]))},
        [f"awk '$3 == \"{verb}\" {{print $2}}' {log} | {count} > {answer}"],
        [f"cut -d' ' -f2 {log} | {count} > {answer}"],
    )


def permissions(rng: Random) -> Draft:
    """Modes by ending. Nearly: in the top folder only."""
    names = Names(rng)
    top = names()
    (run, run_mode), (secret, secret_mode) = rng.choice((("sh", 755), ("py", 750), ("pl", 700))), rng.choice((("key", 600), ("pem", 400)))
    paths = [*spread(rng, names, top, run, 2), *spread(rng, names, top, secret, 1)]
    want = {path: Want(mode=int(str(run_mode if path.endswith(run) else secret_mode), 8)) for path in paths}
    files = {path: some_text(rng, 1) for path in (*paths, *spread(rng, names, top, "txt", 1))}
    return Draft(
        f"In {top} and the folders below it, give every .{run} file mode {run_mode} and every .{secret} file mode {secret_mode}.",
        files,
        {path: Want(files[path], want[path].mode) for path in paths},
        [f"find {top} -name '*.{ending}' -exec chmod {mode} {{}} +" for ending, mode in ((run, run_mode), (secret, secret_mode))],
        [f"chmod {run_mode} {top}/*.{run}; chmod {secret_mode} {top}/*.{secret}"],
    )


def pack(rng: Random) -> Draft:
    """An archive of some files. Nearly: of all."""
    names = Names(rng)
    top, answer = names(), f"{names()}.tar.gz"
    ending, other = rng.sample(("csv", "log", "md", "txt"), 2)
    paths = spread(rng, names, top, ending, rng.randint(2, 4))
    files = {path: some_text(rng, 2) for path in (*paths, *spread(rng, names, top, other, 1))}
    return Draft(
        f"Pack all .{ending} files in {top} and the folders below it, and no other files, into {answer}, with their paths as {top}/... .",
        files,
        {answer: Want(members={path: files[path] for path in paths})},
        [f"find {top} -name '*.{ending}' | sort | tar -czf {answer} -T -"],
        [f"tar -czf {answer} {top}"],
    )


def unpack(rng: Random) -> Draft:
    """An archive without its top folder. Nearly: with it."""
    names = Names(rng)
    archive, top, target = f"{names()}.tar", f"{names()}-{rng.randint(1, 9)}.{rng.randint(0, 9)}", names()
    members = {path: some_text(rng, 2) for path in spread(rng, names, top, "txt", rng.randint(1, 3))}
    return Draft(
        f"{archive} holds a folder {top}. Unpack it so that what lies in {top} lies in {target}.",
        {archive: as_tar(members)},
        {target + path.removeprefix(top): Want(content) for path, content in members.items()},
        [f"mkdir {target} && tar -xf {archive} -C {target} --strip-components=1"],
        [f"mkdir {target} && tar -xf {archive} -C {target}"],
    )


def total(rng: Random) -> Draft:
    """A sum over some rows. Nearly: and over those whose region begins alike."""
    names = Names(rng)
    table, answer = f"{names()}.csv", f"{names()}.txt"
    columns = rng.sample(("region", "item", "amount"), 3)
    region = rng.choice(("east", "north", "south", "west"))
    regions = [region, region, f"{region}{rng.choice(('ern', '-2', 'side'))}"]
    rows = [(where, rng.choice(WORDS), rng.randint(1, 900)) for where in regions + rng.choices((*regions, "centre"), k=rng.randint(4, 9))]
    rng.shuffle(rows)
    at = {name: 1 + i for i, name in enumerate(columns)}
    lines = [",".join(str(dict(zip(("region", "item", "amount"), row, strict=True))[name]) for name in columns) for row in rows]
    sum_up = f"{{s += ${at['amount']}}} END {{print s}}"
    return Draft(
        f"Add up the column amount of {table} over the rows whose region is {region}, and write the sum to {answer}.",
        {table: as_lines([",".join(columns), *lines])},
        {answer: Want(as_lines([sum(amount for where, _, amount in rows if where == region)]))},
        [f"awk -F, '${at['region']} == \"{region}\" {sum_up}' {table} > {answer}"],
        [f"grep {region} {table} | awk -F, '{sum_up}' > {answer}"],
    )


def order(rng: Random) -> Draft:
    """A table by a number. Nearly: by its digits."""
    names = Names(rng)
    table, answer, column = f"{names()}.csv", f"{names()}.csv", rng.choice(("amount", "price", "score", "weight"))
    amounts = [*rng.sample(range(2, 10), 2), *rng.sample(range(100, 200), 2), *rng.sample(range(20, 90), rng.randint(2, 5))]
    rows = [(name, amount) for name, amount in zip(names.many(len(amounts), len(amounts)), amounts, strict=True)]
    rng.shuffle(rows)
    sort = f"(head -n 1 {table}; tail -n +2 {table} | sort -t, -k2,2"
    return Draft(
        f"Write {table} to {answer}, sorted by {column} from the largest to the smallest, the header staying first.",
        {table: as_lines([f"name,{column}", *(f"{name},{amount}" for name, amount in rows)])},
        {answer: Want(as_lines([f"name,{column}", *(f"{name},{amount}" for name, amount in sorted(rows, key=lambda row: -row[1]))]))},
        [f"{sort}nr) > {answer}"],
        [f"{sort}r) > {answer}"],
    )


def config(rng: Random) -> Draft:
    """A setting in a section. Nearly: in all."""
    names = Names(rng)
    path, key = f"{names()}.conf", rng.choice(("port", "timeout", "workers"))
    sections = rng.sample(("cache", "client", "proxy", "server", "store"), rng.randint(3, 4))
    section, value = rng.choice(sections), rng.randint(1000, 9999)
    lines = {name: [f"name = {names()}", f"{key} = {rng.randint(1, 999)}", f"mode = {rng.choice(WORDS)}"] for name in sections}

    def text(changed: bool) -> bytes:
        fixed = {name: [f"{key} = {value}" if changed and name == section and line.startswith(key) else line for line in lines[name]]
                 for name in sections}  # fmt: skip
        return "\n".join(as_lines([f"[{name}]", *fixed[name]]).decode() for name in sections).encode()

    replace = f"s/^{key} = .*/{key} = {value}/"
    return Draft(
        f"In {path}, set {key} of the section [{section}] to {value}. Change nothing else.",
        {path: text(False)},
        {path: Want(text(True))},
        [f"sed -i '/^\\[{section}\\]/,/^\\[/ {replace}' {path}"],
        [f"sed -i '{replace}' {path}"],
    )


def newest(rng: Random) -> Draft:
    """A link to the highest version. Nearly: to the last in the alphabet."""
    names = Names(rng)
    top, link, major, minor = names(), names(), rng.randint(0, 9), rng.randint(10, 30)
    versions = {
        f"{major}.{minor}.{rng.randint(0, 9)}",
        f"{major}.9.{rng.randint(0, 30)}",
        *(f"{major}.{rng.randint(0, 8)}.1" for _ in "ab"),
    }
    right = max(versions, key=lambda version: [int(part) for part in version.split(".")])
    return Draft(
        f"The folders in {top} are named after versions. Make {link} a relative symbolic link to the folder of the newest version.",
        {f"{top}/{version}/{names()}": some_text(rng, 1) for version in sorted(versions)},
        {link: Want(link=f"{top}/{right}")},
        [f"ln -s {top}/$(ls {top} | sort -V | tail -n 1) {link}"],
        [f"ln -s {top}/$(ls {top} | sort | tail -n 1) {link}"],
    )


def duplicates(rng: Random) -> Draft:
    """Equal files but the first go. Nearly: files of equal length do."""
    names = Names(rng)
    top = names()
    paths = sorted(f"{top}/{name}" for name in names.many(7, 10))
    twice, like = some_text(rng, 2), some_text(rng, 1)
    other = bytes(reversed(like))  # as long, and another
    contents = [twice, twice, like, other, *(some_text(rng, 3) for _ in paths[5:]), rng.choice((twice, like))]
    rng.shuffle(contents)
    seen: set[bytes] = set()
    gone = [path for path, content in zip(paths, contents, strict=True) if content in seen or seen.add(content)]
    remove = "awk 'seen[$1]++ {print $2}' | xargs rm"
    return Draft(
        f"Some files in {top} have the same content. Of those that do, keep the one whose name "
        "comes first in the alphabet and remove the rest.",
        dict(zip(paths, contents, strict=True)),
        {path: Want(gone=True) for path in gone},
        [f"sha256sum {top}/* | sort -k2 | {remove}"],
        [f'for f in {top}/*; do echo "$(wc -c < $f) $f"; done | {remove}'],
    )


def checksums(rng: Random) -> Draft:
    """Files that do not match their sums. Nearly: and those that are missing."""
    names = Names(rng)
    sums, answer = f"{names()}.sums", f"{names()}.txt"
    paths = sorted(f"{name}.{rng.choice(('bin', 'img', 'iso'))}" for name in names.many(5, 9))
    missing, *broken = rng.sample(paths, rng.randint(2, 4))
    contents = {path: some_text(rng, 2) for path in paths}
    listed = [f"{hashlib.sha256(contents[path]).hexdigest()}  {path}" for path in paths]
    files = {path: contents[path] + b"x" * (path in broken) for path in paths if path != missing}
    check = f"sha256sum -c {sums} 2> /dev/null | grep 'FAILED"
    return Draft(
        f"{sums} lists the SHA-256 sums of files. Write the names of the files that are there and do not match "
        f"to {answer}, one a line, sorted.",
        {**files, sums: as_lines(listed)},
        {answer: Want(as_lines(sorted(broken)))},
        [f"{check}$' | cut -d: -f1 | sort > {answer}"],
        [f"{check}' | cut -d: -f1 | sort > {answer}"],
    )


def streams(rng: Random) -> Draft:
    """What a program says to standard error. Nearly: to both."""
    names = Names(rng)
    script, errors, code_file, code = f"{names()}.sh", f"{names()}.txt", f"{names()}.txt", rng.randint(1, 99)
    lines = [(rng.choice((True, False)), " ".join(rng.choices(WORDS, k=3))) for _ in range(rng.randint(4, 8))] + [
        (True, "ok"),
        (False, "late"),
    ]
    rng.shuffle(lines)
    program = [f"echo {text}" if out else f"echo {text} >&2" for out, text in lines]
    return Draft(
        f"Run `sh {script}`. Write what it prints to standard error, and nothing else, to {errors}, and its exit code to {code_file}.",
        {script: as_lines([*program, f"exit {code}"])},
        {errors: Want(as_lines([text for out, text in lines if not out])), code_file: Want(as_lines([code]))},
        [f"sh {script} 2> {errors} > /dev/null; echo $? > {code_file}"],
        [f"sh {script} > {errors} 2>&1; echo $? > {code_file}"],
    )


def words(rng: Random) -> Draft:
    """A word by another. Nearly: parts of words too."""
    names = Names(rng)
    top, old, new = names(), names(), names()
    paths = spread(rng, names, top, "txt", rng.randint(1, 3))
    plain = {path: rng.choices(WORDS, k=5) + [old] * (i < 2) + [f"{old}s"] * (i == 0) for i, path in enumerate(paths)}
    for text in plain.values():
        rng.shuffle(text)

    def joined(text: Sequence[str]) -> bytes:
        return as_lines([" ".join(text[:3]), ", ".join(text[3:])])

    edit = f"find {top} -name '*.txt' -exec sed -i"
    return Draft(
        f"In all .txt files in {top} and the folders below it, replace the word {old} by {new} wherever it stands as a whole word.",
        {path: joined(text) for path, text in plain.items()},
        {path: Want(joined([new if word == old else word for word in text])) for path, text in plain.items()},
        [f"{edit} 's/\\b{old}\\b/{new}/g' {{}} +"],
        [f"{edit} 's/{old}/{new}/g' {{}} +"],
    )


def joined(rng: Random) -> Draft:
    """Two tables by their ids. Nearly: line by line."""
    names = Names(rng)
    people, points, answer = f"{names()}.csv", f"{names()}.csv", f"{names()}.csv"
    ids = rng.sample(range(100, 1000), rng.randint(5, 8))
    name = {i: names() for i in ids}
    score = {i: rng.randint(10, 99) for i in [*ids[1:-1], ids[0] + 1000]}  # not all are in both
    left, right = rng.sample(sorted(name), len(name)), sorted(score)
    return Draft(
        f"{people} has lines of id,name and {points} lines of id,score. For every id that is in both write name,score to {answer}, sorted.",
        {people: as_lines([f"{i},{name[i]}" for i in left]), points: as_lines([f"{i},{score[i]}" for i in right])},
        {answer: Want(as_lines(sorted(f"{name[i]},{score[i]}" for i in ids if i in score)))},
        [f"sort {people} > /tmp/a; sort {points} > /tmp/b; join -t, -o 1.2,2.2 /tmp/a /tmp/b | sort > {answer}"],
        [f"cut -d, -f2 {people} > /tmp/a; cut -d, -f2 {points} > /tmp/b; paste -d, /tmp/a /tmp/b | sort > {answer}"],
    )


def sorting(rng: Random) -> Draft:
    """Files into folders by their ending. Nearly: from the first dot on."""
    names = Names(rng)
    top, target = names(), names()
    endings = rng.sample(("csv", "gz", "md", "txt", "xml"), 3)
    files = {f"{name}.{rng.choice(endings)}": some_text(rng, 1) for name in names.many(3, 6)}
    files |= {f"{names()}.{names()}.{endings[0]}": some_text(rng, 1)}
    move = f'mkdir -p "{target}/$e" && mv "$f" "{target}/$e/"; done'
    return Draft(
        f"Move each file of {top} to a folder in {target} that is named after what follows the last dot of its "
        f"name: a.b to {target}/b/a.b.",
        {f"{top}/{name}": content for name, content in files.items()},
        {f"{top}/{name}": Want(gone=True) for name in files}
        | {f"{target}/{name.rpartition('.')[2]}/{name}": Want(content) for name, content in files.items()},
        [f'for f in {top}/*; do e="${{f##*.}}"; {move}'],
        [f'for f in {top}/*; do e="${{f#*.}}"; {move}'],
    )


Kind: TypeAlias = Callable[[Random], Draft]

KINDS: tuple[Kind, ...] = (
    *(count, rename, large, addresses, busiest, permissions, pack, unpack),
    *(total, order, config, newest, duplicates, checksums, streams, words),
)
UNSEEN: tuple[Kind, ...] = (joined, sorting)
"""Kinds that no training task has."""
