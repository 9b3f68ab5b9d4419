# SPDX-License-Identifier: Apache-2.0
"""The sampler: every row alone, every edge of every parameter, and a slow twin that says what is right."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.engine.compute.sampler import (
    Sampler,
    SampleRow,
    TopLogprobs,
    uniform,
)
from server.engine.sequence import RowFault, TokenParams

TOPK = 16
PLAIN = TokenParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=7, max_tokens=8, end_token_ids=())


def top_of(logits, topk=TOPK):
    """What the graph would say of these rows of logits."""
    with np.errstate(all="ignore"):
        logits = np.asarray(logits, np.float64)
        shifted = logits - logits.max(axis=1, keepdims=True)
        full = (shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))).astype(np.float32)
    ids = np.argsort(-full, axis=1, kind="stable")[:, :topk]
    return TopLogprobs(ids=ids, logprobs=np.take_along_axis(full, ids, axis=1), full=full)


def check(logits, params, *, num_tokens=None, index=0, topk=TOPK):
    """Sample one row of logits."""
    sampler = Sampler(num_tokens or len(logits))
    (token,) = sampler.sample(top_of([logits], topk), [SampleRow(at=0, params=params, index=index)])
    return token


def twin(logits, params, index=0, num_tokens=None):
    """The slow and obvious way: rank every id, cut by each rule in turn, walk until `u` is passed."""
    full = top_of([logits]).full[0].astype(np.float64)
    ranked = sorted(range(len(full)), key=lambda i: (-full[i], i))
    head = ranked[:TOPK]
    ranked = [i for i in ranked if i < (num_tokens or len(full))]
    if params.temperature == 0:
        return ranked[0]
    weight = {i: np.exp((full[i] - full[ranked[0]]) / params.temperature) for i in ranked}
    kept = ranked[: params.top_k or None]
    goal = params.top_p * sum(weight[i] for i in kept)
    sums = np.cumsum([0.0] + [weight[i] for i in kept])
    kept = [i for at, i in enumerate(kept) if params.top_p >= 1 or at == 0 or sums[at] < goal]
    kept = [i for i in kept if weight[i] >= params.min_p]
    kept = [i for i in kept if i in head] + sorted(i for i in kept if i not in head)
    u = uniform(params.seed, index) * sum(weight[i] for i in kept)
    passed = np.cumsum([weight[i] for i in kept]) > u
    return kept[int(passed.argmax())]


def noise(seed, rows=1, width=300, scale=3.0):
    return np.random.default_rng(seed).standard_normal((rows, width)) * scale


SOME_PARAMS = st.builds(
    TokenParams,
    temperature=st.sampled_from([0.0, 0.05, 0.5, 0.7, 1.0, 1.3, 2.0, 50.0]),
    top_k=st.sampled_from([0, 1, 5, 16, 17, 40, 299, 10**7]),
    top_p=st.sampled_from([0.0, 1e-9, 0.3, 0.9, 0.99, 1.0]),
    min_p=st.sampled_from([0.0, 1e-4, 0.05, 0.5, 1.0]),
    seed=st.integers(0, 2**64 - 1),
    max_tokens=st.just(8),
    end_token_ids=st.just(()),
)


@given(params=SOME_PARAMS, data=st.integers(0, 2**32), scale=st.sampled_from([0.01, 1.0, 3.0, 12.0]))
def test_fast_choice_equals_the_slow_twin(params, data, scale):
    """Reading only the best ids, and bounding the rest, never changes the token."""
    logits = noise(data, scale=scale)[0]
    assert check(logits, params, index=3) == twin(logits, params, 3)


@given(params=st.lists(SOME_PARAMS, min_size=8, max_size=8), data=st.integers(0, 2**32))
def test_neighbours_never_enter(params, data):
    """A row's token is the same alone and among seven others, at any place."""
    top, sampler = top_of(noise(data, rows=8)), Sampler(300)
    rows = [SampleRow(at=7 - i, params=each, index=i) for i, each in enumerate(params)]
    assert sampler.sample(top, rows) == [sampler.sample(top, [row])[0] for row in rows]


@given(params=SOME_PARAMS, data=st.integers(0, 2**32), loud=st.sampled_from([-30.0, 0.0, 9.0, 60.0]))
def test_padding_is_never_chosen(params, data, loud):
    """Ids beyond the tokenizer's last are as if they were not there, even when they would win."""
    logits = noise(data)[0]
    logits[236:] += loud
    token = check(logits, params, num_tokens=236)
    assert token < 236
    assert token == twin(logits, params, num_tokens=236)


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 1e-38, 5e-324])
def test_least_temperatures_are_argmax(temperature):
    """Towards 0 the best token wins, without a division that overflows."""
    logits = [-12.0, 40.0, 39.5, -1e4]
    assert check(logits, replace(PLAIN, temperature=temperature)) == 1


@pytest.mark.parametrize("temperature", [2.0, 2.1, 1e9])
def test_high_temperatures_still_choose(temperature):
    """Towards infinity every token is alike, and one is chosen."""
    chosen = {check([40, 39.5, -12, -1e4], replace(PLAIN, temperature=temperature, seed=s)) for s in range(64)}
    assert chosen <= {0, 1, 2, 3}
    assert len(chosen) > 1


@pytest.mark.parametrize("bad", [[np.nan, 1, 2, 3], [-np.inf] * 4, [np.inf, np.inf, 0, 1], [0, 1, np.inf, 2]])
@pytest.mark.parametrize("params", [PLAIN, replace(PLAIN, temperature=0.0), replace(PLAIN, top_k=2)])
def test_a_broken_row_ends_alone(bad, params):
    """NaN, all -inf or +inf fault their own row; three healthy ones get what they get alone."""
    good = [[40, 39.5, -12, -1e4], [0, 0, 0, 0.5], [1, 2, 3, 4]]
    sampler, rows = Sampler(4), [SampleRow(at=i, params=params, index=i) for i in range(4)]
    broken, *others = sampler.sample(top_of([bad, *good]), rows)
    assert isinstance(broken, RowFault)
    assert others == [check(each, params, index=i + 1) for i, each in enumerate(good)]
    assert sampler.num_fault_rows == 1


def test_all_of_the_vocabulary_may_be_impossible_but_one():
    """Tokens at -inf weigh nothing, and are not a fault."""
    assert {check([-np.inf, 3.0, -np.inf, -np.inf], replace(PLAIN, seed=s)) for s in range(20)} == {1}


def test_ties_go_to_the_lower_id():
    """Argmax among equals is the lowest id, as in the graph's own order."""
    assert check([1.0, 5.0, 5.0, 5.0], replace(PLAIN, temperature=0.0)) == 1


def test_frequencies_follow_the_probabilities():
    """Over many indices, tokens come as often as they should, those beyond the sorted ids as well."""
    logits = np.log([0.4, 0.3, 0.15, 0.1, 0.05])
    sampler, top, n = Sampler(5), top_of([logits], topk=2), 4000
    tokens = [sampler.sample(top, [SampleRow(at=0, params=PLAIN, index=i)])[0] for i in range(n)]
    assert np.bincount(tokens, minlength=5) / n == pytest.approx([0.4, 0.3, 0.15, 0.1, 0.05], abs=0.03)


def test_nucleus_and_top_k_keep_the_likely():
    """top_p keeps the fewest ids that hold its mass; top_k the k best; min_p those near the best."""
    logits = np.log([0.5, 0.3, 0.15, 0.05])

    def seen(**changes):
        return {check(logits, replace(PLAIN, seed=s, **changes), topk=2) for s in range(200)}

    assert seen() == {0, 1, 2, 3}
    assert seen(top_p=0.79) == {0, 1}
    assert seen(top_p=0.81) == {0, 1, 2}
    assert seen(top_k=2) == {0, 1}
    assert seen(top_k=3, top_p=0.8) == {0, 1}  # 0.8 of the three kept
    assert seen(min_p=0.29) == {0, 1, 2}
    assert seen(top_p=0.0) == {0}


def test_randomness_is_a_pinned_function_of_seed_and_index():
    """A restarted engine, or a later version, draws the same numbers."""
    assert [uniform(7, 0), uniform(7, 1), uniform(8, 0)] == pytest.approx(PINNED, abs=0)
    assert uniform(7 + 2**64, 0) == uniform(7, 0)
    drawn = np.array([uniform(s, i) for s in range(40) for i in range(40)])
    assert (drawn.min(), drawn.max(), drawn.mean()) == pytest.approx((0, 1, 0.5), abs=0.02)


PINNED = [0.7215081806049702, 0.15589407130731636, 0.266645678882962]


def test_a_tail_that_is_cut_off_is_never_read():
    """When top_k or min_p end within the sorted ids, these settle the choice."""
    sampler, top = Sampler(300), top_of(noise(1))
    for changes in ({"top_k": 9}, {"min_p": 0.5}):
        sampler.sample(top, [SampleRow(at=0, params=replace(PLAIN, **changes), index=i) for i in range(50)])
    assert sampler.num_full_rows == 0


def test_the_tail_is_seldom_weighed():
    """With an answer that is nearly sure, the full row is hardly ever read."""
    sampler, top = Sampler(300), top_of(noise(1, scale=4.0))
    for i in range(1000):
        sampler.sample(top, [SampleRow(at=0, params=replace(PLAIN, temperature=0.7), index=i)])
    assert sampler.num_full_rows < 50
