"""The bookkeeping of rows, without a model."""

import asyncio

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl_jax.inference.protocol import Sampling
from agentrl_jax.inference.slots import Request, Slots


@pytest.fixture(scope="module")
def loop():
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


def request(loop: asyncio.AbstractEventLoop, session: str, prompt: list[int]) -> Request:
    return Request(session, np.array(prompt, np.int32), Sampling(4, seed=0), 4, loop.create_future())


def serve(slots: Slots, req: Request) -> int:
    """Admit, prefill, sample one token 9, finish; returns the slot."""
    assert slots.admit(req)
    slot = next(slot for slot in slots.all if slot.request is req)
    slot.append(np.array([9], np.int32))
    slot.cached = slot.size - 1
    slots.finish(req)
    return slot.index


def test_a_session_keeps_its_slot_and_the_common_prefix(loop):
    slots = Slots(2, 16)
    first = serve(slots, request(loop, "a", [1, 2, 3]))
    again = request(loop, "a", [1, 2, 3, 9, 4, 5])
    assert slots.admit(again)
    slot = slots.all[first]
    assert slot.request is again
    assert again.cached == 3
    assert slot.pending.tolist() == [9, 4]  # the last token of a prompt is fed by decoding
    slots.finish(again)
    edited = request(loop, "a", [1, 7, 3, 9])
    assert slots.admit(edited)
    assert edited.cached == 1


def test_the_session_idle_longest_loses_its_slot(loop):
    slots = Slots(2, 16)
    a = serve(slots, request(loop, "a", [1]))
    b = serve(slots, request(loop, "b", [1]))
    assert serve(slots, request(loop, "a", [1])) == a
    assert serve(slots, request(loop, "c", [1, 2])) == b
    back = request(loop, "b", [1, 9])
    assert slots.admit(back)
    assert back.cached == 0


def test_no_slot_while_all_are_busy_nor_a_second_for_one_session(loop):
    slots = Slots(2, 16)
    a, again, b, c = (request(loop, session, [1, 2]) for session in ("a", "a", "b", "c"))
    assert slots.admit(a)
    assert not slots.admit(again)
    assert slots.admit(b)
    assert not slots.admit(c)
    slots.finish(a)
    assert slots.admit(c)
    assert not slots.admit(again)


def test_released_slots_are_free_and_remember_nothing(loop):
    slots = Slots(1, 16)
    serve(slots, request(loop, "a", [1, 2, 3]))
    running = request(loop, "a", [1, 2, 3, 9, 1])
    assert slots.admit(running)
    assert slots.release("a") is running
    assert slots.release("a") is None
    assert slots.sessions == 0
    slots.finish(running)
    again = request(loop, "a", [1, 2, 3, 9, 1])
    assert slots.admit(again)
    assert again.cached == 0


@given(st.lists(st.tuples(st.sampled_from("abcde"), st.sampled_from(["admit", "finish", "release"])), max_size=60))
def test_no_slot_is_lost_or_given_twice(loop, steps: list[tuple[str, str]]):
    slots, running = Slots(3, 8), {}
    for session, step in steps:
        if step == "admit":
            new = request(loop, session, [1, 2])
            admitted = slots.admit(new)
            # Refused only if the session is busy, or all slots are.
            assert admitted == (session not in running and len(running) < 3)
            if admitted:
                running[session] = new
        elif step == "finish" and session in running:
            slots.finish(running.pop(session))
        elif step == "release":
            assert slots.release(session) is running.pop(session, None)
        assert {id(r) for r in slots.requests()} == {id(r) for r in running.values()}
        assert {slot.request.session for slot in slots.active if slot.request} == set(running)
