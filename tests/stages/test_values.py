"""Every stage on numbers small enough to do by hand; matrices are in test_spectral_stages."""

import math

import numpy as np
import pytest
from combining import BACKENDS, combine
from safetensors.numpy import load_file

import dare
from dare import keep_mask
from helpers import save

HALF = math.sqrt(0.5)
INF, NAN = math.inf, math.nan
ONES = [1, 1, 1]


def given(stage, **parameters):
    return {"stages": {stage: parameters}}


def on_deltas(stage, **parameters):
    return given(stage, on="deltas", **parameters)


COUNT = given("ties", vote="count")
COUNT_UNWEIGHTED = given("ties", vote="count", weighted=False)
UNWEIGHTED = given("ties", weighted=False)
EACH_ROW = given("nuslerp", each="row")
SELECTED = given("sce", select_ratio=0.5)

EXACT = [
    ("linear", [[2, 4, -6], [4, 0, 2]], {}, [3, 2, -2]),
    # 0.5 · (0.25·8 + 0.75·4) = 2.5
    ("linear", [[8], [4]], {"weights": [0.25, 0.75], "scale": 0.5}, [2.5]),
    ("sum", [[2, 4], [4, -5]], {"base": [1, 1]}, [7, 0]),
    ("sum", [[2], [5]], {"weights": [1, -1]}, [-3]),
    # deltas or whole models, summed or divided by the weights
    *(
        (method, [[2], [4]], {"base": [1], "weights": weights, **given(method, **own)}, [gives])
        for method in ("linear", "sum")
        for own, weights, gives in [
            ({}, [1, 3], 1 + 1 * 2 + 3 * 4),
            ({"normalize": True}, [1, 3], 1 + (1 * 2 + 3 * 4) / 4),
            ({"on": "weights"}, [1, 3], 1 * 3 + 3 * 5),
            ({"on": "weights", "normalize": True}, [1, 3], (1 * 3 + 3 * 5) / 4),
            ({"on": "weights"}, [0, 0], 0),
            ({"on": "weights"}, [0.5, 0.5], 4),
        ]
    ),
    # weights that cancel are no divisor of `sum`
    ("sum", [[2], [4]], {"weights": [1, -1], **given("sum", normalize=True)}, [-2]),
    # ⌊0.4 · 5⌋ = 2; of equals the first; at least one
    ("trim+sum", [[1, -5, 3, 2, -4]], given("trim", keep_ratio=0.4), [0, -5, 0, 0, -4]),
    ("trim+sum", [[2, 1, -2, 2, 3]], given("trim", keep_ratio=0.6), [2, 0, -2, 0, 3]),
    ("trim+sum", [[1, 2]], given("trim", keep_ratio=0.1), [0, 2]),
    # what is kept has the magnitude of all: 15/9 and 12/6
    (
        "trim+sum",
        [[1, -5, 3, 2, -4]],
        given("trim", keep_ratio=0.4, rescale="l1"),
        [0, -5 * np.float32(15 / 9), 0, 0, -4 * np.float32(15 / 9)],
    ),
    (
        "breadcrumbs+sum",
        [[1, -5, 4, 2]],
        given("breadcrumbs", keep_middle=0.5, drop_largest=0.25, rescale="l1"),
        [0, 0, 8, 4],
    ),
    (
        "breadcrumbs+sum",
        [[[1, -5, 4, 2]]],
        given("breadcrumbs", keep_middle=0.5, drop_largest=0.25, rescale="l1", per="row"),
        [[0, 0, 8, 4]],
    ),
    # element 0: 3 + 1 > 2: mean of 3 and 1; element 1: -4 beats 3; element 2: all agree
    ("ties", [[3, 1, 2], [1, 2, 4], [-2, -4, 6]], {}, [2, -4, 4]),
    ("ties", [[1, 0], [-1, 0]], {}, [0, 0]),  # the sides cancel
    ("ties", [[3], [0], [5]], {}, [4]),  # a zero does not count in the mean
    # 3·1 beats 1·2; its mean is (3·1)/3. Unweighted, 2 would win.
    ("ties", [[1], [-2]], {"weights": [3, 1]}, [1]),
    ("ties", [[2], [6]], {"weights": [1, 3]}, [5]),  # (1·2 + 3·6) / (1 + 3)
    ("ties", [[2], [6]], {"weights": [1, 3], **given("ties", divide_by="count")}, [10]),
    # 2·1 - 1·(-4) = 6 over 2 - 1, not over 2 + 1; of one alone the minus cancels
    ("ties", [[1], [-4]], {"weights": [2, -1], **given("ties", divide_by="signed")}, [6]),
    ("ties", [[1], [0]], {"weights": [-2, 1], **given("ties", divide_by="signed")}, [1]),
    ("ties", [[1], [-4]], {"weights": [1, -1], **given("ties", divide_by="signed")}, [5]),
    # trimmed to [3, 0] and [0, -4]
    ("ties", [[3, 1], [-2, -4]], given("ties", keep_ratio=0.5), [3, -4]),
    # unweighted, 2 - 1 > 0 elects the first: 1·2/1; weighted, 2 - 3 < 0 the second: -3/3
    ("ties", [[2], [-1]], {"weights": [1, 3]}, [-1]),
    ("ties", [[2], [-1]], {"weights": [1, 3], **UNWEIGHTED}, [2]),
    # -5 outweighs 1 and 2, but they are two
    ("ties", [[1], [2], [-5]], {}, [-5]),
    ("ties", [[1], [2], [-5]], COUNT, [1.5]),
    # 1 + 1 < 4; unweighted 2 > 1
    ("ties", [[1], [3], [-0.25]], {"weights": [1, 1, 4], **COUNT}, [-0.25]),
    ("ties", [[1], [3], [-0.25]], {"weights": [1, 1, 4], **COUNT_UNWEIGHTED}, [2]),
    ("ties", [[1, 0], [-5, 0]], COUNT, [0, 0]),
    *(
        ("ties", [[2], [6]], {"weights": [1, 3], **given("ties", weighted=False, **own)}, [gives])
        for own, gives in [({"divide_by": "count"}, 10), ({"divide_by": "nothing"}, 20), ({}, 5)]
    ),
    *(
        ("ties", deltas, {**weights, **kind}, gives)
        for kind in ({}, COUNT, UNWEIGHTED, COUNT_UNWEIGHTED)
        for deltas, weights, gives in [
            ([[2]], {"weights": [-1]}, [-2]),
            ([[2], [-8]], {"weights": [1, 0]}, [2]),
            ([[NAN], [1], [1]], {}, [NAN]),
        ]
    ),
    # 3 + 1 - 2 > 0: 3; 1 + 2 - 4 < 0: -4; all agree: 6; 1 - 1 + 0 = 0
    ("emr", [[3, 1, 2, 1], [1, 2, 4, -1], [-2, -4, 6, 0]], {}, [3, -4, 6, 0]),
    ("emr", [[1], [-2]], {"weights": [3, 1]}, [3]),  # 3·1 - 2 > 0: 3·1
    ("emr", [[1], [-INF]], {"weights": [1, 0]}, [1]),
    ("emr", [[NAN, 1], [1, 1]], {}, [NAN, 1]),
    # sums 4, 5, 1. At λ = 0.5: 3 ≥ 0.5·1, 1 < 0.5·3; 3 ≥ 0.5·2, 2 ≥ 0.5·3; 2 ≥ 0.5·1, 1 ≥ 0.5·2
    ("consensus", [[3, 3, 2], [1, 2, -1]], given("consensus", selectivity=0.5), [0, 5, 1]),
    # 1, 1 and 1 in three models: each 1 ≥ 0.5·2; of 4 and 1 only 4 needs it; at λ = 0.5 in the
    # last, 1 < 0.5·|0 - 1| is false, so both do, and the sum is 0
    (
        "consensus",
        [[1, 4, 1], [1, 1, -1], [1, 0, 0]],
        given("consensus", selectivity=0.5, agree=1),
        [3, 5, 0],
    ),
    # each 1 < 2·|3 - 1|
    ("consensus", [[1], [1], [1]], given("consensus", selectivity=2.0, agree=1), [0]),
    # s = 0.5·4 + 2 = 4; |4| ≥ 0.4·0, |2| ≥ 0.4·2
    ("consensus", [[4], [2]], {"weights": [0.5, 1]}, [4]),
    # A weight of 0 asks nobody: two are asked, and 1 < 0.4·3; or one, who is enough.
    ("consensus", [[3], [1], [4]], {"weights": [1, 1, 0]}, [0]),
    ("consensus", [[3], [4]], {"weights": [1, 0]}, [3]),
    ("consensus", [[NAN, 1], [1, 1]], {}, [NAN, 2]),
    ("ram", [[1, 2, 0, 1e-6], [3, 0, 0, -1e-5]], {}, [2, 2, 0, 0]),
    ("ram", [[1, 4], [3, 1]], given("ram", threshold=1), [3, 4]),
    ("ram", [[NAN, 1], [0, 3]], {}, [NAN, 2]),
    # The first shares one and has two of its own: 1 + ½·½. The second: 1/1, of which ¾ count.
    (
        "ramplus",
        [[4, 2, -8, 0], [2, 0, 0, 8]],
        given("ramplus", boost=0.5, most=0.75),
        [3, 2.5, -10, 11],
    ),
    ("ramplus", [[4, 2], [2, 6]], {}, [3, 4]),
    ("ramplus", [[4, 0], [0, 6]], {}, [4, 6]),
    ("ramplus", [[NAN, 1], [0, 3]], {}, [NAN, 2]),
    # In one row |δ| alone decides: 3 + 1.5·(4 - 2) = 6
    ("arcee_fusion", [[1, -2, 3, 4, -9]], {}, [0, 0, 0, 0, -9]),
    # Both rows diverge alike; a shift of a whole row does nothing to its softmax.
    (
        "arcee_fusion",
        [[[1, 2, 3, 4, 9], [9, 4, 3, 2, 1]]],
        {},
        [[0, 0, 0, 0, 9], [9, 0, 0, 0, 0]],
    ),
    # 0, 1 and 2 are the quartiles: from 3 on
    (
        "arcee_fusion",
        [[[1, 2, 3, 4, 9], [20, 20, 20, 20, 20]]],
        {},
        [[0, 0, 3, 4, 9], [0, 0, 0, 0, 0]],
    ),
    # Where nothing differs by row all is taken; a row with NaN is kept whole.
    ("arcee_fusion", [[[1], [2]]], {"base": [[5], [5]]}, [[6], [7]]),
    ("arcee_fusion", [3], {}, 3),
    ("arcee_fusion", [[[NAN, 1, 0, 2]]], {}, [[NAN, 1, 0, 2]]),
    # Of two that differ half is one. Variances 4, 0, 4, 0: there the second model has nothing.
    ("sce", [[4, 1, 2, 0], [0, 1, -2, 0]], SELECTED, [4, 0, 0, 0]),
    *(
        ("sce", deltas, {"base": [3, 4], **SELECTED}, [3, 4])  # nothing is selected
        for deltas in ([[1, 2]], [[1, 2], [1, 2]], [[1, 2], [1, 5]])
    ),
    ("sce", [[1], [-1]], {}, [1]),  # a sum of zero is plus
    ("sce", [[NAN, 1], [1, 1]], {}, [NAN, 1]),
    # The score grows with the magnitude; ⌊0.4 · 5⌋ = 2 of one model are themselves.
    ("pcb", [[1, -5, 3, 2, -4]], given("pcb", score_ratio=0.4), [0, -5, 0, 0, -4]),
    # Sums: 3, 0, -1. First: scores e^0·tanh 6, 0, 0 (against the sum); second e^(2/9 - 2)·tanh 3, 0
    # and tanh 3, which is more than nine times the one before. One of each is kept and has a share
    # of 1, and each of those elements has no second share.
    ("pcb", [[2, 2, 2], [1, -2, -3]], given("pcb", score_ratio=0.4), [2, 0, -3]),
    ("pcb", [[0, 0], [0, 0]], {}, [0, 0]),
    ("pcb", [[3], [1]], {}, [2]),
    ("pcb", [[3], [-1]], {}, [3]),
    ("pcb", [[INF, 1, 2]], {}, [INF, 0, 0]),
    # The ends of an arc are the models; parallel, opposite and zero tensors are on a straight line.
    *(
        ("slerp", [[0.25, -0.5], [-1, 0.5]], {"base": [1.5, 2], **given("slerp", t=t, on=on)}, ends)
        for t, ends in [(0, [1.75, 1.5]), (1, [0.5, 2.5])]
        for on in ("weights", "deltas")
    ),
    *(
        ("slerp", [[1, 2], other], on_deltas("slerp", t=0.25), gives)
        for other, gives in [([2, 4], [1.25, 2.5]), ([-2, -4], [0.25, 0.5]), ([0, 0], [0.75, 1.5])]
    ),
    *(
        ("nuslerp", [[[1, 2]], [other]], {"weights": [3, 1], **given("nuslerp", each=each)}, [to])
        for other, to in [([2, 4], [1.25, 2.5]), ([-2, -4], [0.25, 0.5]), ([0, 0], [0.75, 1.5])]
        for each in ("tensor", "row")
    ),
    ("karcher", [[2, 0], [0, 0]], on_deltas("karcher"), [1, 0]),
    ("karcher", [[0, 0], [0, 0]], on_deltas("karcher"), [0, 0]),
    ("karcher", [[4, 0], [-2, 0]], on_deltas("karcher"), [1, 0]),  # opposite
    ("karcher", [[4, 0], [-4, 0]], {"weights": [3, 1], **on_deltas("karcher")}, [2, 0]),
    ("karcher", [[INF, 1], [1, 3]], on_deltas("karcher"), [INF, 2]),
    ("multislerp", [[0, 0], [0, 0], [0, 0]], {"base": [1, 2], **on_deltas("multislerp")}, [1, 2]),
    ("multislerp", [[0, 0], [4, 0]], on_deltas("multislerp"), [2, 0]),
    ("multislerp", [[INF, 1], [1, 3]], on_deltas("multislerp"), [INF, 2]),
    # What does not agree leaves the base.
    *(
        ("model_stock", deltas, {"base": [3, 4]}, [3, 4])
        for deltas in ([[1, 0], [0, 5]], [[1, 2], [-1, -2]], [[1, 2], [-2, 0]])
    ),
    ("model_stock", [[0], [0]], {}, [0]),
    ("model_stock", [[INF, 1], [1, 3]], {}, [INF, 2]),
    ("nearswap", [[-3, -1, 0.5, 2, INF, NAN]], given("nearswap", t=1.0), [-1, -1, 0.5, 1, 1, NAN]),
    # The first takes 9 and -8; of the rest, the second takes 6 and 5, though its 7 is larger.
    ("cabs", [[9, 1, -8, 2], [7, 6, 4, 5]], given("cabs", n=2, m=4), [9, 6, -8, 5]),
    # 9 to the first, 5 to the second; nothing is free, and the third has its best of both
    ("cabs", [[9, 1], [7, 5], [2, 3]], given("cabs", n=1, m=2), [9, 8]),
    # 4/1 · (0.5·9) and 4/1 · (2·6)
    (
        "cabs",
        [[9, 1, 8, 2], [7, 6, 4, 5]],
        {"weights": [0.5, 2], **given("cabs", n=1, m=4, rescale=True)},
        [18, 48, 0, 0],
    ),
    ("cabs", [[1, 2, 3, 4, 5, 6]], given("cabs", n=1, m=4), [0, 0, 0, 4, 0, 6]),
    ("nm+sum", [[[1, -4, 3, 2, 5, 6, 7, -8]]], {}, [[0, -8, 6, 0, 0, 0, 14, -16]]),
    ("nm+sum", [[1, -4, 3, 2]], given("nm", n=1, rescale=False), [0, -4, 0, 0]),
    ("nm+sum", [[2, 2, 2, 2]], {}, [4, 4, 0, 0]),
    # rows of 6: groups of 4 and 2; of 2, ⌈1·2/4⌉ = 1 is kept and multiplied by 2/1, not 4/1
    (
        "nm+sum",
        [[[1, 2, 3, 4, 5, 6], [6, 5, 4, 3, 2, 1]]],
        given("nm", n=1),
        [[0, 0, 0, 16, 0, 12], [24, 0, 0, 0, 4, 0]],
    ),
    ("nm+sum", [[[3, 1, 2]]], given("nm", n=1, m=2, rescale=False), [[3, 0, 2]]),
    ("nm+sum", [[1, 2, 3, 4, 5]], given("nm", n=4), [1, 2, 3, 4, 5]),
    ("nm+sum", [[1, 2, 3]], given("nm", n=1, m=1), [1, 2, 3]),
    ("nm+sum", [[1, -4, 3, 2]], given("nm", turn=1), [2, 0, 0, 4]),
    # Groups of one, two, three and four that are left keep 1, 1, 2 and 2 of them.
    (
        "trim+nm+sum",
        [[[8, 0, 0, 0, 8, 4, 0, 0, 8, 4, 2, 0, 8, 4, 2, 1]]],
        given("trim", keep_ratio=10 / 16),
        [[8, 0, 0, 0, 16, 0, 0, 0, 12, 6, 0, 0, 16, 8, 0, 0]],
    ),
    (
        "trim+cabs",
        [[[8, 0, 0, 0, 8, 4, 2, 0]]],
        {"stages": {"trim": {"keep_ratio": 0.5}, "cabs": {"n": 2, "m": 4, "rescale": True}}},
        [[8, 0, 0, 0, 12, 6, 0, 0]],
    ),
    (
        "trim+breadcrumbs+sum",
        [[[9, 8, 7, 6, 5, 4, 3, 2, 1, 0]]],
        {
            "stages": {
                "trim": {"keep_ratio": 0.4},
                "breadcrumbs": {"keep_middle": 0.5, "drop_largest": 0.25, "per": "row"},
            }
        },
        [[0, 8, 7, 0, 0, 0, 0, 0, 0, 0]],
    ),
    ("nm+sum", [3], {}, 3),
    ("nm+sum", [np.zeros((2, 0))], {}, [[], []]),
    # n = 10: ⌊0.5·10⌋ = 5 kept below ⌊0.2·10⌋ = 2 dropped
    (
        "breadcrumbs+sum",
        [[1, -10, 3, 4, 5, -6, 7, 8, 9, 2]],
        given("breadcrumbs", keep_middle=0.5, drop_largest=0.2),
        [0, 0, 0, 4, 5, -6, 7, 8, 0, 0],
    ),
    (
        "breadcrumbs+sum",
        [[[1, 2, 3, 4], [-40, 30, 20, -10]]],
        given("breadcrumbs", keep_middle=0.5, drop_largest=0.25, per="row"),
        [[0, 2, 3, 0], [0, 30, 20, 0]],
    ),
    *(
        ("breadcrumbs+sum", [[row]], given("breadcrumbs", per=per, **shares), [gives])
        for per in ("tensor", "row")
        for row, shares, gives in [
            # 1 dropped at the top, 3 kept: the first 5, then three of the other four
            (
                [5, 5, 5, 5, 5, 1],
                {"keep_middle": 0.5, "drop_largest": 0.2},
                [0, 5, 5, 5, 0, 0],
            ),
            # ⌊0.01·4⌋ = 0 are dropped at the top
            ([1, 2, 3, 4], {"keep_middle": 0.75, "drop_largest": 0.01}, [0, 2, 3, 4]),
            ([1, 2, 3, 4], {"keep_middle": 0.75, "drop_largest": 0.0}, [0, 2, 3, 4]),
            # 3 of 4 shall be kept, so only 1 can be dropped at the top, not ⌊0.9·4⌋ = 3
            ([1, 2, 3, 4], {"keep_middle": 0.75, "drop_largest": 0.9}, [1, 2, 3, 0]),
            ([7], {"keep_middle": 0.1, "drop_largest": 0.9}, [7]),
            ([1, 2], {"keep_middle": 1.0, "drop_largest": 0.5}, [1, 2]),
        ]
    ),
    ("breadcrumbs+sum", [3], {}, 3),
    ("breadcrumbs+sum", [3], given("breadcrumbs", per="row"), 3),
    ("breadcrumbs+sum", [np.zeros((0, 5))], given("breadcrumbs", per="row"), np.zeros((0, 5))),
    ("breadcrumbs+sum", [np.zeros((3, 0))], given("breadcrumbs", per="row"), [[], [], []]),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("method", "deltas", "settings", "expected"), EXACT)
def test_by_hand(method, deltas, settings, expected, backend):
    found = combine(method, *deltas, backend=backend, **settings)
    np.testing.assert_array_equal(found, np.array(expected, np.float32), strict=True)


def score(value, total):
    return math.exp(2 * value**2) * math.tanh(value * total)


def shares_by_hand():
    """Of each ⌊0.7 · 3⌋ = 2 are kept. The first has three positive scores: its cut is the third."""
    top, middle, cut = score(1, 2), score(0.5, 1), score(0.25, 0.25)
    shares = (middle - cut) / (top - cut), middle / top
    return [2, 0.5 * (shares[0] + 3 * shares[1]) / sum(shares), 0]


ROWS_AT_60_0_90 = (
    [[1, 1, 0], [1, 2, 3], [1, 0, 0]],
    [[1, 0, 1], [3, 6, 9], [0, 1, 0]],
    [[2 / 3, 1 / 3, 1 / 3], [2, 4, 6], [0, 0, 0]],
)
STOCK_ROWS = given("model_stock", each="row")
# base + delta are (1, 0) and (0, 1)
AXES = [[0.5, -0.5], [-0.5, 0.5]]
# The first rows are orthogonal, the second ones parallel.
FIRST, SECOND = [[1, 0], [3, 0]], [[0, 1], [5, 0]]
BETWEEN = [[HALF, HALF], [4, 0]]

NEAR = [
    # Ω = 90°: both coefficients are sin 45° / sin 90°
    ("slerp", [[1, 0], [0, 1]], on_deltas("slerp"), [HALF, HALF]),
    *((m, AXES, {"base": [0.5, 0.5]}, [HALF, HALF]) for m in ("slerp", "karcher", "multislerp")),
    # A third of the way, 30°, from (1, 0) to (0, 1); halfway unless weights say where
    ("nuslerp", [[1, 0], [0, 1]], {"weights": [2, 1]}, [math.cos(math.pi / 6), 0.5]),
    ("nuslerp", [[1, 0], [0, 1]], {}, [HALF, HALF]),
    ("nuslerp", [[1, 0], [0, 1]], {"weights": [1, -1]}, [HALF, HALF]),
    ("nuslerp", [FIRST, SECOND], EACH_ROW, BETWEEN),
    (
        "nuslerp",
        [np.transpose(FIRST), np.transpose(SECOND)],
        given("nuslerp", each="column"),
        np.transpose(BETWEEN),
    ),
    # All with one first index is a row.
    (
        "nuslerp",
        [np.reshape(FIRST, (2, 1, 2)), np.reshape(SECOND, (2, 1, 2))],
        EACH_ROW,
        np.reshape(BETWEEN, (2, 1, 2)),
    ),
    (
        "nuslerp",
        [[[0.5, -0.5], [0, 0]], [[-0.5, 0.5], [0, 0]]],
        {"base": [[0.5, 0.5], [0, 0]], **given("nuslerp", each="row", on="weights")},
        [[HALF, HALF], [0, 0]],
    ),
    # An infinity stays in its row.
    (
        "nuslerp",
        [[[INF, 1], [1, 0]], [[1, 1], [0, 1]]],
        EACH_ROW,
        [[INF, 1], [HALF, HALF]],
    ),
    # The mean direction is (1, 1, 1)/√3, the mean length (1 + 2 + 6)/3 = 3.
    ("karcher", [[1, 0, 0], [0, 2, 0], [0, 0, 6]], on_deltas("karcher"), [math.sqrt(3)] * 3),
    # A quarter of the way from (1, 0) to (0, 1), for weights 3 and 1.
    (
        "karcher",
        [[1, 0], [0, 1]],
        {"weights": [3, 1], **on_deltas("karcher")},
        [math.cos(math.pi / 8), math.sin(math.pi / 8)],
    ),
    # A zero counts for the length alone.
    ("karcher", [[2, 0], [0, 2], [0, 0]], on_deltas("karcher"), [HALF * 4 / 3] * 2),
    ("karcher", [[1, 2], [3, 6]], on_deltas("karcher"), [2, 4]),
    ("multislerp", [[3, 0], [0, 1]], on_deltas("multislerp"), [2 * HALF, 2 * HALF]),
    # The mean direction is (¾, ¼)/√⅝, its length ¾·3 + ¼·1.
    *(
        (
            "multislerp",
            [[3, 0], [0, 1]],
            {"weights": weights, **on_deltas("multislerp")},
            [2.5 * 0.75 / math.sqrt(0.625), 2.5 * 0.25 / math.sqrt(0.625)],
        )
        for weights in ([3, 1], [0.75, 0.25])
    ),
    (
        "multislerp",
        [[3, 0], [0, 1]],
        {"weights": [3, 1], **on_deltas("multislerp", normalize=False)},
        [10 * 3 / math.sqrt(10), 10 / math.sqrt(10)],
    ),
    # Directions cancel where their mean is shorter than 1e-5: straight on.
    ("multislerp", [[3, 4], [-6, -8]], on_deltas("multislerp"), [-1.5, -2]),
    *(
        (method, [[1, height], [-1, height]], on_deltas(method), [0, to])
        for method in ("multislerp", "karcher")
        for height, to in ((8e-6, 8e-6), (2e-5, 1))
    ),
    # cos 60° = ½: t = 2·½ / (1 + ½) = ⅔ of the mean. (1, 1, 0) and (1, 0, 1) are at 60°.
    ("model_stock", [[1, 1, 0], [1, 0, 1]], {}, [2 / 3, 1 / 3, 1 / 3]),
    ("model_stock", [[1, 1, 0], [1, 0, 1]], STOCK_ROWS, [2 / 3, 1 / 3, 1 / 3]),
    # (1, 0), (0, 1) and (2, 0): cosines 0, 1 and 0; t = 3·⅓ / (1 + 2·⅓) = 0.6
    ("model_stock", [[1, 0], [0, 1], [2, 0]], {}, [0.6, 0.2]),
    ("model_stock", [[1, 2], [3, 6]], {}, [2, 4]),
    # A delta of zeros agrees with nothing. Cosines 1, 0, 0: t = 0.6 of the mean (1 + 1 + 0)/3
    ("model_stock", [[1], [1], [0]], {}, [0.4]),
    *(
        ("model_stock", [np.reshape(one, s), np.reshape(two, s)], STOCK_ROWS, np.reshape(both, s))
        for one, two, both in [ROWS_AT_60_0_90]
        for s in ((3, 3), (3, 1, 3), (1, 3, 3))
    ),
    # Squares 10 and 5: (⅔·3 + ⅓·1) / 1 where both agree; the second alone where the sum is -1.
    ("sce", [[3, 1], [1, -2]], {}, [7 / 3, -2]),
    ("sce", [[3e-4], [1e-4]], {}, [2e-4]),  # small changes weigh the same
    # Both have the peak 1. First: 1, ½ and ¼ of it, with sums 2, 1, ¼; second: 1, ½ and 0.
    (
        "pcb",
        [[1, 0.5, 0.25], [1, 0.5, 0]],
        {"weights": [1, 3], **given("pcb", score_ratio=0.7)},
        shares_by_hand(),
    ),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("method", "deltas", "settings", "expected"), NEAR)
def test_nearly_by_hand(method, deltas, settings, expected, backend):
    found = combine(method, *deltas, backend=backend, **settings)
    np.testing.assert_allclose(found, expected, rtol=2e-6, atol=1e-9)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("method", "settings"), [("sce", SELECTED), ("pcb", given("pcb", score_ratio=0.4))]
)
def test_a_nan_stays_where_it_is(method, settings, backend):
    found = combine(method, [NAN, 1, 2], [1, 2, 2], backend=backend, **settings)
    assert np.isnan(found).tolist() == [True, False, False]


# ---------------------------------------------------------------- weights


@pytest.mark.parametrize(
    ("method", "settings", "weights", "text"),
    [
        ("linear", {"normalize": True}, [1.0, -1.0], r"w: weights 1.0, -1.0 .* normalize = false"),
        ("karcher", {}, [1.0, -1.0], "w: weights 1.0, -1.0: karcher takes a mean"),
        ("karcher", {}, [0.0, 0.0], "w: weights 0.0, 0.0: karcher takes a mean"),
        ("multislerp", {}, [1.0, -1.0], r"w: weights 1.0, -1.0 .* normalize = false"),
        ("model_stock", {}, [1.0, 2.0], "model_stock takes no weights"),
        ("arcee_fusion", {}, [1.0, 1.0], "arcee_fusion merges 1 model, but 2 are given"),
        ("slerp", {}, [1.0, 1.0, 1.0], "slerp merges 2 models"),
        ("nuslerp", {}, [1.0, 1.0, 1.0], "nuslerp merges 2 models"),
    ],
)
def test_weights_and_models_that_no_stage_can_take_are_refused_by_the_plan(
    tmp_path, method, settings, weights, text
):
    files = [
        save(tmp_path / f"{number}.safetensors", {"w": np.full(9, number, np.float32)})
        for number in range(len(weights) + 1)
    ]
    weighted = {"weight": weights} if weights != ONES[: len(weights)] else {}
    given = {"base": files[0], "models": files[1:], "method": method, **weighted}
    with pytest.raises(dare.RecipeError, match=text):
        dare.plan(**given, stages={method: settings})


def test_weights_are_divided_tensor_by_tensor():
    base = {name: np.zeros(1, np.float32) for name in "ab"}
    models = [{name: np.full(1, value, np.float32) for name in "ab"} for value in (2, 6)]
    rule = dare.TensorRule(match="b", model="model 1", weight=3.0)
    given = {"method": "sum", "stages": {"sum": {"normalize": True}}, "tensors": [rule]}
    found, _ = dare.merge_arrays(base, models, verbose=False, **given)
    assert [found[name].item() for name in "ab"] == [4, 5]


@pytest.mark.parametrize("method", ["linear", "sum"])
def test_the_base_may_be_one_of_the_models_if_it_has_a_weight(tmp_path, method):
    base = save(tmp_path / "base.safetensors", {"w": np.full(3, 8, np.float32)})
    model = save(tmp_path / "model.safetensors", {"w": np.full(3, 4, np.float32)})
    entries = [{"file": base, "weight": 0.25}, {"file": model, "weight": 0.5}]
    given = {"method": method, "stages": {method: {"on": "weights"}}, "verbose": False}
    dare.merge(base=base, models=entries, output=tmp_path / "out.safetensors", **given)
    assert load_file(tmp_path / "out.safetensors")["w"].tolist() == [4, 4, 4]


# ---------------------------------------------------------------- chains


@pytest.mark.parametrize("backend", BACKENDS)
def test_factors_of_earlier_stages_count(backend):
    half, keep = {"drop_rate": 0.5}, keep_mask("w", 64, 0.5, seed=42)
    found = combine("dare+consensus", np.ones(64), stages={"dare": half}, backend=backend)
    assert found.tolist() == (2.0 * keep).tolist()
    # At p = 0.5 what is kept becomes 1.5, and 1.5 is above 1.
    stages = {"dare": half, "nearswap": {"t": 1.0}}
    found = combine("dare+nearswap+sum", [0.75] * 64, stages=stages, backend=backend)
    assert set(found.tolist()) == {0, 1}
    # Only survivors compete.
    delta = np.arange(1, 65, dtype=np.float32)
    stages = {"dare": half, "pcb": {"score_ratio": 0.125}}
    found = combine("dare+pcb", delta, stages=stages, backend=backend)
    assert found[found != 0] == pytest.approx(2 * delta[keep][-8:], rel=1e-6)


def test_sce_weighs_what_earlier_stages_have_scaled():
    stages = {"dare": {"drop_rate": 0.5}, **SELECTED["stages"]}
    deltas = np.random.default_rng(0).standard_normal((3, 64), np.float32)
    changed = [
        combine("dare+sum", delta, stages={"dare": stages["dare"]}, seed=42 + i)
        for i, delta in enumerate(deltas)
    ]
    expected = combine("sce", *changed, **SELECTED)
    assert combine("dare+sce", *deltas, stages=stages) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_stages_can_come_in_another_order(backend):
    delta = np.arange(1, 101, dtype=np.float32)
    keep = keep_mask("w", 100, 0.5, seed=42)
    expected = np.where(keep & (delta > 80), 2 * delta, 0)
    stages = {"trim": {"keep_ratio": 0.2}, "dare": {"drop_rate": 0.5}}
    found = combine("trim+dare+sum", delta, stages=stages, backend=backend)
    assert found.tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("method", "stages", "left"),
    [
        ("breadcrumbs", {"breadcrumbs": {"keep_middle": 0.4, "drop_largest": 0.1}}, (40,)),
        (
            "breadcrumbs",
            {"breadcrumbs": {"keep_middle": 0.4, "drop_largest": 0.1, "per": "row"}},
            (40,),
        ),
        # a mask drawn after trimming counts what is left
        (
            "trim+dare+sum",
            {"trim": {"keep_ratio": 0.2}, "dare": {"drop_rate": 0.5}},
            (20, int(keep_mask("w", 100, 0.5, 42)[80:].sum())),
        ),
    ],
)
def test_the_report_counts_what_is_left(method, stages, left):
    _, report = dare.merge_arrays(
        {"w": np.zeros(100, np.float32)},
        [{"w": np.arange(1, 101, dtype=np.float32)}],
        method=method,
        stages=stages,
        verbose=False,
    )
    assert report.tensors[0].survivors == (left,)


def test_a_stage_stands_in_a_chain_once():
    with pytest.raises(dare.RecipeError, match="dare appears in it more than once"):
        combine("dare+dare+sum", [1.0])
