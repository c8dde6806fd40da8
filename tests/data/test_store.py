import os
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentrl_jax.data.credits import CreditWriter, read_credits
from agentrl_jax.data.episode import Author, Ending, Outcome, Turn
from agentrl_jax.data.events import Ended, SpanAdded, Start, TurnDone, Unfinished, events_of, fold
from agentrl_jax.data.frames import StoreError
from agentrl_jax.data.store import EpisodeWriter, Salvaged, read, salvage, unfinished
from tests.data.strategies import batches, episodes, make_episode, observed, sampled

# Each example writes a file of its own name.
on_disk = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.episodes"


def write(path, *members):
    path.unlink(missing_ok=True)
    with EpisodeWriter(path) as store:
        store.append(*members)
        return store.end


def boundaries(path, members):
    """The file's size after each of the episodes."""
    path.unlink(missing_ok=True)
    with EpisodeWriter(path) as store:
        ends = [store.end]
        for episode in members:
            store.append(episode)
            ends.append(store.end)
    return ends


def child(code, *args):
    """A process that runs `code` with the store at hand."""
    prelude = """
        import sys
        from pathlib import Path
        from agentrl_jax.data.store import EpisodeWriter, StoreError, read
        from tests.data.strategies import make_episode
        path = Path(sys.argv[1])
    """
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(prelude) + textwrap.dedent(code), *map(str, args)],
        stdout=subprocess.PIPE,
        text=True,
    )


@on_disk
@given(batches())
def test_round_trip(path, members):
    write(path, *members)
    back = list(read(path))
    assert back == members
    for one, other in zip(members, back, strict=True):
        assert list(one.counters.items()) == list(other.counters.items())
        assert all(a.tokens.dtype == np.int32 for s in other.segments for a in s.spans)
    assert unfinished(path) == []


@given(episodes())
def test_an_episode_is_the_fold_of_its_events(episode):
    assert fold(events_of(episode)) == episode


@on_disk
@given(episodes(), st.data())
def test_events_one_by_one_over_several_writers(path, episode, data):
    path.unlink(missing_ok=True)
    events = list(events_of(episode))
    cut = data.draw(st.integers(1, len(events) - 1))
    with EpisodeWriter(path) as store:
        for event in events[:cut]:
            store.add(event)
    assert list(read(path)) == []
    assert unfinished(path) == [fold(events[:cut])]
    with EpisodeWriter(path) as store:
        for event in events[cut:]:
            store.add(event)
    assert list(read(path)) == [episode]
    assert unfinished(path) == []


def test_an_unfinished_episode_has_its_spans_and_its_snapshot(path):
    prompt = observed([1, 2, 3], author=Author.TASK)
    action = sampled([prompt], [4, 5])
    start = Start("a", "task", "g", seed=3, step=7)
    with EpisodeWriter(path) as store:
        store.add(start, SpanAdded("a", 0, prompt), SpanAdded("a", 0, action), TurnDone("a", Turn(state="s"), snapshot="snap-1"))
        store.add(Start("b", "task", "g", seed=4, step=7))
    assert unfinished(path) == [
        Unfinished(start, ((prompt, action),), (Turn(state="s"),), "snap-1"),
        Unfinished(Start("b", "task", "g", seed=4, step=7)),
    ]


def test_interleaved_episodes_end_in_their_own_order(path):
    first, second = make_episode("a", seed=1), make_episode("b", seed=2)
    one, two = list(events_of(first)), list(events_of(second))
    with EpisodeWriter(path) as store:
        for pair in zip(one[:-1], two[:-1], strict=True):
            store.add(*pair)
        store.add(two[-1], one[-1])
    assert list(read(path)) == [second, first]


def test_a_started_again_episode_drops_what_it_had(path):
    episode = make_episode("a")
    with EpisodeWriter(path) as store:
        store.add(*list(events_of(make_episode("a", seed=9)))[:3])
        store.append(episode)
    assert list(read(path)) == [episode]
    assert unfinished(path) == []


@pytest.mark.parametrize(
    ("before", "event", "message"),
    [
        (0, TurnDone("a", Turn()), "episode a: TurnDone of an episode that is not running"),
        (1, SpanAdded("a", 2, observed([1])), "episode a: a span of segment 2, but there are 0 segments"),
        (2, Ended("a", Ending.SUBMITTED, Outcome(1.0)), None),
        (99, TurnDone("a", Turn()), "episode a: TurnDone of an episode that is not running"),
        (99, Start("a", "t", "g", 0, 0), "episode a: it ended already; ids are unique in a run"),
        (1, Ended("a", Ending.SANDBOX_FAILED, None, {"x": 2**70}), "episode a: cannot be stored"),
        (1, Ended("a", Ending.SUBMITTED, Outcome(1.0)), "episode a: no segment"),
    ],
)
def test_an_event_that_cannot_follow_is_refused_and_nothing_kept(path, before, event, message):
    with EpisodeWriter(path) as store:
        for earlier in list(events_of(make_episode("a")))[:before]:
            store.add(earlier)
        size = store.end
        if message is None:
            store.add(event)
            return
        with pytest.raises(ValueError, match=message):
            store.add(Start("other", "t", "g", 0, 0), event)
        assert store.end == size
        store.append(make_episode("b"))
    assert "b" in [episode.id for episode in read(path)]
    assert "other" not in [state.start.episode for state in unfinished(path)]


def test_rewind_supersedes_what_came_before_it(path):
    old = [make_episode(f"e{step}", step=step, seed=step) for step in range(4)]
    again = [replace(episode, seed=100 + episode.step) for episode in old[2:]]
    with EpisodeWriter(path) as store:
        store.append(*old)
        store.add(Start("kept", "t", "g", 0, step=1), Start("void", "t", "g", 0, step=2))
    with EpisodeWriter(path) as store:
        store.rewind(2)
        store.append(*again)
        with pytest.raises(ValueError, match="episode void: TurnDone of an episode that is not running"):
            store.add(TurnDone("void", Turn()))
        with pytest.raises(ValueError, match="episode e1: it ended already"):
            store.append(old[1])
        store.add(TurnDone("kept", Turn()))
    assert list(read(path)) == [*old[:2], *again]
    assert list(read(path, superseded=True)) == [*old, *again]
    assert [state.start.episode for state in unfinished(path)] == ["kept"]


@on_disk
@given(batches(max_size=4), st.data())
def test_a_torn_tail_is_ignored_then_cut_off(path, members, data):
    ends = boundaries(path, members)
    size = data.draw(st.integers(0, ends[-1]))
    with path.open("r+b") as file:
        file.truncate(size)
    whole = sum(end <= size for end in ends[1:])
    assert list(read(path)) == members[:whole]
    with EpisodeWriter(path) as store:
        assert store.dropped == (size - ends[whole] if size >= ends[0] else 0)
        store.append(*members[whole:])
    assert list(read(path)) == members


def test_garbage_at_the_tail_is_a_torn_write(path):
    size = write(path, make_episode("a"))
    with path.open("ab") as file:
        file.write(b"\0" * 4096)
    assert [episode.id for episode in read(path)] == ["a"]
    with EpisodeWriter(path) as store:
        assert (store.dropped, store.end) == (4096, size)


@on_disk
@given(st.integers(0, 2**16), st.integers(1, 255))
def test_a_corrupt_byte_never_yields_a_wrong_episode(path, at, flip):
    members = [make_episode(f"e{i}", seed=i) for i in range(4)]
    ends = boundaries(path, members)
    data = bytearray(path.read_bytes())
    at %= len(data)
    data[at] ^= flip
    path.write_bytes(data)
    found = []
    raised = None
    try:
        found.extend(read(path))
    except StoreError as error:
        raised = str(error)
    hit = sum(end <= at for end in ends)  # 0 is the header, i the i-th episode
    assert found == members[: max(hit - 1, 0)]
    if hit == len(members):
        assert raised is None  # the last frame of a file cannot be told from a torn write
        return
    assert raised is not None
    assert str(path) in raised
    if hit == 0:
        return
    assert f"damaged at byte {ends[hit - 1]}" in raised
    assert "salvage" in raised
    with pytest.raises(StoreError, match="damaged at byte"):
        EpisodeWriter(path)
    target = path.with_suffix(".salvaged")
    target.unlink(missing_ok=True)
    assert salvage(path, target) == Salvaged(frames=3, lost=ends[hit] - ends[hit - 1], cut=())
    assert list(read(target)) == [*members[: hit - 1], *members[hit:]]
    with EpisodeWriter(target) as store:
        store.append(members[hit - 1])


def test_a_lost_event_is_noticed_and_not_folded_over(path):
    """The end of an episode arrives without the events before it: that is no shorter episode."""
    episode, other = make_episode("a", turns=3), make_episode("b")
    with EpisodeWriter(path) as store:
        ends = []
        for event in events_of(episode):
            store.add(event)
            ends.append(store.end)
        store.append(other)
    data = path.read_bytes()
    path.write_bytes(data[: ends[-3]] + data[ends[-2] :])  # the last turn is gone, and no bad byte tells
    with pytest.raises(StoreError, match="episode a: a frame before this one is missing"):
        list(read(path))
    target = path.with_suffix(".salvaged")
    assert salvage(path, target) == Salvaged(frames=len(ends) - 2 + 1, lost=0, cut=("a",))
    assert list(read(target)) == [other]
    assert [state.start.episode for state in unfinished(target)] == ["a"]
    with pytest.raises(StoreError, match="exists already; salvage into a new file"):
        salvage(path, target)


def test_foreign_files_are_left_as_they_are(path):
    path.write_text("my notes, not yours")
    for attempt in (lambda: EpisodeWriter(path), lambda: list(read(path)), lambda: CreditWriter(path)):
        with pytest.raises(StoreError, match=r"run\.episodes: this is not"):
            attempt()
    assert path.read_text() == "my notes, not yours"


def test_a_newer_format_is_refused(path):
    write(path)
    data = bytearray(path.read_bytes())
    data[12] = 2
    path.write_bytes(data)
    with pytest.raises(StoreError, match="format version 2, but this code reads version 1"):
        list(read(path))


def test_one_writer_at_a_time(path):
    with EpisodeWriter(path) as store:
        with pytest.raises(StoreError, match="another writer has this file open"):
            EpisodeWriter(path)
        store.append(make_episode("a"))
    with EpisodeWriter(path) as store:
        store.append(make_episode("b"))
        store.sync()
        store.close()
    assert [episode.id for episode in read(path)] == ["a", "b"]


def test_a_directory_that_is_missing_is_named(tmp_path):
    with pytest.raises(StoreError, match=r"nowhere/x: cannot be opened for writing: No such file"):
        EpisodeWriter(tmp_path / "nowhere" / "x")


@pytest.mark.parametrize("moment", range(3))
def test_kill_minus_nine_in_the_middle_of_writing(path, moment):
    process = child(
        """
        with EpisodeWriter(path) as store:
            for i in range(10**6):
                store.append(make_episode(f"e{i}", turns=4, prompt=3000, seed=i))
                print(i, flush=True)
        """,
        path,
    )
    confirmed = -1
    for line in process.stdout:
        confirmed = int(line)
        if confirmed >= 3 * moment:
            break
    process.send_signal(signal.SIGKILL)
    process.communicate()
    before = [episode.id for episode in read(path)]
    assert before == [f"e{i}" for i in range(len(before))]
    assert len(before) > confirmed  # what a writer had confirmed is there
    with EpisodeWriter(path) as store:
        store.append(make_episode("after"))
    assert [episode.id for episode in read(path)] == [*before, "after"]


def test_readers_see_a_growing_prefix_and_never_block_the_writer(path):
    process = child(
        """
        with EpisodeWriter(path) as store:
            print("open", flush=True)
            for i in range(150):
                store.append(make_episode(f"e{i}", seed=i, prompt=2000))
        """,
        path,
    )
    assert process.stdout.readline() == "open\n"
    seen = [0]
    while process.poll() is None:
        ids = [episode.id for episode in read(path)]
        assert ids == [f"e{i}" for i in range(len(ids))]
        seen.append(len(ids))
    process.communicate()
    assert process.returncode == 0
    assert seen == sorted(seen)
    assert list(read(path)) == [make_episode(f"e{i}", seed=i, prompt=2000) for i in range(150)]


def test_a_full_disk_loses_nothing_that_was_saved(path):
    """A limit on the size of files makes the write stop in the middle as a full disk does: by a short write, then an error."""
    process = child(
        """
        import resource
        store = EpisodeWriter(path)
        store.append(make_episode("a"))
        saved = store.end
        resource.setrlimit(resource.RLIMIT_FSIZE, (saved + 700, resource.RLIM_INFINITY))
        try:
            store.append(make_episode("big", prompt=5000))
        except StoreError as error:
            print(error)
        assert path.stat().st_size == saved
        assert [episode.id for episode in read(path)] == ["a"]
        store.append(make_episode("b", turns=1))
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        store.append(make_episode("big", prompt=5000))
        store.close()
        """,
        path,
    )
    said, _ = process.communicate()
    assert process.returncode == 0
    assert said.startswith(f"{path}: could not write ")
    assert "File too large. Nothing already saved is lost; make room on the disk and append again" in said
    assert [episode.id for episode in read(path)] == ["a", "b", "big"]


def test_the_store_imports_no_jax(path):
    process = child("print('jax' in sys.modules)", path)
    assert process.communicate()[0] == "False\n"


def test_numbers_out_of_numpy_are_stored(path):
    episode = replace(
        make_episode("a"),
        outcome=Outcome(np.float32(0.1), {"tests": np.float64(0.5)}, np.bool_(True)),  # pyright: ignore[reportArgumentType]
    )
    write(path, episode)
    assert list(read(path)) == [episode]


def test_what_is_synced_is_on_the_disk(path):
    with EpisodeWriter(path) as store:
        store.append(make_episode("a"))
        store.sync()
        store.sync()
        assert os.stat(path).st_size == store.end


def test_credit_is_kept_beside_the_store(tmp_path):
    path = tmp_path / "run.credit"
    first = {"a": (np.array([0.0, 1.5], np.float32), np.zeros(0, np.float32)), "b": (np.array([-1.0], np.float32),)}
    with CreditWriter(path) as writer:
        writer.append(first)
    with CreditWriter(path) as writer:
        writer.append({"b": [np.array([2.0], np.float32)]})
        with pytest.raises(ValueError, match=r"credit of episode c: advantages must be f32\[n\] per segment, got float32\[1, 1\]"):
            writer.append({"c": [np.ones((1, 1), np.float32)]})
    found = dict(read_credits(path))
    assert {k: [x.tolist() for x in v] for k, v in found.items()} == {"a": [[0.0, 1.5], []], "b": [[2.0]]}
    assert [episode for episode, _ in read_credits(path)] == ["a", "b", "b"]
    with pytest.raises(StoreError, match="this is not an episode store"):
        list(read(path))
