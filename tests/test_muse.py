"""What users hold: loading, the arguments of prefill and logits, and the text of generate."""

import dataclasses
import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import muse_jax
from muse_jax import Model, Muse
from muse_jax.model import MuseSpark

PROMPT = "2 + 2 ="
STOP = 257  # </s>, as config.json says


def one_line(error) -> str:
    message = str(error.value)
    assert message and "\n" not in message
    return message


class TestLoad:
    def test_what_load_returns(self, muse, small_config, small_params):
        assert muse.config == small_config
        assert muse.stop_token_ids == (STOP,)
        assert (muse.mesh, muse.backend, muse.max_length) == (None, "xla", 512)
        assert (muse.model.num_rows, muse.model.valid_vocab) == (1, 259)
        assert (muse.draft_config, muse.model.draft_params, str(muse.model.speculation)) == (None, None, "off")
        assert muse.model.config == small_config
        for loaded, saved in zip(jax.tree.leaves(muse.model.params), jax.tree.leaves(small_params), strict=True):
            assert isinstance(loaded, jax.Array)
            np.testing.assert_array_equal(loaded, saved)

    def test_dtypes(self, checkpoint):
        """None means float32 on a CPU, whatever the checkpoint has; routers and gates are float32 always."""
        bf16 = muse_jax.load(checkpoint, dtype="bfloat16").model.params
        assert bf16["embedding"].dtype == jnp.bfloat16
        assert bf16["layers"][0]["mlp"]["router"].dtype == jnp.float32
        assert bf16["layers"][0]["post_ffn_gate"].dtype == jnp.float32
        config = json.loads((checkpoint / "config.json").read_text())
        assert config["dtype"] == "float32"

    def test_float32_on_a_cpu(self, checkpoint, tmp_path):
        directory = tmp_path / "bf16"
        shutil.copytree(checkpoint, directory)
        config = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
        params = muse_jax.load(directory).model.params
        assert {x.dtype for x in jax.tree.leaves(params)} == {np.dtype(np.float32)}

    def test_without_tokenizer(self, checkpoint, tmp_path):
        directory = tmp_path / "bare"
        shutil.copytree(checkpoint, directory, ignore=shutil.ignore_patterns("tokenizer*"))
        bare = muse_jax.load(directory)
        assert bare.tokenizer is None and bare.model.valid_vocab == bare.config.vocab_size
        assert bare.stop_token_ids == (STOP,)  # of config.json
        with pytest.raises(ValueError, match=r"^this checkpoint has no tokenizer\.json: use prefill and decode"):
            bare.generate(PROMPT)

    def test_stop_tokens_of_generation_config(self, checkpoint, tmp_path):
        directory = tmp_path / "stops"
        shutil.copytree(checkpoint, directory)
        (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [256, 258]}))
        assert muse_jax.load(directory).stop_token_ids == (256, 258)

    def test_progress(self, checkpoint):
        seen = []
        muse_jax.load(checkpoint, progress=lambda done, total: seen.append((done, total)))
        assert seen[0][0] == 0 and seen[-1][0] == seen[-1][1] > 0
        assert seen == sorted(seen)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"backend": "cuda"}, "backend = 'cuda': this version has 'auto', 'xla', 'pallas', 'megakernel'"),
            ({"numerics": "fp8"}, "numerics = 'fp8': allowed are 'hf', 'serving'"),
            ({"dtype": "float16"}, "dtype = 'float16': allowed are 'bfloat16', 'float32'"),
            ({"tree_size": 1}, "tree_size = 1: expected an integer from 2 to 32"),
            ({"tree_size": 33}, "tree_size = 33: expected an integer from 2 to 32"),
            ({"tree_size": True}, "tree_size = True: expected an integer from 2 to 32"),
            ({"prefill_chunk": 1.5}, "prefill_chunk = 1.5: expected an integer from 1 to 2147483647"),
            ({"speculation": "beam"}, "speculation = 'beam': allowed are 'tree', 'chain', 'sampled_chain', 'off'"),
            ({"max_length": 1}, "max_length = 1: expected an integer above 1"),
            ({"max_length": "8"}, "max_length = '8': expected an integer above 1"),
        ],
    )
    def test_bad_arguments(self, checkpoint, arguments, message):
        with pytest.raises(ValueError) as error:
            muse_jax.load(checkpoint, **arguments)
        assert one_line(error) == message

    def test_bad_meshes(self, checkpoint):
        devices = np.asarray(jax.devices())
        for mesh in (Mesh(devices[:3], ("tp",)), Mesh(devices[:2], ("x",)), Mesh(devices[:4].reshape(2, 2), ("tp", "dp"))):
            with pytest.raises(ValueError, match=r"^mesh has axes .*: expected one axis 'tp' of 1, 2, 4, 8 devices$"):
                muse_jax.load(checkpoint, mesh=mesh)

    def test_bad_directories(self, checkpoint, tmp_path):
        other = tmp_path / "other"
        other.mkdir()
        (other / "config.json").write_text('{"model_type": "llama"}')
        for path, message in ((tmp_path / "nowhere", "nowhere"), (tmp_path, "config.json"), (other, "model_type = 'llama'")):
            with pytest.raises(ValueError, match=re.escape(message)) as error:
                muse_jax.load(path)
            one_line(error)


BAD_TOKENS = [
    ([], {}, "there must be a sequence"),
    ([[]], {}, "every sequence needs at least one token"),
    ([[1], []], {}, "every sequence needs at least one token"),
    ([[264]], {}, "token 264: expected ids from 0 to 263"),
    ([[1, -1]], {}, "token -1: expected ids from 0 to 263"),
    ([[2**70]], {}, "expected a list of lists of integers"),
    ([1, 2], {}, "expected a list of lists of integers"),
    ([[1.0]], {}, "expected a list of lists of integers"),
    ([[True]], {}, "expected a list of lists of integers"),
    ([["1"]], {}, "expected a list of lists of integers"),
    ([[[1]]], {}, "expected a list of lists of integers"),
    ("text", {}, "expected a list of lists of integers"),
    ([[1]], {"lengths": [1]}, "lengths goes with a padded array"),
    (np.zeros((2, 3)), {}, "tokens has shape (2, 3) and dtype float64: expected integers [B, T]"),
    (np.zeros(3, int), {}, "tokens has shape (3,) and dtype int64: expected integers [B, T]"),
    (np.zeros((0, 3), int), {}, "there must be a sequence"),
    (np.zeros((1, 0), int), {}, "every sequence needs at least one token"),
    (np.zeros((2, 3), int), {"lengths": [3]}, "lengths = [3]: expected one integer up to 3 per row"),
    (np.zeros((2, 3), int), {"lengths": [3, 4]}, "lengths = [3, 4]: expected one integer up to 3 per row"),
    (np.zeros((2, 3), int), {"lengths": [3.0, 1.0]}, "lengths = [3.0, 1.0]: expected one integer up to 3 per row"),
    (np.zeros((2, 3), int), {"lengths": [0, 3]}, "every sequence needs at least one token"),
    (np.full((1, 3), 264), {"lengths": [1]}, "token 264: expected ids from 0 to 263"),
]


@pytest.mark.parametrize(("tokens", "arguments", "message"), BAD_TOKENS)
def test_bad_tokens(muse, tokens, arguments, message):
    for use in (muse.logits, muse.prefill):
        with pytest.raises(ValueError) as error:
            use(tokens, **arguments)
        assert message in one_line(error)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens = 0: expected an integer above 0, or one per row"),
        ({"max_new_tokens": [3, -1]}, "max_new_tokens = [3, -1]: expected an integer above 0, or one per row"),
        ({"max_new_tokens": [3]}, "max_new_tokens = [3]: expected an integer above 0, or one per row"),
        ({"max_new_tokens": 2.0}, "max_new_tokens = 2.0: expected an integer above 0, or one per row"),
        ({"max_new_tokens": True}, "max_new_tokens = True: expected an integer above 0, or one per row"),
        ({"max_new_tokens": 511}, "prompt of 2 tokens + max_new_tokens of 511 = 513: max_length is 512"),
        ({"max_new_tokens": [511, 511]}, "prompt of 2 tokens + max_new_tokens of 511 = 513: max_length is 512"),
        ({"max_new_tokens": 2**40}, "max_length is 512"),
        ({"max_new_tokens": 2**63 - 1}, "max_length is 512"),
        ({"temperature": -1.0}, "temperature = -1.0: expected"),
        ({"temperature": [1.0]}, "temperature has 1 entries: expected one value or a list of batch = 2"),
        ({"top_k": 1.5}, "top_k = 1.5: expected"),
        ({"top_p": 0.0}, "top_p = 0.0: expected"),
        ({"min_p": 2}, "min_p = 2: expected"),
        ({"seed": 2**64}, "seed = 18446744073709551616: expected"),
        ({"stop_token_ids": [1.5]}, "stop_token_ids = [1.5]: expected"),
        ({"stop_token_ids": ["</s>"]}, "stop_token_ids = ['</s>']: expected"),
        ({"stop_token_ids": [2**40]}, "stop_token_ids = [1099511627776]: expected"),
    ],
)
def test_bad_settings(muse, arguments, message):
    with pytest.raises(ValueError) as error:
        muse.prefill([[1], [2, 3]], **arguments)
    assert message in one_line(error)


def test_longest_request(muse):
    """Prompt and answer may fill max_length to the last position."""
    short = dataclasses.replace(muse, max_length=240)
    state, out = short.prefill([[1, 2, 3]], max_new_tokens=237)
    assert int(out.count[0]) == 1 and int(state.remaining[0]) == 236
    assert max(keys.shape[2] for keys, _ in state.cache.layers) >= 240
    with pytest.raises(ValueError, match=r"^prompt of 3 tokens \+ max_new_tokens of 238 = 241: max_length is 240$"):
        short.prefill([[1, 2, 3]], max_new_tokens=238)


def test_padding_of_an_array_costs_nothing(muse):
    """Columns beyond the longest prompt are not run."""
    state, _ = muse.prefill(np.zeros((1, 400), int), lengths=[3], max_new_tokens=8)
    assert max(keys.shape[2] for keys, _ in state.cache.layers) == 256


def test_logits_of_sequences_of_many_lengths(muse, rng):
    tokens = [rng.integers(0, 264, n).tolist() for n in (3, 11, 16)]
    together = muse.logits(tokens)
    assert together.shape == (3, 16, 264) and together.dtype == jnp.float32
    padded = np.zeros((3, 20), np.int64)
    for row, sequence in zip(padded, tokens, strict=True):
        row[: len(sequence)] = sequence
    np.testing.assert_array_equal(muse.logits(padded, [3, 11, 16]), together)
    np.testing.assert_array_equal(muse.logits(jnp.asarray(padded), [3, 11, 16]), together)
    # Causal: what follows a token does not reach its logits. fp32 sums of other shapes differ in their last bits.
    again = muse.logits([tokens[2], tokens[2], tokens[2][:11] + tokens[1][:5]])
    np.testing.assert_allclose(again[2, :11], together[2, :11], rtol=0, atol=2e-5)
    assert np.abs(np.asarray(again[2, 11:] - together[2, 11:])).max() > 1e-2


class TestGenerate:
    def test_text_and_figures(self, muse):
        written = muse.generate(PROMPT, max_new_tokens=20, stop_token_ids=[263])
        assert written.finish_reason is None and written.tokens == []
        text = "".join(written)
        assert len(written.tokens) == 20 and written.finish_reason == "length"
        assert text == muse.tokenizer.decode(written.tokens)
        assert written.prompt_tokens == len(PROMPT)
        assert written.seconds_prefill > 0 and written.seconds_decode == sum(written.step_seconds)
        assert written.accepted == [1] * 19 and len(written.step_seconds) == 19
        assert written.tokens_per_second == 18 / sum(written.step_seconds[1:])
        assert written.seconds_step == np.median(written.step_seconds[1:])
        single = muse.generate(PROMPT, max_new_tokens=2, stop_token_ids=[263])
        "".join(single)
        assert single.tokens_per_second == 1 / single.seconds_step == 1 / single.seconds_decode
        assert list(written) == []  # used up

    def test_unknown_setting(self, muse):
        with pytest.raises(TypeError, match=r"^generate has no setting 'temprature': allowed are those of prefill$"):
            muse.generate(PROMPT, temprature=1)

    def test_repr_is_short(self, muse):
        assert repr(muse) == "Muse(2 layers of 64, float32, no draft, xla, devices=1)"
        assert len(repr(muse.model)) < 200

    def test_ids_as_prompt(self, muse):
        ids = muse.tokenizer.encode(PROMPT)
        texts = ["".join(muse.generate(prompt, max_new_tokens=6)) for prompt in (PROMPT, ids, np.asarray(ids))]
        assert texts[0] == texts[1] == texts[2]

    def test_stop(self, muse):
        free = muse.generate(PROMPT, max_new_tokens=20, stop_token_ids=[263])
        "".join(free)
        stop = free.tokens[6]
        stopped = muse.generate(PROMPT, max_new_tokens=20, stop_token_ids=[stop])
        "".join(stopped)
        assert stopped.finish_reason == "stop"
        assert stopped.tokens == free.tokens[: free.tokens.index(stop) + 1]

    def test_stop_token_of_the_checkpoint_at_the_limit(self, muse):
        """A text that ends with a stop token has stopped, also where it had no token left."""
        first = muse.generate(PROMPT, max_new_tokens=1, stop_token_ids=[263])
        "".join(first)
        assert (first.finish_reason, len(first.tokens), first.tokens_per_second) == ("length", 1, None)
        again = muse.generate(PROMPT, max_new_tokens=1, stop_token_ids=first.tokens)
        "".join(again)
        assert (again.finish_reason, again.tokens) == ("stop", first.tokens)

    def test_stops_in_the_middle_and_goes_on(self, muse):
        whole = "".join(muse.generate(PROMPT, max_new_tokens=20, stop_token_ids=[263]))
        written = muse.generate(PROMPT, max_new_tokens=20, stop_token_ids=[263])
        start = ""
        for piece in written:
            start += piece
            if len(start) >= 3:
                break
        assert written.finish_reason is None and 3 <= len(written.tokens) < 20
        assert start + "".join(written) == whole
        assert written.finish_reason == "length"

    @pytest.mark.parametrize("settings", [{"max_new_tokens": 0}, {"max_new_tokens": 600}, {"temperature": -1}, {"seed": 0.5}])
    def test_errors_come_at_once(self, muse, settings):
        with pytest.raises(ValueError) as error:
            muse.generate(PROMPT, **settings)
        one_line(error)

    def test_empty_prompt(self, muse):
        for prompt in ("", []):
            with pytest.raises(ValueError, match="every sequence needs at least one token"):
                muse.generate(prompt)


def test_hf_numerics_in_bfloat16(checkpoint):
    """Every logit is a bfloat16 number; cache and stream are bfloat16; decoding runs."""
    muse = muse_jax.load(checkpoint, numerics="hf", dtype="bfloat16", prefill_chunk=16)
    tokens = [list(range(12))]
    logits = np.asarray(muse.logits(tokens))
    np.testing.assert_array_equal(logits, logits.astype(jnp.bfloat16).astype(np.float32))
    state, out = muse.prefill(tokens, max_new_tokens=4)
    assert state.cache.layers[0][0].dtype == jnp.bfloat16
    assert int(out.tokens[0, 0]) == logits[0, -1, :259].argmax()
    state, out = muse.decode(state)
    assert int(out.count[0]) == 1


def test_window_far_wider_than_the_request(small_config, small_params):
    """The ring holds no more than the request; what is seen is everything."""
    config = dataclasses.replace(small_config, sliding_window=2**31 - 1)
    module = MuseSpark(config, dtype=jnp.float32)
    model = Model.create(module, jax.tree.map(jnp.asarray, small_params), valid_vocab=259)
    wide = Muse(model, config, None, None, None, "xla", max_length=512, prefill_chunk=16)
    prompt = list(range(5, 45))
    state, out = wide.prefill([prompt], max_new_tokens=4, stop_token_ids=[])
    assert state.cache.ring_positions.shape[1] < 512
    tokens = [int(out.tokens[0, 0])]
    while not out.done.all():
        state, out = wide.decode(state)
        tokens.append(int(out.tokens[0, 0]))
    logits = wide.logits([prompt + tokens])[0, len(prompt) - 1 : -1, :259]
    assert tokens == jnp.argmax(logits, axis=-1).tolist()


def test_64_bit_types_are_refused(checkpoint):
    with jax.enable_x64(True), pytest.raises(ValueError) as error:
        muse_jax.load(checkpoint)
    assert "jax_enable_x64 is on" in one_line(error)
