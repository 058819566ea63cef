import itertools
import random

import pytest
import torch

from viewtrack.ledger import Region
from viewtrack.overlap import covers, overlaps, region_of

BASE = torch.zeros(6, 8)
BYTES = torch.zeros(64, dtype=torch.uint8)


def covered(region):
    """Every byte of a region, one by one."""
    found = set()
    for index in itertools.product(*map(range, region.size)):
        place = region.offset + sum(i * s for i, s in zip(index, region.stride, strict=True))
        found.update(range(place * region.itemsize, (place + 1) * region.itemsize))
    return found


@pytest.mark.parametrize(
    ("a", "b", "want"),
    [
        pytest.param(BASE, BASE, True, id="whole"),
        pytest.param(BASE[:3], BASE[3:], False, id="rows"),
        pytest.param(BASE[:, :4], BASE[:, 4:], False, id="columns"),
        pytest.param(BASE[:, ::2], BASE[:, 1::2], False, id="every-other-column"),
        pytest.param(BASE[:, ::2], BASE[2:3], True, id="columns-and-row"),
        pytest.param(BASE.t(), BASE[5, 7], True, id="last-item"),
        pytest.param(BASE[0].expand(5, 8), BASE[1], False, id="expanded"),
        pytest.param(BASE[:0], BASE, False, id="empty"),
        pytest.param(BYTES[4:8].view(torch.float32), BYTES[5:6], True, id="inside-an-item"),
        pytest.param(BYTES[4:8].view(torch.float32), BYTES[8:9], False, id="behind-an-item"),
        pytest.param(BYTES.view(torch.int16)[::2], BYTES[2::4], False, id="between-items"),
    ],
)
def test_views_of_one_tensor(a, b, want):
    assert overlaps(region_of(a), region_of(b)) is want
    assert overlaps(region_of(b), region_of(a)) is want


def test_what_is_not_known_overlaps():
    region = region_of(BASE)
    assert overlaps(None, region)
    assert overlaps(region, None)
    assert region_of(torch.eye(2).to_sparse()) is None


def test_random_regions_against_their_bytes():
    draw = random.Random(0)

    def region():
        dims = range(draw.randint(0, 3))
        return Region(
            draw.randint(0, 12),
            tuple(draw.choice((0, 1, 2, 3, 4, 4)) for _ in dims),
            tuple(draw.randint(0, 9) for _ in dims),
            draw.choice((1, 2, 4, 8)),
        )

    answers, found_covered = set(), 0
    for _ in range(4000):
        a, b = region(), region()
        want = bool(covered(a) & covered(b))
        assert overlaps(a, b) == want, (a, b)
        answers.add(want)
        if covers(a, b):
            assert covered(a) >= covered(b), (a, b)
            found_covered += 1
    assert answers == {True, False}
    assert found_covered > 100


@pytest.mark.parametrize(
    ("a", "b", "want"),
    [
        pytest.param(BASE, BASE, True, id="whole"),
        pytest.param(BASE, BASE[1:3, 2:5], True, id="block"),
        pytest.param(BASE.t(), BASE[:, 7], True, id="transposed"),
        pytest.param(BASE[:, ::2], BASE[:, ::2], True, id="the-same-with-gaps"),
        pytest.param(BASE[1:3], BASE[1:4], False, id="more-rows"),
        pytest.param(BASE[:, :4], BASE[:2, 4:], False, id="in-a-gap"),
        pytest.param(BASE[:0], BASE, False, id="by-nothing"),
        pytest.param(BASE, BASE[:0], True, id="nothing"),
        pytest.param(BYTES[4:12], BYTES[4:12].view(torch.float32), True, id="another-dtype"),
    ],
)
def test_one_lies_in_the_other(a, b, want):
    assert covers(region_of(a), region_of(b)) is want


def test_what_is_not_known_covers_nothing_else():
    assert not covers(None, region_of(BASE))
    assert not covers(region_of(BASE), None)
    assert covers(None, None)
