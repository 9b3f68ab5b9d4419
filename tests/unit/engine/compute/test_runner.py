# SPDX-License-Identifier: Apache-2.0
"""The runner over a real graph: the same bits alone and in company, in place, and no growth.

Most tests run a tiny model of random weights; the slow ones, the default model.
"""

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from server.engine.compute.runner import BINDINGS_MAX, Runner
from server.engine.loop import EngineLoop
from server.engine.scheduler import Scheduler, SchedulerLimits
from server.engine.sequence import ForwardRow, Submission, TokenParams
from server.models.build import build_package
from server.models.readers.checkpoint import ArchConfig, TextFiles

CONFIG = ArchConfig(
    family="llama",
    num_layers=3,
    hidden_size=96,
    intermediate_size=160,
    num_heads=6,
    num_kv_heads=2,
    head_dim=16,
    norm_eps=1e-5,
    rope_theta=10000.0,
    context_length=256,
    vocab_size=320,
    tie_word_embeddings=True,
)
NUM_TOKENS = 256  # the head's last 64 rows are padding
PARAMS = TokenParams(temperature=0.8, top_k=0, top_p=0.95, min_p=0.0, seed=1, max_tokens=9, end_token_ids=())


class TinyCheckpoint:
    """Random weights by a tensor's name, and a tokenizer of bytes."""

    config = CONFIG
    license = None

    def names(self):
        return frozenset()

    def tensor(self, name):
        hidden, wide, kv = CONFIG.hidden_size, CONFIG.intermediate_size, CONFIG.num_kv_heads * CONFIG.head_dim
        shapes = {
            "embed": (CONFIG.vocab_size, hidden),
            "q_proj": (hidden, hidden),
            "k_proj": (kv, hidden),
            "v_proj": (kv, hidden),
            "o_proj": (hidden, hidden),
            "gate_proj": (wide, hidden),
            "up_proj": (wide, hidden),
            "down_proj": (hidden, wide),
        }
        shape = next((shape for part, shape in shapes.items() if part in name), (hidden,))
        rng = np.random.default_rng(list(name.encode()))
        return (rng.standard_normal(shape) / shape[-1] ** 0.5 * 2 + (len(shape) == 1)).astype(np.float32)

    def packed(self, name):
        return None

    def text(self):
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        return TextFiles(
            tokenizer_json=tokenizer.to_str(),
            chat_template=None,
            bos_token_id=None,
            eos_token_id=None,
            end_token_ids=(0,),
            num_tokens=NUM_TOKENS,
        )


@pytest.fixture(scope="module", params=["fp32", "w8a8"])
def package(request, tmp_path_factory):
    return build_package(
        TinyCheckpoint(),
        model_id="tiny",
        quantization=request.param,
        home=tmp_path_factory.mktemp("home"),
        source={},
        is_checked=False,
    )


@pytest.fixture
def runner(package):
    return Runner(package, num_slots=8, max_len=128, num_threads=1)


def row(slot, tokens, start=0):
    return ForwardRow(slot=slot, start=start, token_ids=list(tokens))


def prompt(seed, size):
    return [random.Random(seed).randrange(NUM_TOKENS) for _ in range(size)]


def odds(runner, rows):
    """Full log-probabilities of a forward's rows, copied out of the lent arrays."""
    top = runner.forward(rows)
    return [top.full[each.slot - rows[0].slot].copy() for each in rows]


def test_odds_are_whole_and_sorted(runner):
    """Log-probabilities sum to 1; the best ids are those of the whole row, the best first."""
    top = runner.forward([row(2, prompt(1, 5))])
    assert np.exp(top.full[0]).sum() == pytest.approx(1, abs=1e-4)
    assert top.ids[0].tolist() == np.argsort(-top.full[0], kind="stable")[: top.ids.shape[1]].tolist()
    np.testing.assert_array_equal(top.logprobs[0], top.full[0][top.ids[0]])


@pytest.mark.parametrize("cuts", [[16] * 3, [7, 41], [46, 2], [2] * 24])
def test_chunks_leave_the_same_bits(runner, cuts):
    """However a prompt is cut, in chunks of two tokens or more, its keys, values and odds are the same."""
    tokens, start = prompt(2, 48), 0
    (whole,) = odds(runner, [row(0, tokens)])
    for size in cuts:
        (cut,) = odds(runner, [row(5, tokens[start : start + size], start)])
        start += size
    np.testing.assert_array_equal(cut, whole)
    for layer in range(CONFIG.num_layers):
        for part in ("key", "value"):
            kept = runner.slots.array(layer, part)[:, :, :48]
            np.testing.assert_array_equal(kept[5], kept[0])


def test_neighbours_leave_no_trace(runner):
    """A row's odds are the same bits alone, among others of other lengths, and beside idle slots."""
    alone = {}
    for slot in (1, 2, 4, 7):
        first = odds(runner, [row(0, prompt(slot, 5 + slot))])
        alone[slot] = first + odds(runner, [row(0, [slot], 5 + slot)])
    together = odds(runner, [row(slot, prompt(slot, 5 + slot)) for slot in alone])
    decoded = odds(runner, [row(slot, [slot], 5 + slot) for slot in alone])
    for slot, first, second in zip(alone, together, decoded, strict=True):
        np.testing.assert_array_equal(first, alone[slot][0])
        np.testing.assert_array_equal(second, alone[slot][1])


def test_an_idle_slot_is_not_touched(runner):
    """A forward over a span leaves the keys and values of slots without a row as they are."""
    for slot in (0, 1, 2):
        runner.forward([row(slot, prompt(slot, 6))])
    before = runner.slots.array(1, "key")[1].copy()
    runner.forward([row(0, [1], 6), row(2, [2], 6)])
    np.testing.assert_array_equal(runner.slots.array(1, "key")[1], before)


def test_a_moved_row_goes_on_with_the_same_bits(runner):
    """After its keys and values were copied, a row decodes in its new slot as it would have in the old."""
    runner.forward([row(6, prompt(3, 20))])
    runner.copy_rows(6, 1, 20)
    np.testing.assert_array_equal(odds(runner, [row(1, [9], 20)]), odds(runner, [row(6, [9], 20)]))


def test_a_failed_run_harms_nothing(runner):
    """A forward that the runtime refuses raises; the slot's tokens before it are as they were."""
    runner.forward([row(0, prompt(4, 10))])
    (expected,) = odds(runner, [row(0, [7], 10)])
    with pytest.raises(Exception, match="indices element out of data bounds"):
        runner.forward([row(0, [10**9], 10)])
    np.testing.assert_array_equal(odds(runner, [row(0, [7], 10)])[0], expected)


def test_a_row_beyond_its_slot_is_our_bug(runner):
    """No row can reach into the next slot."""
    with pytest.raises(AssertionError):
        runner.forward([row(0, prompt(5, 10), start=120)])


def test_bindings_are_bounded(runner):
    """However many spans of rows were run, only the latest stay bound."""
    for first in range(8):
        for last in range(first, 8):
            runner.forward([row(slot, [slot]) for slot in range(first, last + 1)])
    assert len(runner._bindings) == BINDINGS_MAX


def test_a_context_beyond_the_models_is_refused(package):
    """Slots longer than the model's positions cannot be."""
    with pytest.raises(ValueError, match="context of 256"):
        Runner(package, num_slots=1, max_len=257, num_threads=1)


def test_memory_is_stated_and_kept(runner):
    """After many shapes and failures the process is no larger than after the first ones."""
    runner.warm()
    assert runner.num_bytes >= runner.slots.num_bytes == 3 * 2 * 8 * 2 * 128 * 16 * 4
    rng, sizes = random.Random(0), []
    for _ in range(3):
        for _ in range(150):
            runner.forward([row(rng.randrange(8), prompt(6, rng.randint(1, 120)))])
            runner.forward([row(slot, [slot], 3) for slot in range(rng.randint(1, 8))])
        sizes.append(int(Path("/proc/self/statm").read_text().split()[1]))
    assert sizes[2] <= sizes[0] * 1.05


def test_padding_of_the_head_is_never_generated(package):
    """Ids beyond the tokenizer's last are in the odds, and never in an answer."""
    loop, _ = loop_of(package, num_slots=4)
    for name in range(4):
        params = replace(PARAMS, temperature=2.0, top_p=1.0, seed=name, max_tokens=40)
        loop.submit(Submission(request_id=str(name), token_ids=(1, 2, 3), params=params))
    tokens = [token for each in finish(loop).values() for token in each]
    assert (len(tokens), max(tokens) < NUM_TOKENS) == (160, True)


# ---- the whole engine ------------------------------------------------------------------------------------


def loop_of(package, *, num_slots=16, chunk=16, max_len=128, num_threads=1):
    runner = Runner(package, num_slots=num_slots, max_len=max_len, num_threads=num_threads)
    limits = SchedulerLimits(
        max_num_seqs=num_slots,
        max_model_len=max_len,
        prefill_chunk_tokens=chunk,
        max_num_batched_tokens=num_slots + chunk,
        queue_tokens_max=10_000,
    )
    return EngineLoop(runner, Scheduler(limits)), runner


def requests_of(num_tokens, size_max, count):
    """Half greedy, half sampled, of every length."""
    rng = random.Random(7)
    for name in range(count):
        size = rng.choice([1, 2, 3, size_max // 3, size_max // 2, size_max])
        params = replace(PARAMS, temperature=name % 2 * 0.8, seed=name, max_tokens=6 + name)
        tokens = tuple(rng.randrange(num_tokens) for _ in range(size))
        yield Submission(request_id=str(name), token_ids=tokens, params=params)


def finish(loop, outputs=None):
    outputs = {} if outputs is None else outputs
    while loop.has_work:
        collect(loop, outputs)
    return outputs


def collect(loop, outputs):
    for each in loop.step():
        assert each.error_code is None
        outputs.setdefault(each.request_id, []).extend(each.token_ids)


def check_company(package, *, size_max, count=16, **sizes):
    """Rows that join and leave at random steps, in small or large chunks, get their solo tokens."""
    loop, _ = loop_of(package, chunk=128, **sizes)
    requests = list(requests_of(loop._runner.num_tokens, size_max, count))
    solo = {}
    for request in requests:
        loop.submit(request)
        solo |= finish(loop)
    for chunk in (16, 128):
        loop, _ = loop_of(package, chunk=chunk, **sizes)
        rng, outputs = random.Random(chunk), {}
        for request in requests:
            loop.submit(request)
            for _ in range(rng.choice([0, 0, 1, 3])):
                collect(loop, outputs)
        assert finish(loop, outputs) == solo
    for request in requests[:6]:  # as after a crash
        known = solo[request.request_id]
        loop.submit(replace(request, output_ids=tuple(known[:4])))
        assert finish(loop)[request.request_id] == known[4:]


def test_company_changes_no_token(package):
    """Sixteen rows of a tiny model get the same tokens alone, in company, in any chunk and after a crash."""
    check_company(package, size_max=100)


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["fp32", "w8a8"])
def test_company_changes_no_token_of_the_default_model(smollm2, quantization):
    """The same promise, kept by the default model on two threads."""
    check_company(smollm2(quantization), size_max=150, count=8, max_len=256, num_threads=2)
