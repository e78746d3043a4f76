"""The compiled kernels have the bits of the reference, on any numbers."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from dare.kernels import LANES_MULTIPLE, Band, ChunkJob, Operand, core, reference
from dare.tensors.chunks import CHUNK, chunk_spans
from dare.tensors.dtypes import STORAGE_TYPES
from dare.tensors.mask import keep_threshold, mask_key

SIZES = st.integers(0, 200)
ANY_BITS = st.integers(0, 2**32 - 1)
WEIGHTS = st.floats(-4, 4, width=32).map(np.float32)
CARRIERS = [kind.carrier for kind in STORAGE_TYPES.values() if kind.is_weight]
TYPE_PAIRS = [(carrier, carrier) for carrier in CARRIERS] + [
    (np.dtype("float32"), np.dtype("uint16")),
    (np.dtype("uint16"), np.dtype("float32")),
]
"""Base and models: every type, and two pairs of different ones."""
THRESHOLD = np.float32(0.002).view(np.int32)


def any_floats(size):
    """Normal, subnormal, infinite and NaN numbers."""
    bits = ANY_BITS | st.sampled_from([0x7F800000, 0xFF800000, 0x7FC00000])
    return arrays.arrays(np.uint32, size, elements=bits).map(lambda a: a.view(np.float32))


def near_zero(size):
    """Few distinct values, so that ties and zeros are common."""
    values = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, -2.0, 0.5, 3e-39])
    return arrays.arrays(np.float32, size, elements=values)


def lanes(size):
    return arrays.arrays(np.uint8, size, elements=st.sampled_from([0, 255]))


def stored(carrier, size):
    width = np.dtype(f"u{carrier.itemsize}")
    return arrays.arrays(width, size).map(lambda a: a.view(carrier))


def raws(size):
    return st.sampled_from(CARRIERS).flatmap(lambda carrier: stored(carrier, size))


def assert_same(function, *arguments):
    """Run a kernel of both backends on copies; all arrays and results must be equal in bits."""

    def run(backend):
        copies = [a.copy() if isinstance(a, np.ndarray) else a for a in arguments]
        returned = getattr(backend, function)(*copies)
        written = [a.tobytes() for a in copies if isinstance(a, np.ndarray)]
        return np.array(returned if returned is not None else 0).tolist(), written

    assert_alike(run)


def comparable(figures):
    """Machines choose the payload of a NaN, so a peak that is one only has to be one."""
    peak, *rest = (int(figure) for figure in figures)
    return ["NaN" if peak > 0x7F800000 else peak, *rest]


def without_nan_payload(values):
    """Machines choose the payload of a NaN they make; ours are made the same when encoded."""
    return np.where(np.isnan(values), np.float32(np.nan), values)


def assert_alike(run):
    """Run something with both backends; the arrays it returns must be equal but for payloads."""

    def plain(found):
        if isinstance(found, np.ndarray):
            return (without_nan_payload(found) if found.dtype == np.float32 else found).tobytes()
        return list(map(plain, found)) if isinstance(found, list | tuple) else found

    assert plain(run(reference)) == plain(run(core))


@given(SIZES.flatmap(lambda n: st.tuples(raws(n), any_floats(n), lanes(n))))
def test_deltas(case):
    raw, base, lane = case

    def run(backend):
        out = np.ones(base.size, np.float32)
        return comparable(backend.delta(raw, base, lane, out, THRESHOLD)), out

    assert_alike(run)


@given(
    st.sampled_from(CARRIERS).flatmap(
        lambda carrier: SIZES.flatmap(
            lambda n: st.tuples(stored(carrier, n), near_zero(n), WEIGHTS)
        )
    )
)
def test_results_are_encoded_alike(case):
    raw, merged, scale = case

    def run(backend):
        outs = np.zeros_like(raw), np.zeros(raw.size, np.uint16)
        peaks = [comparable([backend.add_to_base(raw, merged, scale, out)]) for out in outs]
        return peaks, [out.tobytes() for out in outs]

    assert_alike(run)


@st.composite
def merges(draw):
    """A chunk of a base and of one to four models, with masks, cuts, weights and shares."""
    size = draw(st.integers(0, 300) | st.sampled_from([4096, 4097, 9000]))
    base_type, tuned_type = draw(st.sampled_from(TYPE_PAIRS))
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))

    def elements(carrier):
        few = generator.integers(0, 256**carrier.itemsize, 7, dtype=f"u{carrier.itemsize}")
        return generator.choice(few, size).view(carrier)

    def mask():
        rate = draw(st.sampled_from([0.0, 0.001, 0.5, 0.9, 0.9961, 0.9999]))
        high, low = divmod(keep_threshold(rate), 1 << 32)
        return None if high == 256 else (*mask_key(draw(ANY_BITS), "w"), high, low)

    start = 128 * draw(st.integers(0, 2**40))
    borders = st.integers(start - 1, start + size + 1)
    least = st.sampled_from([0, 1, 0x3A000000, 0x40000000])
    most = st.sampled_from([0x40000000, 0x7F800000, 0x7FFFFFFF])
    bands = st.none() | st.builds(Band, least, borders, most, borders)
    parts = [
        Operand(
            elements(tuned_type),
            mask(),
            draw(bands),
            draw(WEIGHTS),
            draw(st.sampled_from([0.5, 1.0, 1 / 3])),
        )
        for _ in range(draw(st.integers(1, 4)))
    ]
    return elements(base_type), parts, start, draw(st.booleans())


@settings(max_examples=150)
@given(merges())
def test_everything_in_one_kernel(case):
    base, parts, start, elects = case

    def run(backend):
        out = np.ones(base.size, np.float32)
        figures = backend.combine(base, parts, start, elects, THRESHOLD, out)
        return [list(map(comparable, of_models)) for of_models in figures], out

    assert_alike(run)


def merged_jobs(backend, jobs):
    """What a batch reports of each job, and what it writes."""
    found = [
        (
            [list(map(comparable, row)) for row in done.figures],
            comparable([done.peak]),
            done.digests,
        )
        for done in backend.merge(jobs, THRESHOLD)
    ]
    return found, [job.out.tobytes() for job in jobs]


@settings(max_examples=50)
@given(
    st.lists(st.tuples(merges(), st.lists(st.booleans(), min_size=5, max_size=5)), max_size=3),
    WEIGHTS,
    st.sampled_from(CARRIERS),
)
def test_jobs_of_a_batch(cases, scale, out_type):
    def run(backend):
        outs = (np.zeros(base.size, out_type) for (base, *_), _ in cases)
        jobs = [
            ChunkJob(base, parts, start, elects, scale, out, known[: len(parts) + 1])
            for ((base, parts, start, elects), known), out in zip(cases, outs, strict=True)
        ]
        return merged_jobs(backend, jobs)

    assert_alike(run)


@pytest.mark.parametrize("known", [(False, False), (True, False), (False, True)])
def test_a_job_of_several_chunks(known):
    size = 2 * CHUNK + 5
    base, tuned = np.random.default_rng(0).integers(0, 0x4000, (2, size), np.uint16)
    part = Operand(tuned, (1, 2, 128, 0), None, np.float32(1), 0.0)

    def run(backend):
        out = np.zeros(size, np.uint16)
        job = ChunkJob(base, [part], 128, False, np.float32(0.5), out, known)
        return merged_jobs(backend, [job])

    assert_alike(run)


def test_figures_are_those_of_each_chunk():
    size = 2 * CHUNK + 5
    generator = np.random.default_rng(0)
    base, tuned = generator.standard_normal((2, size), np.float32)
    part = Operand(tuned, (1, 2, 128, 0), None, np.float32(1), 0.0)
    for backend in (reference, core):
        out = np.empty(size, np.float32)
        together = backend.combine(base, [part], 0, False, THRESHOLD, out)
        for chunk, (first, count) in enumerate(chunk_spans(size)):
            span, alone = slice(first, first + count), np.empty(count, np.float32)
            one = part._replace(tuned=tuned[span])
            (figures,) = backend.combine(base[span], [one], first, False, THRESHOLD, alone)
            assert figures.tolist() == together[chunk].tolist()
            assert alone.tobytes() == out[span].tobytes()


@given(
    st.lists(st.integers(1, 3000), min_size=1, max_size=3),
    st.sampled_from([np.uint8, np.uint16, np.float32]),
)
@example([CHUNK + 300, 2 * CHUNK], np.uint8)
@example([60], np.float32)
@example([61], np.float32)
@example([241, 256, 1024], np.uint8)
@example([1025, 1087, 1088], np.uint8)
@example([1089, 2048, 2049], np.uint8)
def test_digests(sizes, carrier):
    generator = np.random.default_rng(sum(sizes))
    width = np.dtype(carrier).itemsize
    raws = [generator.integers(0, 256, width * n, np.uint8).view(carrier) for n in sizes]
    assert core.digests(raws) == reference.digests(raws)


@settings(max_examples=200)
@given(
    st.integers(0, 10_000),
    st.integers(0, 2**40).map(lambda n: 128 * n),
    st.floats(0, 1, exclude_max=True),
    st.integers(0, 2**64),
)
@example(8192, 0, 0.9961, 0)
@example(8192, 0, 0.999999, 0)
@example(8192, 0, 0.003, 0)
@example(4097, 128, 0.5, 1)
def test_masks(size, start, rate, seed):
    high, low = divmod(keep_threshold(rate), 1 << 32)
    if high == 256:
        return
    key0, key1 = map(np.uint32, mask_key(seed, "w"))
    room = np.full(-(-size // LANES_MULTIPLE) * LANES_MULTIPLE, 7, np.uint8)
    assert_same("draw", room, size, start, key0, key1, high, np.uint32(low))


@given(SIZES.flatmap(lambda n: st.tuples(near_zero(n), lanes(n))))
def test_masking_values(case):
    assert_same("keep_lanes", *case)


@st.composite
def magnitudes(draw):
    """Elements of a model and its base, without NaN, whose payload machines choose; and lanes."""
    size = draw(SIZES | st.sampled_from([8192, 8193, 20000]))
    generator = np.random.default_rng(draw(ANY_BITS))

    def elements(carrier, size):
        top = 0x38 if carrier.itemsize == 1 else (0x38 << 8 * (carrier.itemsize - 1))
        count, width = draw(st.sampled_from([2, 9, 4000])), f"u{carrier.itemsize}"
        few = generator.integers(0, top, count, width)
        return generator.choice(few, size).view(carrier)

    raw_type, base_type = draw(st.sampled_from(TYPE_PAIRS))
    more = draw(st.integers(0, 3))  # there may be more of a base, and more lanes
    lanes = generator.choice(np.array([0, 255], np.uint8), size + more)
    return elements(raw_type, size), elements(base_type, size + more), lanes


@given(magnitudes(), st.integers(0, 2**31 - 1), st.integers(0, 2**31 - 1), st.integers(0, 300))
def test_collecting_keys(case, one, other, room):
    low, high = sorted((one, other))
    figures, keys = np.array([3, room // 2]), np.zeros(room, np.uint64)
    assert_same("collect_keys", *case, low, high, 77, keys, figures)


@given(
    magnitudes(),
    st.sampled_from([0, 1]) | st.integers(0, 2**31 - 1),
    st.integers(0, 15),
    st.sampled_from([1, 2, 1 << 12, 1 << 16]),
)
def test_counting_bins(case, low, shift, bins):
    tallies = np.zeros(bins, np.int64), np.zeros(bins, np.uint32), np.ones(2, np.int64)
    assert_same("count_bins", *case, low, shift, *tallies)


@example((np.zeros(1), np.zeros(1), np.full(1, 255, np.uint8)), 0, 0, 6, 6)
@given(magnitudes(), *[st.integers(0, 2**31 - 1)] * 2, SIZES, SIZES)
def test_keeping_a_band(case, least, most, end, begin):
    raw, base, lane = case
    base = base[: raw.size]
    floats = np.empty(raw.size, np.float32)
    reference.decode(base, floats)
    found = reference.magnitude_bits(floats)
    least = int(found[0]) if found.size and end % 2 else least
    assert_same("keep_band", raw, floats, lane, 5, least, end, most, begin)


@given(SIZES.flatmap(lambda n: st.tuples(near_zero(n), any_floats(n))), *[WEIGHTS] * 3)
def test_adding_shares(case, weight, cut, top):
    scores, values = np.abs(case[0]), without_nan_payload(case[1])

    def run(backend):
        shares = np.ones((2, scores.size), np.float32)
        backend.add_shares(scores, values, weight, cut, top, *shares)
        return shares

    assert_alike(run)


@settings(max_examples=200)
@given(
    SIZES | st.sampled_from([1024, 1025, 3000]),
    st.sampled_from([1e-40, 1e-20, 1e-3, 1.0, 1e20]),
    st.sampled_from([1.0, -1.0, 1e-30, 3.0]),
    st.sampled_from([1, 3, 64, 65, 1000]),
    st.floats(0, 1),
    ANY_BITS,
)
def test_balancing_scores(size, scale, factor, models, rank, seed):
    generator = np.random.default_rng(seed)
    values, total = np.float32(generator.standard_normal((2, size)) * scale)
    peak = abs(factor) * float(np.abs(values).max(initial=0)) or 1.0
    special = np.float32([np.nan, np.inf, -np.inf, 0, -0.0, 1e-45, 3e38])
    for array in (values, total):
        array[generator.random(size) < 0.1] = generator.choice(special)
    scores = np.ones(size, np.float32)
    numbers = values, total, factor, peak, float(models)
    reference.balance_scores(*numbers, 0.0, scores)
    floor = float(np.sort(scores)[int(rank * (size - 1))]) if size else 0.0
    for least in (0.0, floor, 1e-35):
        assert_same("balance_scores", *numbers, least, np.ones(size, np.float32))


@given(
    SIZES.flatmap(lambda n: st.tuples(near_zero(n), near_zero(n))),
    st.integers(0, 500),
    st.sampled_from([1, 3, 7, 16, 33, 300]),
    st.booleans(),
)
def test_adding_products(case, first, columns, by_column):
    sums = np.linspace(-1, 1, columns if by_column else 702)
    assert_same("add_products", *case, first, columns, by_column, sums)


@given(
    st.tuples(st.integers(1, 12), st.sampled_from([1, 2, 5, 16]), st.sampled_from([1, 5, 16, 33])),
    st.floats(0, 1),
    st.floats(0, 1),
    ANY_BITS,
)
def test_products_of_low_rank(shape, begin, end, seed):
    rows, rank, columns = shape
    generator = np.random.default_rng(seed)
    left = generator.standard_normal((rows, rank), np.float32)
    right = generator.standard_normal((rank, columns), np.float32)
    first, last = sorted(int(part * rows * columns) for part in (begin, end))
    out = np.ones(last - first, np.float32)
    assert_same("low_rank", left, right, first, np.float32(0.7), out)


@given(SIZES.flatmap(lambda n: st.tuples(near_zero(n), near_zero(n), WEIGHTS)))
def test_adding(case):
    total, values, weight = case
    assert_same("add_scaled", total, values, weight)


@given(
    SIZES.flatmap(lambda n: st.lists(near_zero(n) | any_floats(n), min_size=1, max_size=4)), WEIGHTS
)
def test_voting(models, weight):
    def run(backend):
        total, most, least, out = np.zeros((4, models[0].size), np.float32)
        sums = np.zeros(4 * models[0].size, np.float32)
        for values in models:
            backend.vote(sums, values, weight, np.float32(abs(weight)))
            backend.add_extremes(values, weight, total, most, least)
        backend.elect(sums, models[-1], out)
        backend.elect_extremes(total, most, least)
        return out, total, most, least

    assert_alike(run)


@given(st.integers(0, 300).flatmap(lambda n: st.tuples(near_zero(n), near_zero(n))))
def test_sums_have_one_order(case):
    assert_same("sum_products", *case)


@pytest.mark.parametrize("scale", [1.0, -1.0, 0.0])
@pytest.mark.parametrize("backend", [reference, core])
@pytest.mark.parametrize("more", [[], [0x7F81]], ids=["numbers", "with a signalling NaN"])
def test_where_nothing_changed_the_base_keeps_its_bits(backend, scale, more):
    # -0.0, a subnormal, an infinity, a NaN: an addition would change some of these.
    raw = np.array([0x8000, 0x0001, 0x3F80, 0xFF80, *more], np.uint16)
    out = np.zeros_like(raw)
    backend.add_to_base(raw, np.zeros(raw.size, np.float32), np.float32(scale), out)
    assert (out == raw).all()


@given(
    SIZES.flatmap(
        lambda n: st.tuples(near_zero(n) | any_floats(n), near_zero(n) | any_floats(n), WEIGHTS)
    ),
    st.sampled_from([0.2, 0.4, 1.0]).map(np.float32),
)
def test_counting_who_needs_an_element(case, selectivity):
    values, total, factor = case

    def run(backend):
        kept, counts = total.copy(), np.zeros(total.size, np.int32)
        for needing in (values, -values, total):
            backend.count_needing(needing, factor, total, selectivity, counts)
        backend.keep_needed(kept, counts, 2)
        return counts, kept.tobytes()

    assert_alike(run)


@given(
    st.sampled_from([1, 3, 4, 8, 16, 64, 100]).flatmap(
        lambda columns: st.tuples(
            st.sampled_from([0, 1, 5, 40]).flatmap(lambda rows: near_zero((rows, columns))),
            st.integers(0, columns),
            st.integers(0, columns),
        )
    ),
    st.sampled_from([np.uint32, np.uint64]),
)
def test_selecting_ranks(case, kind):
    values, least, end = case
    keys = (values.view(np.uint32) & np.uint32(0x7FFFFFFF)).astype(kind)
    by_left = np.arange(keys.shape[1] + 1)
    tables = np.maximum(least, by_left // 2), np.minimum(end, by_left), by_left.astype(np.float32)
    for each in (tables, [np.full_like(table, table[-1]) for table in tables]):
        assert_same("select_ranks", keys, *each, np.ones(keys.shape, np.float32))


@pytest.mark.parametrize("backend", [reference, core])
def test_ranks_are_selected_by_hand(backend):
    # of equals the first is larger; in a row with a key of 0, rank 3 is taken, times 0.5
    keys = np.array([[5, 7, 7, 1], [2, 2, 2, 2], [0, 4, 9, 4]], np.uint32)
    leasts, ends, factors = np.array([0, 0, 0, 3, 2]), np.full(5, 4), np.float32([0, 0, 0, 0.5, 1])
    found = np.ones((3, 4), np.float32)
    backend.select_ranks(keys, leasts, ends, factors, found)
    assert found.tolist() == [[0, 1, 1, 0], [1, 1, 0, 0], [0, 0, 0.5, 0]]


@given(SIZES.flatmap(lambda n: st.tuples(near_zero(n) | any_floats(n), lanes(n))))
def test_keys_that_order_like_magnitudes(case):
    values, lane = case
    assert_same("order_keys", values, lane != 0, np.zeros(values.size, np.uint32))


@given(st.integers(0, 600), st.integers(0, 2**36), ANY_BITS, st.sampled_from([1, 2, 7, 16, 17, 99]))
def test_numbers_that_order_neighbours(size, group, key, among):
    key0, key1 = np.uint32(key), np.uint32(7)
    found, numbers = np.zeros((2, size), np.uint64)
    assert_same("draw_order", found, 128 * group, key0, key1, among)
    core.draw_order(found, 128 * group, key0, key1, among)
    reference.draw_uniform(numbers, 128 * group, key0, key1)
    for distance in range(1, min(among, size)):
        order = numbers[distance:] < numbers[:-distance]
        assert (order == (found[distance:] > found[:-distance])).all()


@given(SIZES.flatmap(lambda n: st.tuples(near_zero(n) | any_floats(n), near_zero(n))))
def test_multiplying_what_is_kept(case):
    values, factors = case

    def run(backend):
        kept = values.copy()
        backend.multiply_kept(kept, factors)
        return kept

    assert_alike(run)


@given(
    st.sampled_from([1, 5, 64, 65, 101, 300]).flatmap(
        lambda columns: st.integers(0, 3).flatmap(
            lambda rows: arrays.arrays(
                np.uint32, (rows, columns), elements=st.integers(0, 3) | ANY_BITS
            )
        )
    )
)
def test_ranks(keys):
    assert_same("rank_left", keys, np.zeros(keys.shape, np.uint32))
    found = np.empty(keys.shape, np.uint32)
    reference.rank_left(keys, found)
    assert found.tolist() == [ranks_of_row(row, row != 0).tolist() for row in keys]


def ranks_of_row(magnitudes, left):
    """The definition: the ranks of those that are left, of equals the first the largest, spread."""
    places, last = np.flatnonzero(left), magnitudes.size - 1
    backwards = places[::-1]
    ascending = backwards[np.argsort(magnitudes[backwards], kind="stable")]
    ranks = np.zeros(magnitudes.size, np.uint32)
    ranks[ascending] = np.rint(np.arange(places.size) * (last / max(places.size - 1, 1)))
    return ranks


def rows_of(kind, generator, size):
    """Return numbers that fill the buckets of `drop_by_rank` in different ways."""
    with np.errstate(over="ignore"):
        return {
            "normal": lambda: generator.standard_normal(size),
            "of few sizes": lambda: generator.integers(-3, 4, size),
            "zero": lambda: np.zeros(size),
            "nearly equal": lambda: 1 + generator.integers(0, 9, size) * 1e-4,
            "with an outlier": lambda: np.where(np.arange(size) % 97, generator.random(size), 1e9),
            "of any size": lambda: np.exp(9 * generator.standard_normal(size)),
            "of any bits": lambda: generator.integers(0, 2**32, size, np.uint32).view(np.float32),
        }[kind]().astype(np.float32)


KINDS_OF_ROWS = (
    *("normal", "of few sizes", "zero", "nearly equal"),
    *("with an outlier", "of any size", "of any bits"),
)


@settings(deadline=None)
@given(
    st.sampled_from(KINDS_OF_ROWS),
    st.sampled_from([1, 2, 3, 5, 63, 64, 100, 129, 1000, 3001, 30_000]),
    st.integers(0, 99),
    st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    st.sampled_from([(0.5, 0.4), (0.1, 0.14), (0.5, 1.0), (0.999, 0.0), (1.0, 0.0)]),
    st.booleans(),
    ANY_BITS,
)
@example("with an outlier", 3001, 0, 0.0, (0.1, 0.14), False, 0)
@example("nearly equal", 30_000, 7, 0.5, (0.1, 0.14), True, 0)
def test_dropping_by_rank(kind, columns, group, dropped, rates, is_even, seed):
    generator = np.random.default_rng(seed)
    size = max(int(generator.integers(0, 1000)), int(2.5 * columns))
    values, left = rows_of(kind, generator, size), generator.random(size) >= dropped
    head = min(-128 * group % columns, size)
    edges = generator.integers(0, columns, head + (size - head) % columns).astype(np.uint32)
    keep = rates[0] + rates[1] * (np.arange(columns) / max(columns - 1, 1) - 0.5)
    thresholds = np.rint(keep * 2.0**40).astype(np.uint64)
    factors = (rates[0] / np.maximum(keep, 2.0**-40)).astype(np.float32)
    if is_even:
        factors[:] = 1
    key0, key1 = np.uint32(seed), np.uint32(group)
    magnitudes, end = reference.magnitude_bits(values), size - (size - head) % columns
    rows = (slice(first, first + columns) for first in range(head, end, columns))
    whole = [ranks_of_row(magnitudes[row], left[row]) for row in rows]
    ranks = np.concatenate([edges[:head], *whole, edges[head:]])
    numbers = np.empty(size, np.uint64)
    reference.draw_uniform(numbers, 128 * group, key0, key1)
    expected = left & (numbers < thresholds[ranks])
    with np.errstate(all="ignore"):
        scaled = np.where(expected, values * factors[ranks], np.float32(0))
    for backend in (reference, core):
        found, kept = values.copy(), np.empty(size, np.bool_)
        backend.drop_by_rank(
            found, left, columns, edges, thresholds, factors, 128 * group, key0, key1, kept
        )
        assert (kept == expected).all()
        np.testing.assert_array_equal(found, scaled)


@pytest.mark.parametrize("models", [1, 2, 8, 64])
def test_scores_are_those_of_the_formula(models):
    values = np.float32(np.geomspace(1e-6, 8, 1001))
    total = values[::-1].copy()
    out = np.empty_like(values)
    reference.balance_scores(values, total, 1.0, 8.0, float(models), 0.0, out)
    wide = values.astype(np.float64)
    expected = np.exp(models * ((wide / 8) ** 2 - 1)) * np.tanh(wide * total)
    assert out == pytest.approx(expected, rel=2e-7)
    above = np.empty_like(values)  # those below a floor may be left out
    reference.balance_scores(values, total, 1.0, 8.0, float(models), 0.1, above)
    assert (above == out)[out >= 0.1].all()
    assert ((above == out) | (above == 0)).all()
