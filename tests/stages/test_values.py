"""Every stage on numbers small enough to do by hand, in one table."""

import math

import numpy as np
import pytest
from combining import BACKENDS, combine
from definitions import della_keeps
from safetensors.numpy import load_file

import dare
from dare import keep_mask
from helpers import save

HALF = math.sqrt(0.5)
INF, NAN = math.inf, math.nan
ONES = [1, 1, 1]


def exactly(*deltas, to, **settings):
    """A row of the table: deltas, what else `combine` is given, the result and its tolerances."""
    return deltas, settings, to, {}


def nearly(*deltas, to, **settings):
    """A row whose result is rounded, as of angles."""
    return deltas, settings, to, {"rtol": 2e-6, "atol": 1e-9}


def matrices(*deltas, to, **settings):
    """A row whose result has been through a decomposition."""
    return deltas, settings, to, {"rtol": 1e-5, "atol": 1e-5}


def score(value, total):
    return math.exp(2 * value**2) * math.tanh(value * total)


def shares_by_hand():
    """Of each ⌊0.7 · 3⌋ = 2 are kept. The first has three positive scores: its cut is the third."""
    top, middle, cut = score(1, 2), score(0.5, 1), score(0.25, 0.25)
    shares = (middle - cut) / (top - cut), middle / top
    return [2, 0.5 * (shares[0] + 3 * shares[1]) / sum(shares), 0]


# deltas or whole models, summed or divided by the weights
WEIGHTED = [
    exactly([2], [4], base=[1], weights=weights, to=[to], **settings)
    for settings, weights, to in [
        ({}, [1, 3], 1 + 1 * 2 + 3 * 4),
        ({"normalize": True}, [1, 3], 1 + (1 * 2 + 3 * 4) / 4),
        ({"on": "weights"}, [1, 3], 1 * 3 + 3 * 5),
        ({"on": "weights", "normalize": True}, [1, 3], (1 * 3 + 3 * 5) / 4),
        ({"on": "weights"}, [0, 0], 0),
        ({"on": "weights"}, [0.5, 0.5], 4),
    ]
]
# a quarter of the way from (1, 2) to these: parallel, opposite and zero
STRAIGHT = [([2, 4], [1.25, 2.5]), ([-2, -4], [0.25, 0.5]), ([0, 0], [0.75, 1.5])]
# base + delta are (1, 0) and (0, 1)
BETWEEN_AXES = nearly([0.5, -0.5], [-0.5, 0.5], base=[0.5, 0.5], to=[HALF, HALF])
# The first rows are orthogonal, the second ones parallel.
FIRST, SECOND, BETWEEN = [[1, 0], [3, 0]], [[0, 1], [5, 0]], [[HALF, HALF], [4, 0]]
ROWS_AT_60_0_90 = (
    [[1, 1, 0], [1, 2, 3], [1, 0, 0]],
    [[1, 0, 1], [3, 6, 9], [0, 1, 0]],
    [[2 / 3, 1 / 3, 1 / 3], [2, 4, 6], [0, 0, 0]],
)
# Directions cancel where their mean is shorter than 1e-5: straight on.
CANCELLING = [
    nearly([1, height], [-1, height], on="deltas", to=[0, to])
    for height, to in ((8e-6, 8e-6), (2e-5, 1))
]
UNWEIGHTED_COUNT = {"vote": "count", "weighted": False}
VOTES = [{}, {"vote": "count"}, {"weighted": False}, UNWEIGHTED_COUNT]
SPECTRUM = [[0, 3, 0], [5, 0, 0], [0, 0, -2]]
CHECKS = np.array([[1, -1, 1, -1], [-1, 1, -1, 1]])
WAVES = np.array([[1, 0, -1, 0], [1, 0, -1, 0]])  # at half of the highest frequency
ALONG = np.array([[0.6], [0.8]])
ACROSS = np.array([[3, 1], [-1, 3]]) / np.sqrt(10)
# Left vectors (1, 0) and (3, 4)/5: the nearest orthonormal pair is turned by half of what the angle
# between them, arccos 3/5, lacks of 90°.
TURNED = (np.pi / 2 - np.arccos(0.6)) / 2
COSINE, SINE = np.cos(TURNED), np.sin(TURNED)
SVC_DELTAS = np.diag([4, 0, 6]), np.diag([4, 2, -2])

BY_HAND = {
    # ------------------------------------------------------------ averages
    "linear": [
        exactly([2, 4, -6], [4, 0, 2], to=[3, 2, -2]),
        # 0.5 · (0.25·8 + 0.75·4) = 2.5
        exactly([8], [4], weights=[0.25, 0.75], scale=0.5, to=[2.5]),
        *WEIGHTED,
    ],
    "sum": [
        exactly([2, 4], [4, -5], base=[1, 1], to=[7, 0]),
        exactly([2], [5], weights=[1, -1], to=[-3]),
        *WEIGHTED,
        # weights that cancel are no divisor
        exactly([2], [4], weights=[1, -1], normalize=True, to=[-2]),
    ],
    # What does not agree leaves the base.
    "model_stock": [
        *(
            exactly(first, second, base=[3, 4], to=[3, 4])
            for first, second in (([1, 0], [0, 5]), ([1, 2], [-1, -2]), ([1, 2], [-2, 0]))
        ),
        exactly([0], [0], to=[0]),
        exactly([INF, 1], [1, 3], to=[INF, 2]),
        # cos 60° = ½: t = 2·½ / (1 + ½) = ⅔ of the mean. (1, 1, 0) and (1, 0, 1) are at 60°.
        nearly([1, 1, 0], [1, 0, 1], to=[2 / 3, 1 / 3, 1 / 3]),
        nearly([1, 1, 0], [1, 0, 1], each="row", to=[2 / 3, 1 / 3, 1 / 3]),
        # (1, 0), (0, 1) and (2, 0): cosines 0, 1 and 0; t = 3·⅓ / (1 + 2·⅓) = 0.6
        nearly([1, 0], [0, 1], [2, 0], to=[0.6, 0.2]),
        nearly([1, 2], [3, 6], to=[2, 4]),
        # A delta of zeros agrees with nothing. Cosines 1, 0, 0: t = 0.6 of the mean (1 + 1 + 0)/3
        nearly([1], [1], [0], to=[0.4]),
        *(
            nearly(np.reshape(first, shape), np.reshape(second, shape), each="row", to=to)
            for shape in ((3, 3), (3, 1, 3), (1, 3, 3))
            for first, second, both in [ROWS_AT_60_0_90]
            for to in [np.reshape(both, shape)]
        ),
    ],
    # ------------------------------------------------------------ angles
    # The ends of an arc are the models.
    "slerp": [
        *(
            exactly([0.25, -0.5], [-1, 0.5], base=[1.5, 2], t=t, on=on, to=end)
            for t, end in [(0, [1.75, 1.5]), (1, [0.5, 2.5])]
            for on in ("weights", "deltas")
        ),
        *(exactly([1, 2], other, on="deltas", t=0.25, to=to) for other, to in STRAIGHT),
        # Ω = 90°: both coefficients are sin 45° / sin 90°
        nearly([1, 0], [0, 1], on="deltas", to=[HALF, HALF]),
        BETWEEN_AXES,
    ],
    "nuslerp": [
        *(
            exactly([[1, 2]], [other], weights=[3, 1], each=each, to=[to])
            for other, to in STRAIGHT
            for each in ("tensor", "row")
        ),
        # A third of the way, 30°, from (1, 0) to (0, 1); halfway unless weights say where
        nearly([1, 0], [0, 1], weights=[2, 1], to=[math.cos(math.pi / 6), 0.5]),
        nearly([1, 0], [0, 1], to=[HALF, HALF]),
        nearly([1, 0], [0, 1], weights=[1, -1], to=[HALF, HALF]),
        nearly(FIRST, SECOND, each="row", to=BETWEEN),
        nearly(*map(np.transpose, (FIRST, SECOND)), each="column", to=np.transpose(BETWEEN)),
        # All with one first index is a row.
        nearly(
            np.reshape(FIRST, (2, 1, 2)),
            np.reshape(SECOND, (2, 1, 2)),
            each="row",
            to=np.reshape(BETWEEN, (2, 1, 2)),
        ),
        nearly(
            [[0.5, -0.5], [0, 0]],
            [[-0.5, 0.5], [0, 0]],
            base=[[0.5, 0.5], [0, 0]],
            each="row",
            on="weights",
            to=[[HALF, HALF], [0, 0]],
        ),
        # An infinity stays in its row.
        nearly([[INF, 1], [1, 0]], [[1, 1], [0, 1]], each="row", to=[[INF, 1], [HALF, HALF]]),
    ],
    "karcher": [
        exactly([2, 0], [0, 0], on="deltas", to=[1, 0]),
        exactly([0, 0], [0, 0], on="deltas", to=[0, 0]),
        exactly([4, 0], [-2, 0], on="deltas", to=[1, 0]),  # opposite
        exactly([4, 0], [-4, 0], weights=[3, 1], on="deltas", to=[2, 0]),
        exactly([INF, 1], [1, 3], on="deltas", to=[INF, 2]),
        BETWEEN_AXES,
        # The mean direction is (1, 1, 1)/√3, the mean length (1 + 2 + 6)/3 = 3.
        nearly([1, 0, 0], [0, 2, 0], [0, 0, 6], on="deltas", to=[math.sqrt(3)] * 3),
        # A quarter of the way from (1, 0) to (0, 1), for weights 3 and 1.
        nearly(
            *([1, 0], [0, 1]),
            weights=[3, 1],
            on="deltas",
            to=[math.cos(math.pi / 8), math.sin(math.pi / 8)],
        ),
        # A zero counts for the length alone.
        nearly([2, 0], [0, 2], [0, 0], on="deltas", to=[HALF * 4 / 3] * 2),
        nearly([1, 2], [3, 6], on="deltas", to=[2, 4]),
        *CANCELLING,
    ],
    "multislerp": [
        exactly([0, 0], [0, 0], [0, 0], base=[1, 2], on="deltas", to=[1, 2]),
        exactly([0, 0], [4, 0], on="deltas", to=[2, 0]),
        exactly([INF, 1], [1, 3], on="deltas", to=[INF, 2]),
        BETWEEN_AXES,
        nearly([3, 0], [0, 1], on="deltas", to=[2 * HALF, 2 * HALF]),
        # The mean direction is (¾, ¼)/√⅝, its length ¾·3 + ¼·1.
        *(
            nearly([3, 0], [0, 1], weights=weights, on="deltas", to=[7.5 * size, 2.5 * size])
            for weights in ([3, 1], [0.75, 0.25])
            for size in [0.25 / math.sqrt(0.625)]
        ),
        nearly(
            *([3, 0], [0, 1]),
            weights=[3, 1],
            on="deltas",
            normalize=False,
            to=[10 * 3 / math.sqrt(10), 10 / math.sqrt(10)],
        ),
        nearly([3, 4], [-6, -8], on="deltas", to=[-1.5, -2]),
        *CANCELLING,
    ],
    # ------------------------------------------------------------ votes
    "ties": [
        # element 0: 3 + 1 > 2: mean of 3 and 1; element 1: -4 beats 3; element 2: all agree
        exactly([3, 1, 2], [1, 2, 4], [-2, -4, 6], to=[2, -4, 4]),
        exactly([1, 0], [-1, 0], to=[0, 0]),  # the sides cancel
        exactly([3], [0], [5], to=[4]),  # a zero does not count in the mean
        # 3·1 beats 1·2; its mean is (3·1)/3. Unweighted, 2 would win.
        exactly([1], [-2], weights=[3, 1], to=[1]),
        exactly([2], [6], weights=[1, 3], to=[5]),  # (1·2 + 3·6) / (1 + 3)
        exactly([2], [6], weights=[1, 3], divide_by="count", to=[10]),
        # 2·1 - 1·(-4) = 6 over 2 - 1, not over 2 + 1; of one alone the minus cancels
        exactly([1], [-4], weights=[2, -1], divide_by="signed", to=[6]),
        exactly([1], [0], weights=[-2, 1], divide_by="signed", to=[1]),
        exactly([1], [-4], weights=[1, -1], divide_by="signed", to=[5]),
        # trimmed to [3, 0] and [0, -4]
        exactly([3, 1], [-2, -4], keep_ratio=0.5, to=[3, -4]),
        # unweighted, 2 - 1 > 0 elects the first: 1·2/1; weighted, 2 - 3 < 0 the second: -3/3
        exactly([2], [-1], weights=[1, 3], to=[-1]),
        exactly([2], [-1], weights=[1, 3], weighted=False, to=[2]),
        # -5 outweighs 1 and 2, but they are two
        exactly([1], [2], [-5], to=[-5]),
        exactly([1], [2], [-5], vote="count", to=[1.5]),
        # 1 + 1 < 4; unweighted 2 > 1
        exactly([1], [3], [-0.25], weights=[1, 1, 4], vote="count", to=[-0.25]),
        exactly([1], [3], [-0.25], weights=[1, 1, 4], **UNWEIGHTED_COUNT, to=[2]),
        exactly([1, 0], [-5, 0], vote="count", to=[0, 0]),
        exactly([2], [6], weights=[1, 3], weighted=False, divide_by="count", to=[10]),
        exactly([2], [6], weights=[1, 3], weighted=False, divide_by="nothing", to=[20]),
        exactly([2], [6], weights=[1, 3], weighted=False, to=[5]),
        *(exactly([2], weights=[-1], **vote, to=[-2]) for vote in VOTES),
        *(exactly([2], [-8], weights=[1, 0], **vote, to=[2]) for vote in VOTES),
        *(exactly([NAN], [1], [1], **vote, to=[NAN]) for vote in VOTES),
    ],
    "emr": [
        # 3 + 1 - 2 > 0: 3; 1 + 2 - 4 < 0: -4; all agree: 6; 1 - 1 + 0 = 0
        exactly([3, 1, 2, 1], [1, 2, 4, -1], [-2, -4, 6, 0], to=[3, -4, 6, 0]),
        exactly([1], [-2], weights=[3, 1], to=[3]),  # 3·1 - 2 > 0: 3·1
        exactly([1], [-INF], weights=[1, 0], to=[1]),
        exactly([NAN, 1], [1, 1], to=[NAN, 1]),
    ],
    "consensus": [
        # sums 4, 5, 1. At λ = 0.5: 3 ≥ 0.5·1, 1 < 0.5·3; 3 ≥ 0.5·2, 2 ≥ 0.5·3; 2 ≥ 0.5·1, 1 ≥ 0.5·2
        exactly([3, 3, 2], [1, 2, -1], selectivity=0.5, to=[0, 5, 1]),
        # 1, 1 and 1 in three models: each 1 ≥ 0.5·2; of 4 and 1 only 4 needs it; at λ = 0.5 in the
        # last, 1 < 0.5·|0 - 1| is false, so both do, and the sum is 0
        exactly([1, 4, 1], [1, 1, -1], [1, 0, 0], selectivity=0.5, agree=1, to=[3, 5, 0]),
        # each 1 < 2·|3 - 1|
        exactly([1], [1], [1], selectivity=2.0, agree=1, to=[0]),
        # s = 0.5·4 + 2 = 4; |4| ≥ 0.4·0, |2| ≥ 0.4·2
        exactly([4], [2], weights=[0.5, 1], to=[4]),
        # A weight of 0 asks nobody: two are asked, and 1 < 0.4·3; or one, who is enough.
        exactly([3], [1], [4], weights=[1, 1, 0], to=[0]),
        exactly([3], [4], weights=[1, 0], to=[3]),
        exactly([NAN, 1], [1, 1], to=[NAN, 2]),
    ],
    "ram": [
        exactly([1, 2, 0, 1e-6], [3, 0, 0, -1e-5], to=[2, 2, 0, 0]),
        exactly([1, 4], [3, 1], threshold=1, to=[3, 4]),
        exactly([NAN, 1], [0, 3], to=[NAN, 2]),
    ],
    "ramplus": [
        # The first shares one and has two of its own: 1 + ½·½. The second: 1/1, of which ¾ count.
        exactly([4, 2, -8, 0], [2, 0, 0, 8], boost=0.5, most=0.75, to=[3, 2.5, -10, 11]),
        exactly([4, 2], [2, 6], to=[3, 4]),
        exactly([4, 0], [0, 6], to=[4, 6]),
        exactly([NAN, 1], [0, 3], to=[NAN, 2]),
    ],
    # ------------------------------------------------------------ scores
    "arcee_fusion": [
        # In one row |δ| alone decides: 3 + 1.5·(4 - 2) = 6
        exactly([1, -2, 3, 4, -9], to=[0, 0, 0, 0, -9]),
        # Both rows diverge alike; a shift of a whole row does nothing to its softmax.
        exactly([[1, 2, 3, 4, 9], [9, 4, 3, 2, 1]], to=[[0, 0, 0, 0, 9], [9, 0, 0, 0, 0]]),
        # 0, 1 and 2 are the quartiles: from 3 on
        exactly([[1, 2, 3, 4, 9], [20] * 5], to=[[0, 0, 3, 4, 9], [0] * 5]),
        # Where nothing differs by row all is taken; a row with NaN is kept whole.
        exactly([[1], [2]], base=[[5], [5]], to=[[6], [7]]),
        exactly(3, to=3),
        exactly([[NAN, 1, 0, 2]], to=[[NAN, 1, 0, 2]]),
    ],
    "sce": [
        # Of two that differ half is one. Variances 4, 0, 4, 0: there the second model has nothing.
        exactly([4, 1, 2, 0], [0, 1, -2, 0], select_ratio=0.5, to=[4, 0, 0, 0]),
        *(
            exactly(*deltas, base=[3, 4], select_ratio=0.5, to=[3, 4])  # nothing is selected
            for deltas in ([[1, 2]], [[1, 2], [1, 2]], [[1, 2], [1, 5]])
        ),
        exactly([1], [-1], to=[1]),  # a sum of zero is plus
        exactly([NAN, 1], [1, 1], to=[NAN, 1]),
        # Squares 10 and 5: (⅔·3 + ⅓·1) / 1 where both agree; the second alone where the sum is -1.
        nearly([3, 1], [1, -2], to=[7 / 3, -2]),
        nearly([3e-4], [1e-4], to=[2e-4]),  # small changes weigh the same
    ],
    "pcb": [
        # The score grows with the magnitude; ⌊0.4 · 5⌋ = 2 of one model are themselves.
        exactly([1, -5, 3, 2, -4], score_ratio=0.4, to=[0, -5, 0, 0, -4]),
        # Sums: 3, 0, -1. First: scores e^0·tanh 6, 0, 0 (against the sum); second e^(2/9 - 2)·tanh
        # 3, 0 and tanh 3, which is more than nine times the one before. One of each is kept and has
        # a share of 1, and each of those elements has no second share.
        exactly([2, 2, 2], [1, -2, -3], score_ratio=0.4, to=[2, 0, -3]),
        exactly([0, 0], [0, 0], to=[0, 0]),
        exactly([3], [1], to=[2]),
        exactly([3], [-1], to=[3]),
        exactly([INF, 1, 2], to=[INF, 0, 0]),
        # Both have the peak 1. First: 1, ½ and ¼ of it, with sums 2, 1, ¼; second: 1, ½ and 0.
        nearly([1, 0.5, 0.25], [1, 0.5, 0], weights=[1, 3], score_ratio=0.7, to=shares_by_hand()),
    ],
    # ------------------------------------------------------------ trimming
    "trim+sum": [
        # ⌊0.4 · 5⌋ = 2; of equals the first; at least one
        exactly([1, -5, 3, 2, -4], keep_ratio=0.4, to=[0, -5, 0, 0, -4]),
        exactly([2, 1, -2, 2, 3], keep_ratio=0.6, to=[2, 0, -2, 0, 3]),
        exactly([1, 2], keep_ratio=0.1, to=[0, 2]),
        # what is kept has the magnitude of all, 15/9; so in the two of `breadcrumbs`, 12/6
        exactly(
            [1, -5, 3, 2, -4],
            keep_ratio=0.4,
            rescale="l1",
            to=[0, -5 * np.float32(15 / 9), 0, 0, -4 * np.float32(15 / 9)],
        ),
    ],
    "breadcrumbs+sum": [
        exactly([1, -5, 4, 2], keep_middle=0.5, drop_largest=0.25, rescale="l1", to=[0, 0, 8, 4]),
        exactly(
            [[1, -5, 4, 2]],
            keep_middle=0.5,
            drop_largest=0.25,
            rescale="l1",
            per="row",
            to=[[0, 0, 8, 4]],
        ),
        # n = 10: ⌊0.5·10⌋ = 5 kept below ⌊0.2·10⌋ = 2 dropped
        exactly(
            [1, -10, 3, 4, 5, -6, 7, 8, 9, 2],
            keep_middle=0.5,
            drop_largest=0.2,
            to=[0, 0, 0, 4, 5, -6, 7, 8, 0, 0],
        ),
        exactly(
            [[1, 2, 3, 4], [-40, 30, 20, -10]],
            keep_middle=0.5,
            drop_largest=0.25,
            per="row",
            to=[[0, 2, 3, 0], [0, 30, 20, 0]],
        ),
        *(
            exactly([row], keep_middle=kept, drop_largest=dropped, per=per, to=[to])
            for per in ("tensor", "row")
            for row, kept, dropped, to in [
                # 1 dropped at the top, 3 kept: the first 5, then three of the other four
                ([5, 5, 5, 5, 5, 1], 0.5, 0.2, [0, 5, 5, 5, 0, 0]),
                # ⌊0.01·4⌋ = 0 are dropped at the top
                ([1, 2, 3, 4], 0.75, 0.01, [0, 2, 3, 4]),
                ([1, 2, 3, 4], 0.75, 0.0, [0, 2, 3, 4]),
                # 3 of 4 shall be kept, so only 1 can be dropped at the top, not ⌊0.9·4⌋ = 3
                ([1, 2, 3, 4], 0.75, 0.9, [1, 2, 3, 0]),
                ([7], 0.1, 0.9, [7]),
                ([1, 2], 1.0, 0.5, [1, 2]),
            ]
        ),
        exactly(3, to=3),
        exactly(3, per="row", to=3),
        exactly(np.zeros((0, 5)), per="row", to=np.zeros((0, 5))),
        exactly(np.zeros((3, 0)), per="row", to=[[], [], []]),
    ],
    "trim+breadcrumbs+sum": [
        exactly(
            [[9, 8, 7, 6, 5, 4, 3, 2, 1, 0]],
            keep_ratio=0.4,
            keep_middle=0.5,
            drop_largest=0.25,
            per="row",
            to=[[0, 8, 7, 0, 0, 0, 0, 0, 0, 0]],
        )
    ],
    "nearswap": [exactly([-3, -1, 0.5, 2, INF, NAN], t=1.0, to=[-1, -1, 0.5, 1, 1, NAN])],
    # ------------------------------------------------------------ structured
    "cabs": [
        # The first takes 9 and -8; of the rest, the second takes 6 and 5, though its 7 is larger.
        exactly([9, 1, -8, 2], [7, 6, 4, 5], n=2, m=4, to=[9, 6, -8, 5]),
        # 9 to the first, 5 to the second; nothing is free, and the third has its best of both
        exactly([9, 1], [7, 5], [2, 3], n=1, m=2, to=[9, 8]),
        # 4/1 · (0.5·9) and 4/1 · (2·6)
        exactly(
            *([9, 1, 8, 2], [7, 6, 4, 5]),
            weights=[0.5, 2],
            n=1,
            m=4,
            rescale=True,
            to=[18, 48, 0, 0],
        ),
        exactly([1, 2, 3, 4, 5, 6], n=1, m=4, to=[0, 0, 0, 4, 0, 6]),
    ],
    "nm+sum": [
        exactly([[1, -4, 3, 2, 5, 6, 7, -8]], to=[[0, -8, 6, 0, 0, 0, 14, -16]]),
        exactly([1, -4, 3, 2], n=1, rescale=False, to=[0, -4, 0, 0]),
        exactly([2, 2, 2, 2], to=[4, 4, 0, 0]),
        # rows of 6: groups of 4 and 2; of 2, ⌈1·2/4⌉ = 1 is kept and multiplied by 2/1, not 4/1
        exactly(
            [[1, 2, 3, 4, 5, 6], [6, 5, 4, 3, 2, 1]],
            n=1,
            to=[[0, 0, 0, 16, 0, 12], [24, 0, 0, 0, 4, 0]],
        ),
        exactly([[3, 1, 2]], n=1, m=2, rescale=False, to=[[3, 0, 2]]),
        exactly([1, 2, 3, 4, 5], n=4, to=[1, 2, 3, 4, 5]),
        exactly([1, 2, 3], n=1, m=1, to=[1, 2, 3]),
        exactly([1, -4, 3, 2], turn=1, to=[2, 0, 0, 4]),
        exactly(3, to=3),
        exactly(np.zeros((2, 0)), to=[[], []]),
    ],
    # Groups of one, two, three and four that are left keep 1, 1, 2 and 2 of them.
    "trim+nm+sum": [
        exactly(
            [[8, 0, 0, 0, 8, 4, 0, 0, 8, 4, 2, 0, 8, 4, 2, 1]],
            keep_ratio=10 / 16,
            to=[[8, 0, 0, 0, 16, 0, 0, 0, 12, 6, 0, 0, 16, 8, 0, 0]],
        )
    ],
    "trim+cabs": [
        exactly(
            [[8, 0, 0, 0, 8, 4, 2, 0]],
            stages={"trim": {"keep_ratio": 0.5}, "cabs": {"n": 2, "m": 4, "rescale": True}},
            to=[[8, 0, 0, 0, 12, 6, 0, 0]],
        )
    ],
    # ------------------------------------------------------------ matrices
    # Singular values 5, 3, 2. At 0.4 the 5 is enough (4 of 10) and takes all: 5·10/5. At 0.6 the 3
    # is needed: 8 of 10 are held, so both are multiplied by 10/8.
    "star+sum": [
        matrices(SPECTRUM, to=[[0, 0, 0], [10, 0, 0], [0, 0, 0]]),
        matrices(SPECTRUM, singular_share=0.6, to=[[0, 3.75, 0], [6.25, 0, 0], [0, 0, 0]]),
    ],
    "fourier+sum": [
        # The only frequency below 0.1 in so small a matrix is zero: the mean, 4.
        matrices([[1, 2, 3], [5, 6, 7]], to=[[-3, -2, -1], [1, 2, 3]]),
        # The highest frequency passes and the lower does not.
        matrices(5 + CHECKS + WAVES, radius=0.6, to=CHECKS),
        matrices(5 + CHECKS + WAVES, radius=0.5, to=CHECKS + WAVES),
    ],
    "tsv": [
        # One triple each: 3 at the upper left, 4 at the lower right. They do not touch.
        matrices([[3, 0], [0, 1]], [[2, 0], [0, 4]], to=[[3, 0], [0, 4]]),
        # Directions that touch are turned apart.
        matrices(
            [[2, 0], [0, 0]],
            [[0, 3], [0, 4]],
            to=[[2 * COSINE, 5 * SINE], [-2 * SINE, 5 * COSINE]],
        ),
    ],
    "iso": [
        # The sum has singular values 6 and 2; their mean is 4.
        matrices([[0, 1], [-2, 0]], [[0, 1], [-4, 0]], to=[[0, 4], [-4, 0]]),
        # Two of four directions are common, 8 and 3 in the sum. One is left for each model: 2.5 for
        # the second, and none for the first, which has no change outside the common two.
        matrices(
            np.diag([4, 3, 0, 0]),
            np.diag([4, 0, 2.5, 1]),
            variant="cts",
            common_share=0.5,
            to=np.diag([(8 + 3 + 2.5) / 3] * 3 + [0]),
        ),
    ],
    "knots": [
        # The models' changes all lie along (0.6, 0.8), with right parts (5, 0, 10) and
        # (10, -5, -5); of those the mean of 5 and 10, then -5 alone, then 10, which outweighs 5.
        matrices(
            *(ALONG * [5, 0, 10], ALONG * [10, -5, -5]), keep_ratio=1.0, to=ALONG * [7.5, -5, 10]
        ),
        # one of three is kept
        matrices(
            *(ALONG * [5, 0, 10], ALONG * [20, -5, -5]), keep_ratio=0.4, to=ALONG * [20, 0, 10]
        ),
        # Weights vote and divide: 3·5 + 10 by 4, and 3 by 3. A minus turns a model around and
        # divides like a plus: 15 - 10 elects 15 by 3, and both of 3 + 2 by 4.
        *(
            matrices(
                ALONG * [5, 1], ALONG * [10, -2], weights=weights, keep_ratio=1.0, to=ALONG * along
            )
            for weights, along in (([3, 1], [25 / 4, 1]), ([3, -1], [5, 5 / 4]))
        ),
    ],
    "swudi": [
        # Both have all of their change in one column, the first: C is 2 there and 0 elsewhere. D is
        # 3·9/9 + 5·25/25 = 8 and θ·C is 8·2 = 16; (8 - 16)/2 = -4 is added to 8.
        matrices([[3, 0], [0, 0]], [[5, 0], [0, 0]], to=[[4, 0], [0, 0]]),
        # τ = diag(2, 1) twice: λ = 2·(4/5, 1/5), and θ = 2τ is to become τ.
        matrices(
            *[np.diag([2, 1])] * 2, time=1.0, rank_share=0.5, to=np.diag([2 + 2 * np.exp(-1.6), 2])
        ),
    ],
    "dc_merge": [
        # Models at right angles
        *(
            matrices(
                np.diag([4, 3, 0, 0]), np.diag([0, 0, 2, 1]), keep_ratio=share, to=np.diag(kept)
            )
            for share, kept in ((2 / 16, [4, 3, 2, 1]), (1 / 16, [4, 0, 2, 0]))
        ),
        # Left vectors (1, 0) and (0.6, 0.8) become (3, -1)/√10 and (1, 3)/√10; the right ones stay.
        # Of 4 and 2 the part 3/√10 is along each model's own, and what lies across is left out.
        matrices(
            [[4, 0], [0, 0]],
            np.outer([0.6, 0.8], [0, 2]),
            keep_ratio=1.0,
            to=[[3.6, 0.6], [-1.2, 1.8]],
        ),
        # Now right vectors are the same as left ones: each model has 9/10 of its value along its
        # own direction, and 1/10 along the other's, where the larger sign wins.
        *(
            matrices(
                [[4, 0], [0, 0]],
                size * ALONG @ ALONG.T,
                keep_ratio=1.0,
                to=ACROSS * elected @ ACROSS.T,
            )
            for size, elected in ((2, (1.9, 1.1)), (-2, (3.6, -1.8)))
        ),
        *(
            matrices(np.diag([6, 2]), keep_ratio=1.0, max_ratio=most, to=np.diag(to))
            for most, to in ((None, [6, 2]), (1.0, [4, 4]), (2.0, [16 / 3, 8 / 3]), (9.0, [6, 2]))
        ),
    ],
    "linear+svc": [
        # The mean is (4, 1, 2). Both models have the first direction, once each: 4. Only the second
        # has the next, of which the mean holds half: 1 · 2 / (½ + ½). Of the last it holds 1/3 of
        # what the first has, and -1 times what the second has, and both count as ½.
        matrices(*SVC_DELTAS, to=np.diag([4, 2, 4])),
        matrices(*SVC_DELTAS, alpha=1.0, to=np.diag([4, 1, 2])),
        # The mean is (3, 1), and twice the weights are 3/2 and 1/2: (6, 0) and (0, 2) count, of
        # each of which the mean holds half.
        matrices(np.diag([4, 0]), np.diag([0, 4]), weights=[0.75, 0.25], to=np.diag([6, 2])),
    ],
    "sum+svc": [
        # The sum is (8, 2, 4): 8 · 2 / (2 + 2), 2 · 2 / (½ + 1), 4 · 2 / (2/3 + ½).
        matrices(*SVC_DELTAS, to=np.diag([4, 8 / 3, 48 / 7])),
        # A negative weight turns its model; a factor on all weights is undone: 3 · 2 / (3 + 3/2).
        matrices(
            np.diag([4, 0]), np.diag([0, 2]), weights=[1.0, -1.0], to=np.diag([16 / 3, -8 / 3])
        ),
        *(
            matrices(np.diag([3, 1]), np.diag([3, 2]), weights=[w] * 2, to=np.diag([3, 4 / 3]))
            for w in (1.0, 5.0)
        ),
    ],
    # Of what agrees the mean is (4, 2, 6): 4, 2 · 2 / (½ + 1), 6 · 2 / (1 + ½).
    "ties+svc": [matrices(*SVC_DELTAS, to=np.diag([4, 8 / 3, 8]))],
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("method", "row"), [(method, row) for method, rows in BY_HAND.items() for row in rows]
)
def test_by_hand(method, row, backend):
    deltas, settings, expected, tolerances = row
    found = combine(method, *deltas, backend=backend, **settings)
    check = np.testing.assert_allclose if tolerances else np.testing.assert_array_equal
    check(found, np.array(expected, np.float32), strict=True, **tolerances)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("method", "settings"), [("sce", {"select_ratio": 0.5}), ("pcb", {"score_ratio": 0.4})]
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
    stages = {"dare": {"drop_rate": 0.5}, "sce": {"select_ratio": 0.5}}
    deltas = np.random.default_rng(0).standard_normal((3, 64), np.float32)
    changed = [
        combine("dare+sum", delta, stages={"dare": stages["dare"]}, seed=42 + i)
        for i, delta in enumerate(deltas)
    ]
    expected = combine("sce", *changed, select_ratio=0.5)
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
        ("della", {}, (int(della_keeps(np.arange(1, 101), 0.9, 0.14)[0].sum()),)),
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
