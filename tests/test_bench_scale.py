"""The benchmark of scaling, in a small setting."""

import re

import numpy as np
import pytest

from experiments import bench_scale
from experiments.bench_scale import TINY, Setting, line


def test_a_line_is_found_with_how_much_it_explains():
    exact = line([1, 2, 4], [3.0, 5.0, 9.0])
    np.testing.assert_allclose(exact, (1.0, 2.0, 1.0), atol=1e-12)
    assert line([1, 2, 3, 4], [1.0, 2.0, 2.0, 1.0]).r2 < 0.1


@pytest.mark.slow
def test_it_counts_programs_and_finds_the_update_of_one_device_on_a_mesh(capsys):
    bench_scale.run(Setting(batches=8, rows=(1, 2), steps=1, model=TINY, meshes=((2, 2),)))
    printed = capsys.readouterr().out
    batches, sizes, shapes, programs = map(int, re.findall(r"\d+", printed.splitlines()[0]))
    assert (batches, programs) == (8, shapes)
    assert shapes < sizes
    rows = re.findall(r"^(\S+x\S+) +(\S+) +(\S+) +(\S+) +(\S+)$", printed, re.MULTILINE)
    assert [row[0] for row in rows] == ["1x2x1x2"]
    assert 0 < max(float(x) for row in rows for x in row[1:]) < 1e-5
    assert re.search(r"us a token, R\^2 1.0000", printed)
