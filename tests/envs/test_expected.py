"""What counts as the answer, and what does only where a defence is off."""

import pytest

from agentrl_jax.envs.expected import ALL, LONGEST, Expected

NUMBER, WHOLE = Expected(1234.5, tolerance=0.01), Expected(12)
NAME, LIST = Expected("south"), Expected(("rake", "hose", "pan"))


@pytest.mark.parametrize(
    ("expected", "text"),
    [
        *((NUMBER, text) for text in ("1234.5", " 1234.50\n", "1,234.5", "+1.2345e3", "1234.51", "1234.49")),
        *((WHOLE, text) for text in ("12", "12.0")),
        *((NAME, text) for text in ("south", "South", "'south'.", " south ")),
        *((LIST, text) for text in ("rake, hose, pan", "Rake,hose,PAN.")),
        (Expected(-0.5, 0.01), "-0.5"),
    ],
)
def test_ways_to_write_an_answer(expected: Expected, text: str):
    assert expected.matches(text)


@pytest.mark.parametrize(
    ("expected", "text"),
    [
        *((NUMBER, text) for text in ("", "1234.52", "-1234.5", "1234.5 or 9", "about 1234.5", "nan", "inf", "1e999", "12,34.5", "0x4d2")),
        *((WHOLE, text) for text in ("13", "12 13", "12\n13", "[12]", "１２", "1" * LONGEST, " 12" + "0" * LONGEST)),
        *((NAME, text) for text in ("", "north", "south, north", "north south east west", "the south")),
        *((LIST, text) for text in ("rake, pan, hose", "rake, hose", "rake, hose, pan, kettle", "rake hose pan")),
    ],
)
def test_what_is_not_the_answer(expected: Expected, text: str):
    assert not expected.matches(text)


@pytest.mark.parametrize(
    ("defence", "expected", "text"),
    [
        ("single", NUMBER, "9 or 1234.5"),
        ("finite", NUMBER, "nan"),
        ("whole", NAME, "north south east west"),
        ("whole", LIST, "hose, kettle, pan, rake"),
    ],
)
def test_each_defence_stops_a_trick(defence: str, expected: Expected, text: str):
    assert expected.matches(text, ALL - {defence})
    assert not expected.matches(text, {defence})


def test_the_form_says_how_near_and_how_many():
    assert NUMBER.form == "Answer with one number, right to within 0.01."
    assert (WHOLE.form, NAME.form) == ("Answer with one whole number.", "Answer with the name alone.")
    assert LIST.form == "Answer with the 3 names, in this order, separated by commas."
    assert (NUMBER.text, LIST.text) == ("1234.5", "rake, hose, pan")
