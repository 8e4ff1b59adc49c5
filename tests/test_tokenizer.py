"""Tokenizer files, chat templates (against transformers and against hostile templates), streaming detokenisation."""

import json
import os
import threading
import time

import numpy as np
import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from muse_jax.tokenizer import StreamDecoder, TemplateLimits, Tokenizer, TokenizerError

LINES = [
    "Natalia sold clips to 48 of her friends in April, and then half as many in May.",
    "How many clips did she sell? 48 / 2 = 24, so 48 + 24 = 72.",
    "多くの人が東京に住んでいます。数学は楽しい。",
    "Привет, мир! שלום עולם مرحبا",
    "é ö ü ñ e\u0301 a\u0308 क्षि",
]
TEXTS = [
    *LINES,
    "family \U0001f468‍\U0001f469‍\U0001f467‍\U0001f466 flag \U0001f1eb\U0001f1f7 thumb \U0001f44d\U0001f3fd, done",
    "漢字かな交じり文 한국어 𝔘𝔫𝔦 𠜎",
    "  two leading spaces,  inner  ones and trailing  ",
    "Zalgo: z\u0310\u0334a\u0310l\u0301 \ufffd literal \ufffd\ufffd",
    " \n\t\n ",
    "",
]
SPECIAL = ["<s>", "</s>", "<pad>", "<|eot|>"]
MESSAGES = [
    {"role": "system", "content": "Be <brief> & kind."},
    {"role": "user", "content": "  2 + 2? \n"},
    {"role": "assistant", "content": "4", "reasoning": "two and two"},
    {"role": "user", "content": [{"type": "text", "text": "東京 'x' \"y\""}, {"type": "image"}]},
]
TEMPLATES = {
    "plain": "{{ bos_token }}{% for m in messages %}\n<|{{ m.role }}|>{{ m['content'] }}{{ eos_token }}\n{% endfor %}"
    "{%- if add_generation_prompt %}<|assistant|>{% endif %}",
    "blocks": "{% for m in messages %}\n    {% if m.content is string %}\n  {{ m.content | trim }}\n    {% else %}\n"
    "{% for part in m.content %}{{ part.type }}:{{ part.text | default('-') }};{% endfor %}\n    {% endif %}\n{% endfor %}",
    "tojson": "{{ messages | tojson }}{{ tools | tojson(indent=2) }}{{ documents | tojson(separators=(',', ':')) }}",
    "loops": "{% for m in messages %}{% if loop.index == 2 %}{% continue %}{% endif %}{{ loop.index0 }}{{ m.role }}"
    "{% if loop.index == 3 %}{% break %}{% endif %}{% endfor %}",
    "generation": "{% set x = 1 %}{% for m in messages %}{{ m.role }}{% generation %}{% set x = 2 %}{{ x }}"
    "{{ m.content }}{% endgeneration %}{{ x }}{% endfor %}",
    "namespace": "{% set ns = namespace(n=0, seen=dict(a=1)) %}{% macro show(t) %}[{{ t }}]{% endmacro %}"
    "{% for m in messages %}{% set ns.n = ns.n + 1 %}{{ show(m.role) }}{% endfor %}{{ ns.n }}{{ ns.seen }}",
    "variables": "{{ reasoning_effort | default('none') }} {{ pad_token is defined }} {{ strftime_now('%Y') | length }}"
    " {{ messages[2].thinking }} {{ messages[2].reasoning_content }} {{ tools is none }} {{ missing }}",
}


def _add_special(backend):
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return backend


def _bpe(byte_level=True):
    """Every byte and 300 merges; texts in other scripts fall apart into single bytes."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=556, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(LINES, trainer)
    return _add_special(backend)


def _metaspace(scheme="always"):
    backend = Backend(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    backend.decoder = decoders.Metaspace(prepend_scheme=scheme)
    trainer = trainers.UnigramTrainer(vocab_size=200, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False)
    backend.train_from_iterator(LINES, trainer)
    return _add_special(backend)


def _byte_fallback(strip=1):
    """As converted from sentencepiece: leading spaces stripped from the whole, unknown characters as byte tokens."""
    pieces = ["<unk>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "▁the", "a", "b", "ab", "▁▁", ".", "é", "東", "▁\ufffd"]
    backend = Backend(models.BPE({piece: i for i, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", strip, 0)]
    backend.decoder = decoders.Sequence(steps)
    return _add_special(backend)


def _words(decoder):
    pieces = ["[UNK]", "do", "n", "##t", "not", "'", "s", ".", "ab", "##c", "x</w>", "y", "|", "<pad>", "\ufffd", " not"]
    backend = Backend(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    if decoder is not None:
        backend.decoder = decoder
    return _add_special(backend)


BACKENDS = {
    "byte_level": _bpe,
    "metaspace": _metaspace,
    "metaspace_never": lambda: _metaspace("never"),
    "byte_fallback": _byte_fallback,
    "strip_six": lambda: _byte_fallback(strip=6),
    "wordpiece_cleanup": lambda: _words(decoders.WordPiece(cleanup=True)),
    "bpe_suffix": lambda: _words(decoders.BPEDecoder(suffix="</w>")),
    "ctc": lambda: _words(decoders.CTC(pad_token="<pad>", cleanup=True)),
    "no_decoder": lambda: _words(None),
}


def _tokenizer(tmp_path, backend=None, **files) -> Tokenizer:
    """Writes a checkpoint directory; `files` are contents of NAME.json."""
    limits = files.pop("limits", None)
    (backend or _bpe()).save(str(tmp_path / "tokenizer.json"))
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return Tokenizer.from_directory(tmp_path, template_limits=limits)


# ---- Files ------------------------------------------------------------------------------------------------------------


def test_ids_come_from_the_first_file_that_has_them(tmp_path):
    first = len(_bpe().get_vocab()) - 4  # of <s>
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}}
    model = {"eos_token_id": 3, "text_config": {"eos_token_id": 2, "bos_token_id": 7}, "pad_token_id": 9}
    tokenizer = _tokenizer(tmp_path)
    assert tokenizer.stop_token_ids == () and tokenizer.bos_token_id is None and not tokenizer.has_chat_template
    assert tokenizer.vocab_size == first + 4
    assert _tokenizer(tmp_path, tokenizer_config=config).stop_token_ids == (first + 1,)
    assert _tokenizer(tmp_path, config={"eos_token_id": 3}).stop_token_ids == (3,)
    tokenizer = _tokenizer(tmp_path, config=model)
    assert (tokenizer.stop_token_ids, tokenizer.bos_token_id, tokenizer.pad_token_id) == ((2,), first, 9)
    tokenizer = _tokenizer(tmp_path, generation_config={"eos_token_id": [5, 1, 5], "pad_token_id": 4})
    assert (tokenizer.stop_token_ids, tokenizer.bos_token_id, tokenizer.pad_token_id) == ((5, 1), first, 4)
    assert _tokenizer(tmp_path, generation_config={"eos_token_id": 0}).stop_token_ids == (0,)


def test_vocab_size_counts_gaps(tmp_path):
    backend = Backend(models.WordLevel({"a": 0, "b": 41}, unk_token="a"))
    tokenizer = _tokenizer(tmp_path, backend)
    assert tokenizer.vocab_size == 42
    assert tokenizer.decode([0, 7, 41]) == "a b"
    decoder = StreamDecoder(tokenizer)
    assert decoder.push([0, 7, 41]) + decoder.flush() == "a b"


def test_bos_and_eos_flags_replace_the_post_processor(tmp_path):
    backend = _bpe()
    bos, eos = (backend.token_to_id(token) for token in ("<s>", "</s>"))
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", eos)])
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    plain = _tokenizer(tmp_path, backend, tokenizer_config=names)
    assert plain.encode("a")[1:] == [eos] and plain.encode("a", add_special_tokens=False) == plain.encode("a")[:1]
    flagged = _tokenizer(tmp_path, backend, tokenizer_config={**names, "add_bos_token": True})
    assert flagged.encode("a") == [bos, *plain.encode("a", add_special_tokens=False)]


def test_truncation_and_padding_are_off(tmp_path):
    backend = _bpe()
    backend.enable_truncation(2)
    backend.enable_padding(length=64)
    tokenizer = _tokenizer(tmp_path, backend)
    assert tokenizer.decode(tokenizer.encode(LINES[0])) == LINES[0]
    assert len(tokenizer.encode("ab")) <= 2


def test_token_ids_far_apart_are_refused_at_once(tmp_path):
    """The library walks every id up to the largest when it writes a tokenizer out."""
    vocab = {letter: i for i, letter in enumerate("ab")} | {"c": 2**32 - 2}
    content = {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": vocab, "merges": []}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(TokenizerError, match="token id 4294967294: ids up to"):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("tokenizer.json", None, "no such file"),
        ("tokenizer.json", b"{", "not a usable tokenizer"),
        ("tokenizer.json", b"\xff\x00", "not a usable tokenizer"),
        ("tokenizer.json", b'{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]]}}', "not a usable"),
        ("tokenizer_config.json", b"[" * 100_000, "not readable as JSON"),
        ("tokenizer_config.json", b"[]", "holds a list"),
        ("tokenizer_config.json", b'{"bos_token": 3}', "bos_token = 3"),
        ("tokenizer_config.json", b'{"eos_token": "<nope>"}', "'<nope>' is not in tokenizer.json"),
        ("tokenizer_config.json", b'{"chat_template": [{"name": "a"}]}', "chat_template: expected"),
        ("generation_config.json", b'{"eos_token_id": "2"}', "generation_config.json: eos_token_id = '2'"),
        ("generation_config.json", b'{"eos_token_id": [1, true]}', "eos_token_id"),
        ("generation_config.json", b'{"eos_token_id": 200001}', "knows ids 0 to"),
        ("config.json", b'{"text_config": {"eos_token_id": -1}}', "knows ids 0 to"),
        ("chat_template.jinja", b"\xff", "not UTF-8"),
        ("chat_template.jinja", b" " * (2 << 20), "larger than the 1 MiB"),
        ("config.json", b" " * (33 << 20), "larger than the 32 MiB"),
    ],
)
def test_bad_files(tmp_path, name, content, message):
    _bpe().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / name).unlink(missing_ok=True)
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(TokenizerError) as caught:
        Tokenizer.from_directory(tmp_path)
    assert message in str(caught.value) and name in str(caught.value) and "\n" not in str(caught.value)


def test_a_pipe_is_not_a_file(tmp_path):
    os.mkfifo(tmp_path / "tokenizer.json")
    with pytest.raises(TokenizerError, match="not a regular file"):
        Tokenizer.from_directory(tmp_path)


# ---- Encode and decode ------------------------------------------------------------------------------------------------


def test_text_survives(tmp_path):
    tokenizer = _tokenizer(tmp_path)
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    ids = tokenizer.encode("<s>a</s>")
    assert len(ids) == 3
    assert tokenizer.decode(ids) == "a" and tokenizer.decode(ids, skip_special_tokens=False) == "<s>a</s>"
    assert tokenizer.decode(np.array(ids, np.int32)) == "a"


def test_bad_text_and_ids(tmp_path):
    tokenizer = _tokenizer(tmp_path)
    with pytest.raises(TokenizerError, match=r"U\+D83D at character 1"):
        tokenizer.encode("a\ud83d")
    with pytest.raises(TokenizerError, match="bytes: expected a str"):
        tokenizer.encode(b"a")
    decoder = StreamDecoder(tokenizer)
    for bad in (-1, tokenizer.vocab_size, 1 << 40, 1.0, "a"):
        for take in (tokenizer.decode, decoder.push):
            with pytest.raises(TokenizerError, match="token id"):
                take([*tokenizer.encode("a"), bad])
    assert decoder.flush() == ""  # a refused push takes nothing


# ---- Streaming --------------------------------------------------------------------------------------------------------


def _check_stream(tokenizer, ids, rng, skip):
    whole = tokenizer.decode(ids, skip_special_tokens=skip)
    decoder = StreamDecoder(tokenizer, skip_special_tokens=skip)
    text, at = "", 0
    while at < len(ids):
        step = int(rng.integers(1, 4))
        text += decoder.push(ids[at : at + step])
        at += step
        assert whole.startswith(text), (ids, at)  # nothing given out has to be taken back
    assert text + decoder.flush() == whole, ids
    assert decoder.push(ids) + decoder.flush() == whole  # flush leaves a fresh decoder


@pytest.mark.parametrize("name", BACKENDS)
def test_stream_equals_decode(tmp_path, rng, name):
    tokenizer = _tokenizer(tmp_path, BACKENDS[name]())
    for text in TEXTS:
        ids = tokenizer.encode("<s>" + text.replace(",", "<|eot|>") + "</s>")
        for skip in (True, False):
            _check_stream(tokenizer, ids, rng, skip)
    for size in (1, 2, 3, 5, 9, 17, 40) * 12:
        few = rng.integers(0, tokenizer.vocab_size, size=4)  # repetitions provoke runs of bytes, spaces and specials
        for ids in (rng.integers(0, tokenizer.vocab_size, size), rng.choice(few, size)):
            _check_stream(tokenizer, ids.tolist(), rng, bool(size % 2))


def test_stream_of_raw_bytes(tmp_path, rng):
    """Byte tokens alone: every way in which UTF-8 can be broken off, resumed or wrong."""
    backend = _bpe()
    alphabet = {token: i for token, i in backend.get_vocab().items() if len(token) == 1}
    byte_ids = [alphabet[_byte_piece(byte)] for byte in range(256)]
    tokenizer = _tokenizer(tmp_path, backend)
    interesting = [0x41, 0x80, 0xA0, 0xBF, 0xC3, 0xE0, 0xE4, 0xED, 0xEF, 0xF0, 0x9F, 0xF4, 0x90, 0xBD, 0xFF]
    for _ in range(300):
        ids = [byte_ids[byte] for byte in rng.choice(interesting, int(rng.integers(1, 30)))]
        _check_stream(tokenizer, ids, rng, True)


def _byte_piece(byte: int) -> str:
    """The character that stands for a byte in byte-level BPE: itself if printable, else the next free one from 256."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return chr(byte) if byte in printable else chr(256 + [b for b in range(256) if b not in printable].index(byte))


def test_stream_prints_whole_characters_as_early_as_it_can(tmp_path):
    tokenizer = _tokenizer(tmp_path)
    ids = tokenizer.encode("a\U0001f44db")
    assert len(ids) == 6
    decoder = StreamDecoder(tokenizer)
    assert [decoder.push([token]) for token in ids] == ["a", "", "", "", "\U0001f44d", "b"]
    assert decoder.push(ids[:3]) == "a"
    assert decoder.flush() == "\ufffd"  # the half that never was completed


def test_stream_holds_a_run_of_byte_tokens(tmp_path):
    """One invalid byte turns the whole run into U+FFFD, so a run is not final before it ends."""
    tokenizer = _tokenizer(tmp_path, _byte_fallback())
    run = [tokenizer._backend.token_to_id(f"<0x{byte:02X}>") for byte in "é".encode()]
    letter = tokenizer._backend.token_to_id("a")
    decoder = StreamDecoder(tokenizer)
    assert [decoder.push([token]) for token in (letter, *run, letter)] == ["a", "", "", "éa"]
    assert decoder.push([letter, *run, run[0]]) == "a"
    assert decoder.flush() == "\ufffd" * 3


def test_stream_strips_leading_spaces_once(tmp_path):
    """The window must not fall among spaces that its own decoding would strip again."""
    tokenizer = _tokenizer(tmp_path, _byte_fallback(strip=6))
    space, letter = (tokenizer._backend.token_to_id(token) for token in ("▁", "a"))
    decoder = StreamDecoder(tokenizer)
    ids = [*[space] * 20, letter, *[space] * 20, letter]
    assert "".join(decoder.push([token]) for token in ids) == " " * 14 + "a" + " " * 20 + "a"


@pytest.mark.parametrize("name", ["byte_level", "metaspace", "byte_fallback"])
def test_stream_cost_does_not_grow(tmp_path, rng, name, monkeypatch):
    """The tokens decoded per token pushed are few, for text as well as for endless invalid or blank tokens."""
    tokenizer = _tokenizer(tmp_path, BACKENDS[name]())
    seen = 0
    decode = StreamDecoder._decode

    def counted(self, ids):
        nonlocal seen
        seen += len(ids)
        return decode(self, ids)

    monkeypatch.setattr(StreamDecoder, "_decode", counted)
    size = 600
    constant = [[token] * size for token in rng.integers(0, tokenizer.vocab_size, 20).tolist()]
    for ids in (tokenizer.encode("".join(LINES) * 3)[:size], *constant):
        seen = 0
        decoder = StreamDecoder(tokenizer)
        text = "".join(decoder.push([token]) for token in ids) + decoder.flush()
        assert text == tokenizer.decode(ids)
        assert seen <= 10 * len(ids) + 40  # a window is 4 to 8 tokens, and trimmed every fourth


def test_stream_refuses_a_decoder_that_is_not_local(tmp_path):
    backend = _bpe()
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace("ab", "c")])
    with pytest.raises(TokenizerError, match="decoder Replace after the tokens are joined cannot be streamed"):
        StreamDecoder(_tokenizer(tmp_path, backend))
    backend.decoder = decoders.Sequence([decoders.Replace("ab", "c"), decoders.ByteLevel(), decoders.Replace("a", "b")])
    StreamDecoder(_tokenizer(tmp_path, backend))


# ---- Chat templates ---------------------------------------------------------------------------------------------------


def _config(template, **more):
    return {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "chat_template": template, **more}


@pytest.mark.parity
def test_templates_render_as_in_transformers(tmp_path):
    from transformers import PreTrainedTokenizerFast

    config = _config([{"name": name, "template": text} for name, text in TEMPLATES.items()])
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    ours = _tokenizer(tmp_path, tokenizer_config=config)
    theirs = PreTrainedTokenizerFast.from_pretrained(str(tmp_path))
    more = {"tools": [{"name": "f", "é": "<&>"}], "documents": [{"title": "t", "text": "x"}], "reasoning_effort": "high"}
    for name in TEMPLATES:
        for kwargs in ({}, more, {"add_generation_prompt": False}):
            want = theirs.apply_chat_template(
                MESSAGES, chat_template=name, tokenize=False, **{"add_generation_prompt": True, **kwargs}
            )
            assert want and ours.apply_chat_template(MESSAGES, template_name=name, **kwargs) == want, (name, kwargs)
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text), skip_special_tokens=True)


def test_template_files_and_names(tmp_path):
    named = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    tokenizer = _tokenizer(tmp_path, tokenizer_config=_config(named))
    assert tokenizer.apply_chat_template(MESSAGES) == "d"
    assert tokenizer.apply_chat_template(MESSAGES, tools=[]) == "t"
    assert tokenizer.apply_chat_template(MESSAGES, tools=[], template_name="default") == "d"
    with pytest.raises(TokenizerError, match=r"named 'x': there are \['default', 'tool_use'\]"):
        tokenizer.apply_chat_template(MESSAGES, template_name="x")
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}file")
    assert Tokenizer.from_directory(tmp_path).apply_chat_template(MESSAGES, tools=[]) == "<s>file"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("more{{ reasoning_effort }}")
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.apply_chat_template(MESSAGES, tools=[], reasoning_effort="low") == "morelow"
    with pytest.raises(TokenizerError, match="has no chat template"):
        _tokenizer(tmp_path.parent).apply_chat_template(MESSAGES)


@pytest.mark.parametrize(
    "messages, message",
    [
        ([], "messages is empty"),
        ("hi", "messages is a?str"),
        (["hi"], r"messages\[0\] is a str"),
        ([{"content": "x"}], r"messages\[0\].role = None"),
        ([{"role": "user"}], r"messages\[0\].content is a NoneType"),
        ([{"role": "user", "content": 3}], r"messages\[0\].content is a int"),
        ([{"role": "user", "content": ["x"]}], r"messages\[0\].content is a list"),
        ([{"role": "user", "content": [{"image": b"x"}]}], r"messages\[0\].content\[0\].image is a bytes"),
        ([{"role": "user", "content": "x", 1: 2}], "key 1"),
    ],
)
def test_bad_messages(tmp_path, messages, message):
    tokenizer = _tokenizer(tmp_path, tokenizer_config=_config("{{ messages }}"))
    with pytest.raises(TokenizerError, match=message.replace("a?", "")):
        tokenizer.apply_chat_template(messages)


def test_other_arguments(tmp_path):
    tokenizer = _tokenizer(tmp_path, tokenizer_config=_config("{{ messages }}"))
    call = [{"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}]
    assert tokenizer.apply_chat_template(call) == "[{'role': 'assistant', 'tool_calls': [{'name': 'f'}]}]"
    for bad in ({"tools": {}}, {"documents": ["x"]}, {"effort": object()}):
        with pytest.raises(TokenizerError, match=next(iter(bad))):
            tokenizer.apply_chat_template(MESSAGES, **bad)
    loop = {}
    loop["loop"] = loop
    with pytest.raises(TokenizerError, match="contain themselves"):
        tokenizer.apply_chat_template(MESSAGES, x=loop)


DOUBLE = "{% set ns = namespace(x=['aa']) %}{% for i in range(60) %}{% set ns.x = EXPRESSION %}{% endfor %}"
OUT_OF_REACH = {  # what a stranger's template may try, and the word that names why it did not work
    "{{ 'a' * 10 ** 10 }}": "memory",
    "{{ [0] * 10 ** 10 }}": "memory",
    "{{ 7 ** (10 ** 9) }}": "not finished|memory",
    "{{ '%9999999999d' % 1 }}": "memory|OverflowError|ValueError|too big",
    "{{ '%999999999d' % 1 }}": "memory",
    "{{ '{:999999999}'.format('x') }}": "memory",
    "{{ 'x'.center(10 ** 10) }}": "memory",
    "{{ range(10 ** 9) | list }}": "Range too big",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}": "not finished",
    "{% for i in range(99999) %}{{ 'a' * 9999 }}{% endfor %}": "more than 16777216 characters",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "deeply",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}": "not finished",
    "{{ lipsum(10 ** 9) }}": "not finished",
    "{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}": "deeply|died",
    DOUBLE.replace("EXPRESSION", "ns.x + ns.x"): "memory|not finished",
    DOUBLE.replace("EXPRESSION", "[ns.x[0] ~ ns.x[0]]"): "memory|not finished",
    DOUBLE.replace("EXPRESSION", "[[ns.x[0], ns.x[0]] | join]"): "memory|not finished",
    DOUBLE.replace("EXPRESSION", "[ns.x, ns.x]") + "{{ ns.x | tojson }}": "not finished|memory",
    "{{ ''.__class__.__mro__ }}": "__class__",
    "{{ messages | attr('__class__') | string | length // 0 }}": "unsafe|division",
    "{{ cycler.__init__.__globals__.os.getcwd() }}": "unsafe",
    "{{ '{0.__class__.__mro__}'.format(1) }}": "unsafe",
    "{{ messages.append(1) }}": "unsafe",
    "{{ dict.update(messages[0], x=1) }}": "undefined|no attribute",
    "{{ namespace(__class__=1) }}": "underscore",
    "{% include '/etc/hostname' %}": "no loader",
    "{{ raise_exception('roles\nmust alternate') }}": "^chat template: roles must alternate$",
    "{{ raise_exception('x' * 10000) }}": r"x\.\.\.$",
    "ok\n{% if %}": "line 2",
    "{{ nothing.at_all }}": "'nothing' is undefined",
    "{{ 1 / 0 }}": "ZeroDivisionError",
}


def test_hostile_templates_end_in_one_line(tmp_path):
    names = {f"t{i}": template for i, template in enumerate(OUT_OF_REACH)}
    config = _config([{"name": name, "template": text} for name, text in {**names, "good": "good"}.items()])
    tokenizer = _tokenizer(tmp_path, tokenizer_config=config, limits=TemplateLimits(seconds=1.0))
    for name, template in names.items():
        start = time.perf_counter()
        with pytest.raises(TokenizerError, match=OUT_OF_REACH[template]) as caught:
            tokenizer.apply_chat_template(MESSAGES, template_name=name)
        assert time.perf_counter() - start < 30, template  # a second each, and a new child on a busy machine
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
        assert tokenizer.apply_chat_template(MESSAGES, template_name="good") == "good"  # and the next one is served


def test_renders_share_a_process_and_not_their_data(tmp_path):
    template = "{% if secret is defined %}{% set kept = secret %}{% endif %}{{ kept }}{{ messages[0].content }}"
    tokenizer = _tokenizer(tmp_path, tokenizer_config=_config(template))
    assert tokenizer.apply_chat_template(MESSAGES, secret="s") == "sBe <brief> & kind."
    process = tokenizer._renderer._process
    assert tokenizer.apply_chat_template(MESSAGES) == "Be <brief> & kind."
    results = {}

    def ask(tokenizer, i):
        chat = [{"role": "user", "content": f"{i}é" * 1000}]
        results[i] = tokenizer.apply_chat_template(chat) == f"{i}é" * 1000

    threads = [threading.Thread(target=ask, args=(tokenizer, i)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == dict.fromkeys(range(8), True)
    assert tokenizer._renderer._process is process
    process.kill()  # the system may take it away between two requests
    process.wait()
    assert tokenizer.apply_chat_template(MESSAGES) == "Be <brief> & kind."
    last = tokenizer._renderer._process
    del tokenizer
    assert last.returncode == 0  # it ended with its tokenizer
