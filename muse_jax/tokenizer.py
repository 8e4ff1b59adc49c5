"""Text in and out: tokenizer.json, chat templates in a process of their own, and detokenisation of a stream.

Chat templates are programs written by strangers. jinja2's sandbox keeps them from reaching Python objects, but not from
looping for hours or asking for all the memory (`7 ** (10 ** 9)` is one C call that nothing in its process can
interrupt). So templates are rendered by a child process whose memory and processor time the kernel limits, which the
parent kills at a deadline. It starts with the first render and serves the later ones in about a millisecond each.

This file is also the program of that child; hence each of `tokenizers` and `jinja2` is imported only where it is used.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import operator
import os
import re
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jinja2
    import tokenizers

# A vocabulary of 200,000 entries takes some 30 MB with 220,000 colons (one for an entry, nine for an added token) and, if it
# has twice as many pairs to merge, 1.1 million commas. The library needs up to ten times as much memory as the file, and
# fifty times as much for a regular expression. The other files are far smaller.
_MAX_TOKENIZER_BYTES = 48 << 20
_MAX_COLONS, _MAX_COMMAS = 300_000, 1_200_000
_MAX_PIPELINE_CHARS = 1 << 20  # of tokenizer.json without vocabulary and added tokens
_MAX_JSON_BYTES = 32 << 20
_MAX_TEMPLATE_BYTES = 1 << 20
_MAX_VOCAB = 1 << 24

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")  # names in use for one thing, the standard one first


class TokenizerError(ValueError):
    """A tokenizer file, text, token id, message or template that cannot be used; the message is one line."""


@dataclasses.dataclass(frozen=True)
class TemplateLimits:
    """What rendering one chat may take. Where the system has no limit on address space (macOS), time alone bounds it."""

    seconds: float = 4.0  # wall time; a chat of a thousand messages takes about 0.1 s
    memory_bytes: int = 512 << 20  # address space of the child, about 40 MB of it the interpreter's
    output_chars: int = 16 << 20


class Tokenizer:
    """The text side of a checkpoint. Made by `from_directory`; nothing in it changes afterwards.

    Attributes: `stop_token_ids` tuple of ints; `bos_token_id`, `pad_token_id` int or None; `vocab_size` int, the largest
                id that `tokenizer.json` names, added tokens included, plus one (the model's rows may be more).
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        vocab_size: int,
        special_tokens: Mapping[str, str],
        stop_token_ids: tuple[int, ...] = (),
        bos_token_id: int | None = None,
        pad_token_id: int | None = None,
        chat_templates: Mapping[str, str] | None = None,
        template_limits: TemplateLimits | None = None,
    ):
        self._backend = backend
        self._special_tokens = dict(special_tokens)
        self._chat_templates = dict(chat_templates or {})
        self._renderer = _Renderer(template_limits or TemplateLimits())
        self.vocab_size = vocab_size
        self.stop_token_ids = stop_token_ids
        self.bos_token_id = bos_token_id
        self.pad_token_id = pad_token_id

    @classmethod
    def from_directory(cls, path: str | Path, *, template_limits: TemplateLimits | None = None) -> Tokenizer:
        """Reads the tokenizer of a Hugging Face checkpoint directory.

        Only tokenizer.json is required. Of the others, if present:
        - stop tokens are the eos_token_id (one or a list) of generation_config.json, else of config.json's text_config,
          else of config.json itself, else the eos_token of tokenizer_config.json;
        - bos and pad are the tokens of tokenizer_config.json, else the ids of generation_config.json, else of config.json;
        - chat_template.jinja, with additional_chat_templates/NAME.jinja, replaces chat_template of tokenizer_config.json;
        - add_bos_token and add_eos_token of tokenizer_config.json replace the post-processor of tokenizer.json.
        Truncation and padding set in tokenizer.json are switched off; clean_up_tokenization_spaces is not applied (as
        transformers ignores it for BPE).

        Raises:   TokenizerError naming the file and what is wrong with it.
        Source:   transformers 5.24.0, tokenization_utils_tokenizers.py and tokenization_utils_base.py.
        """
        path = Path(path)
        backend = _load_backend(path / "tokenizer.json")
        config = _read_json(path / "tokenizer_config.json")
        generation = _read_json(path / "generation_config.json")
        model = _read_json(path / "config.json")
        text_model = model.get("text_config") if isinstance(model.get("text_config"), dict) else {}
        sources = (("generation_config.json", generation), ("config.json", text_model), ("config.json", model))

        special_tokens = {}
        for name in _NAMED_TOKENS:
            value = config.get(name)
            if value is None:
                continue
            content = value.get("content") if isinstance(value, dict) else value
            if not isinstance(content, str):
                raise TokenizerError(f"tokenizer_config.json: {name} = {_shown(value)}: expected a string or an added token")
            special_tokens[name] = content

        size = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        if size > _MAX_VOCAB:  # the library walks every id up to the largest when it copies a tokenizer
            raise TokenizerError(f"{path / 'tokenizer.json'}: token id {size - 1}: ids up to {_MAX_VOCAB - 1} are supported")

        def from_token(kind: str) -> tuple[int, ...]:
            content = special_tokens.get(f"{kind}_token")
            if content is None:
                return ()
            token_id = backend.token_to_id(content)
            if token_id is None:
                raise TokenizerError(f"tokenizer_config.json: {kind}_token {_shown(content)} is not in tokenizer.json")
            return (token_id,)

        def from_ids(kind: str) -> tuple[int, ...]:
            for file, holder in sources:
                if holder.get(f"{kind}_token_id") is not None:
                    return _token_ids(holder[f"{kind}_token_id"], f"{file}: {kind}_token_id", size)
            return ()

        bos, pad = ((from_token(kind) or from_ids(kind) or (None,))[0] for kind in ("bos", "pad"))
        eos_of_tokenizer = from_token("eos")
        _set_post_processor(backend, config, bos=from_token("bos"), eos=eos_of_tokenizer)
        return cls(
            backend,
            vocab_size=size,
            special_tokens=special_tokens,
            stop_token_ids=from_ids("eos") or eos_of_tokenizer,
            bos_token_id=bos,
            pad_token_id=pad,
            chat_templates=_read_chat_templates(path, config),
            template_limits=template_limits,
        )

    @property
    def has_chat_template(self) -> bool:
        return bool(self._chat_templates)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; special tokens written out in it become their ids. Rendered chats already carry theirs,
        so they want `add_special_tokens=False`.

        Raises:   TokenizerError if `text` is not a string that UTF-8 can hold (lone surrogates).
        """
        if not isinstance(text, str):
            raise TokenizerError(f"text is a {type(text).__name__}: expected a str")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            where, code = error.start, ord(text[error.start])
            raise TokenizerError(f"text has a lone surrogate U+{code:04X} at character {where}: not valid Unicode") from None
        with _explained("tokenizer.json: cannot encode this text"):  # its regular expressions may need too long
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; bytes that are not UTF-8 come out as U+FFFD.

        Ids below `vocab_size` that name no token give no text. Raises TokenizerError for all others.
        """
        return self._backend.decode(self._checked(ids), skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        template_name: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """Writes a conversation as the text the model was trained on; `encode(text, add_special_tokens=False)` follows.

        Args:     messages: dicts with `role` (str) and `content` (str, or a list of dicts, passed through); content may
                  be left out where tool_calls or reasoning_content stand for it.  template_name: of several templates;
                  None takes `tool_use` if there are tools and a template of that name, else `default`.
                  tools: JSON schemas.  documents: dicts with title and text.  variables: whatever else the template
                  reads, such as `reasoning_effort`; they win over the named special tokens (`bos_token`, ...).
                  All values are JSON values.
        Returns:  the text, as transformers 5.24.0 renders it.
        Raises:   TokenizerError if there is no such template, the arguments are not of this form, or the template is
                  wrong, refuses them (`raise_exception`), leaves the sandbox or exceeds `TemplateLimits`.
        Source:   transformers 5.24.0, utils/chat_template_utils.py.
        """
        template = self._choose_template(template_name, has_tools=tools is not None)
        values = {**self._special_tokens, **variables, "add_generation_prompt": add_generation_prompt}
        for name, dicts in (("messages", messages), ("tools", tools), ("documents", documents)):
            values[name] = None if dicts is None and name != "messages" else _checked_dicts(dicts, name)
        try:
            values = {name: _plain(value, name) for name, value in values.items()}
        except RecursionError:
            raise TokenizerError("chat template: the arguments are nested too deeply or contain themselves") from None
        values["messages"] = [_checked_message(message, i) for i, message in enumerate(values["messages"])]
        return self._renderer.render(template, values)

    def _choose_template(self, name: str | None, has_tools: bool) -> str:
        if not self._chat_templates:
            raise TokenizerError("the checkpoint has no chat template (chat_template.jinja or tokenizer_config.json)")
        if name is None:
            name = "tool_use" if has_tools and "tool_use" in self._chat_templates else "default"
        if name not in self._chat_templates:
            raise TokenizerError(f"no chat template named {name!r}: there are {sorted(self._chat_templates)}")
        return self._chat_templates[name]

    def _checked(self, ids: Iterable[int]) -> list[int]:
        checked = []
        for token in ids:
            try:
                token = operator.index(token)
            except TypeError:
                raise TokenizerError(f"token id {token!r}: expected an integer") from None
            if not 0 <= token < self.vocab_size:
                raise TokenizerError(f"token id {token}: the tokenizer knows 0 to {self.vocab_size - 1}")
            checked.append(token)
        return checked


# ---- Streaming --------------------------------------------------------------------------------------------------------


class StreamDecoder:
    """Turns token ids into text as they come; the pieces joined are exactly `tokenizer.decode(all ids)`.

    Text is given out once no later token can change it. Held back are the last character while it may be half of one
    (decoded as U+FFFD), and a run of byte tokens (`<0xE4>`) until a token of another kind ends it, because byte fallback
    replaces the whole run if it turns out to be invalid.

    A few tokens already written are kept in front of the new ones and decoded with them, since a decoder treats the
    first token differently (leading spaces) and a character may begin in an earlier one. Text is counted from the end
    of that window: its first characters may be wrong, but they were written before. Four tokens are enough: the state of
    a UTF-8 decoder depends on the last three bytes alone. So a token costs the same however long the text is.

    Raises: TokenizerError if the decoder rewrites text across tokens (a Replace of several characters after Fuse).
    """

    _WINDOW = 4

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True):
        self._tokenizer = tokenizer
        backend = tokenizer._backend
        added = backend.get_added_tokens_decoder().values()
        self._skipped = {token.content for token in added if token.special} if skip_special_tokens else set()
        decoder = backend.decoder  # its state is JSON; that of the whole tokenizer would take long
        self._byte_fallback = _check_streamable(json.loads(decoder.__getstate__()) if decoder else None)
        self._reset()

    def push(self, ids: Iterable[int]) -> str:
        """The text that `ids` complete, perhaps empty. Raises TokenizerError, and takes none, if an id is unknown."""
        return "".join(map(self._push_one, self._tokenizer._checked(ids)))

    def flush(self) -> str:
        """The text still held back; the next `push` begins a new text."""
        piece = self._decode(self._window + self._byte_run)[self._written :]
        self._reset()
        return piece

    def _reset(self) -> None:
        self._window: list[int] = []  # tokens written, the last of them perhaps but for its last character
        self._written = 0  # characters of decode(window) that were given out
        self._byte_run: list[int] = []
        self._trim_at = 2 * self._WINDOW

    def _push_one(self, token_id: int) -> str:
        token = self._tokenizer._backend.id_to_token(token_id)
        if token is None or token in self._skipped:
            return ""  # left out before the decoder sees it, so it must not count as context either
        if self._byte_fallback and _BYTE_TOKEN.fullmatch(token):
            self._byte_run.append(token_id)
            return ""
        self._window += [*self._byte_run, token_id]
        self._byte_run = []
        text = self._decode(self._window)
        held = text.endswith("\ufffd")
        piece = text[self._written : len(text) - held]
        self._written = len(text) - held
        if len(self._window) >= self._trim_at:
            self._trim(held)
        return piece

    def _trim(self, held: bool) -> None:
        """Drops old tokens, keeping at least one written character: only then are leading spaces no longer stripped."""
        keep = self._WINDOW
        while keep < len(self._window):
            window = self._window[-keep:]
            written = len(self._decode(window)) - held
            if written >= 1:
                self._window, self._written = window, written
                break
            keep *= 2
        self._trim_at = 2 * len(self._window)

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer._backend.decode(ids, skip_special_tokens=False)


_BYTE_TOKEN = re.compile(r"<0x(?:[0-9A-Fa-f]{2}|\+[0-9A-Fa-f])>")  # what byte fallback parses, "+F" included


def _check_streamable(decoder: dict[str, Any] | None) -> bool:
    """Whether the decoder (its JSON) has byte fallback. Raises TokenizerError if it is not local in the tokens."""
    steps = [decoder] if decoder else []
    joined = byte_fallback = False
    while steps:
        step = steps.pop(0)
        kind = step["type"]
        if kind == "Sequence":
            steps = step["decoders"] + steps
            continue
        pattern = step.get("pattern", {}).get("String", "")
        if joined and not (kind in ("Fuse", "Strip") or (kind == "Replace" and len(pattern) == 1)):
            raise TokenizerError(f"tokenizer.json: decoder {kind} after the tokens are joined cannot be streamed")
        joined |= kind in ("Fuse", "ByteLevel")
        byte_fallback |= kind == "ByteFallback"
    return byte_fallback


# ---- Files ------------------------------------------------------------------------------------------------------------


def _read(path: Path, max_bytes: int) -> bytes | None:
    """The bytes of a regular file (links are followed), None if there is none. Raises TokenizerError."""
    try:
        if not path.exists():
            return None
        if not path.is_file():  # a pipe would block, a device might never end
            raise TokenizerError(f"{path}: not a regular file")
        with path.open("rb") as file:
            content = file.read(max_bytes + 1)
    except OSError as error:
        raise TokenizerError(f"{path}: not readable ({error.strerror})") from None
    if len(content) > max_bytes:
        raise TokenizerError(f"{path}: larger than the {max_bytes >> 20} MiB allowed")
    return content


def _read_json(path: Path) -> dict[str, Any]:
    content = _read(path, _MAX_JSON_BYTES)
    if content is None:
        return {}
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{path}: not readable as JSON ({_one_line(error)})") from None
    if not isinstance(value, dict):
        raise TokenizerError(f"{path}: holds a {type(value).__name__}; expected an object")
    return value


def _load_backend(path: Path) -> tokenizers.Tokenizer:
    import tokenizers

    content = _read(path, _MAX_TOKENIZER_BYTES)
    if content is None:
        raise TokenizerError(f"{path}: no such file")
    for mark, most in ((b":", _MAX_COLONS), (b",", _MAX_COMMAS)):
        if content.count(mark) > most:
            raise TokenizerError(f"{path}: {content.count(mark)} times {mark.decode()!r}; at most {most} are read")
    _check_pipeline(content, path)
    with _explained(f"{path}: not a usable tokenizer"):
        backend = tokenizers.Tokenizer.from_buffer(content)
        backend.no_truncation()
        backend.no_padding()
    return backend


def _check_pipeline(content: bytes, path: Path) -> None:
    """Refuses a tokenizer.json that is none, or whose regular expressions would take gigabytes to compile."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(result := dict(pairs)) < len(pairs):  # the library would read both
            raise ValueError("a key appears twice in one object")
        return result

    try:
        value = json.loads(content, object_pairs_hook=unique)
        if not isinstance(value, dict):
            raise ValueError(f"holds a {type(value).__name__}; expected an object")
        size = len(json.dumps({key: part for key, part in value.items() if key not in ("model", "added_tokens")}))
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{path}: not a usable tokenizer ({_one_line(error)})") from None
    if size > _MAX_PIPELINE_CHARS:
        raise TokenizerError(
            f"{path}: {size} characters beside vocabulary and added tokens; at most {_MAX_PIPELINE_CHARS} are read"
        )


@contextlib.contextmanager
def _explained(message: str) -> Iterator[None]:
    """Makes one line of what the Rust library raises; its panics derive from BaseException."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise TokenizerError(f"{message} ({_one_line(error)})") from None


def _token_ids(value: Any, where: str, vocab_size: int) -> tuple[int, ...]:
    ids = tuple(value) if isinstance(value, list) else (value,)
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int):
            raise TokenizerError(f"{where} = {_shown(value)}: expected a token id, a list of them or null")
        if not 0 <= token < vocab_size:
            raise TokenizerError(f"{where} = {_shown(value)}: tokenizer.json knows ids 0 to {vocab_size - 1}")
    return tuple(dict.fromkeys(ids))


def _set_post_processor(backend: tokenizers.Tokenizer, config: dict[str, Any], bos: tuple, eos: tuple) -> None:
    """Lets add_bos_token and add_eos_token decide, where tokenizer_config.json has either."""
    from tokenizers import processors

    if "add_bos_token" not in config and "add_eos_token" not in config:
        return
    before = bos if config.get("add_bos_token") else ()
    after = eos if config.get("add_eos_token") else ()
    tokens = [(backend.id_to_token(token), token) for token in before + after]
    names = [name for name, _ in tokens]
    backend.post_processor = processors.TemplateProcessing(
        single=[*names[: len(before)], "$A", *names[len(before) :]], special_tokens=list(dict(tokens).items())
    )


def _read_chat_templates(path: Path, config: dict[str, Any]) -> dict[str, str]:
    files = {"default": path / "chat_template.jinja"}
    folder = path / "additional_chat_templates"
    if folder.is_dir():
        files |= {file.stem: file for file in sorted(folder.glob("*.jinja"))}
    templates = {}
    for name, file in files.items():
        content = _read(file, _MAX_TEMPLATE_BYTES)
        if content is not None:
            try:
                templates[name] = content.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
            except UnicodeDecodeError as error:
                raise TokenizerError(f"{file}: not UTF-8 (byte {error.start})") from None
    if templates:
        return templates

    value = config.get("chat_template")
    if value is None:
        return {}
    named = value if isinstance(value, list) else [{"name": "default", "template": value}]
    for entry in named:
        if not isinstance(entry, dict) or not all(isinstance(entry.get(key), str) for key in ("name", "template")):
            raise TokenizerError(
                "tokenizer_config.json: chat_template: expected a string or a list of objects with name and template"
            )
    return {entry["name"]: entry["template"] for entry in named}


def _shown(value: Any) -> str:
    """A value of a file as a message may show it."""
    try:
        return _one_line(ascii(value), 80)
    except (ValueError, RecursionError):  # an integer of more digits than Python prints, lists nested hundreds deep
        return f"a {type(value).__name__}"


def _one_line(error: BaseException | str, limit: int = 300) -> str:
    text = " ".join(str(error)[: 4 * limit].split())
    return text if len(text) <= limit else text[:limit] + "..."


# ---- Chat templates: what goes in -------------------------------------------------------------------------------------


def _plain(value: Any, where: str) -> Any:
    """A copy made of JSON types alone: what a template sees has no methods the sandbox does not know."""
    if value is None or type(value) in (str, bool, int, float):
        return value
    if isinstance(value, str):  # enums and the like
        return str.__str__(value)
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise TokenizerError(f"{where} has the key {_shown(key)}: keys are strings")
        return {str.__str__(key): _plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{where}[{i}]") for i, item in enumerate(value)]
    raise TokenizerError(f"{where} is a {type(value).__name__}: expected a JSON value (str, number, bool, list, dict)")


def _checked_dicts(value: Any, name: str) -> Any:
    if not isinstance(value, (list, tuple)) or (name == "messages" and not value):
        some = "a list of at least one dict" if name == "messages" else "a list of dicts"
        raise TokenizerError(f"{name} is {'empty' if value == [] else type(value).__name__}: expected {some}")
    for i, item in enumerate(value):
        if not isinstance(item, Mapping):
            raise TokenizerError(f"{name}[{i}] is a {type(item).__name__}: expected a dict")
    return value


def _checked_message(message: dict[str, Any], i: int) -> dict[str, Any]:
    """The message without its nulls and with its reasoning under the names templates read, as transformers passes it."""
    message = {key: value for key, value in message.items() if value is not None}
    reasoning = next((message[key] for key in _REASONING_FIELDS if key in message), None)
    if reasoning is not None:
        message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
    if not isinstance(message.get("role"), str):
        raise TokenizerError(f"messages[{i}].role = {message.get('role')!r}: expected a str such as 'user'")
    content = message.get("content")
    parts = isinstance(content, list) and all(isinstance(part, dict) for part in content)
    optional = content is None and ("tool_calls" in message or reasoning is not None)
    if not (isinstance(content, str) or parts or optional):
        raise TokenizerError(f"messages[{i}].content is a {type(content).__name__}: expected a str or a list of dicts")
    return message


# ---- Chat templates: the parent's side of the child process -----------------------------------------------------------

_START_SECONDS = 60.0  # imports on a cold disk
_CHILD = "import sys, json, runpy; sys.path[:] = json.loads(sys.argv[1]); runpy.run_path(sys.argv[2], run_name='__main__')"


class _Renderer:
    """Renders templates in a child process, one request and one reply a line, both JSON. Safe to share among threads."""

    def __init__(self, limits: TemplateLimits):
        self._limits = limits
        self._lock = threading.Lock()
        self._process: subprocess.Popen | None = None
        self._close = None
        self._owner = 0  # after a fork, the pipes belong to the parent

    def render(self, template: str, variables: dict[str, Any]) -> str:
        request = json.dumps({"template": template, "variables": variables}).encode() + b"\n"
        with self._lock:
            if self._process is None or self._owner != os.getpid() or self._process.poll() is not None:
                self._start()
            reply = self._exchange(request, self._limits.seconds)
        if reply is None:
            raise TokenizerError(f"chat template: not finished after {self._limits.seconds:g} s")
        if not reply.endswith(b"\n"):
            raise TokenizerError("chat template: the process rendering it died (memory or stack exhausted)")
        answer = json.loads(reply)
        if "error" in answer:
            raise TokenizerError(f"chat template: {answer['error']}")
        return answer["text"]

    def _start(self) -> None:
        arguments = [json.dumps([entry for entry in sys.path if entry]), __file__, json.dumps(vars(self._limits))]
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-B", "-c", _CHILD, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            # Nothing of the parent's environment is the template's business, but for what Python and the clock need.
            env={name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH", "TZ") if name in os.environ},
        )
        self._owner = os.getpid()
        self._close = weakref.finalize(self, _close, self._process)
        if self._exchange(b"", _START_SECONDS) != b"ready\n":
            raise TokenizerError(f"chat template: the process to render it did not start ({sys.executable}, POSIX only)")

    def _exchange(self, request: bytes, seconds: float) -> bytes | None:
        """Sends a line and returns the reply; b"" or part of a line from a dying child, None if the deadline killed it.
        The child is gone after anything but a whole line, so that the next request starts a fresh one."""
        process = self._process
        expired = threading.Event()

        def expire() -> None:
            expired.set()
            process.kill()

        deadline = threading.Timer(seconds, expire)
        deadline.daemon = True
        reply = b""
        try:
            deadline.start()
            process.stdin.write(request)
            process.stdin.flush()
            # Twelve bytes is the longest JSON escape of a character (a surrogate pair), should the child misbehave.
            reply = process.stdout.readline(12 * self._limits.output_chars + 1024)
        except BrokenPipeError:
            pass
        finally:
            deadline.cancel()
            if not reply.endswith(b"\n"):  # also on Ctrl-C, when a late reply would answer the next request
                process.kill()
                self._close()
                self._process = None
        return None if expired.is_set() and not reply.endswith(b"\n") else reply


def _close(process: subprocess.Popen) -> None:
    """The end of its input ends the child."""
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(BrokenPipeError):  # a request that was never read
            pipe.close()
    process.wait()


# ---- Chat templates: the child's side ---------------------------------------------------------------------------------


def _make_environment() -> jinja2.Environment:
    """The jinja2 environment of transformers 5.24.0 (utils/chat_template_utils.py), so that templates mean the same."""
    from datetime import datetime

    import jinja2.ext
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """`{% generation %}` marks what the assistant wrote. A block with a scope of its own, otherwise transparent."""

        tags = frozenset({"generation"})

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

        def _body(self, caller):
            return caller()

    class Dict:
        """Stands in for the type `dict`, whose unbound methods would change what the sandbox calls immutable."""

        def __call__(self, *args, **kwargs):
            return dict(*args, **kwargs)

        def fromkeys(self, *args):
            return dict.fromkeys(*args)

    class Namespace(jinja2.utils.Namespace):
        """Without attributes such as `__class__`, with which it would pass for another type."""

        def __init__(*args, **kwargs):  # no name of ours, so that a template may use any
            self, *rest = args
            attributes = dict(*rest, **kwargs)
            for name in attributes:
                Namespace._check(name)
            jinja2.utils.Namespace.__init__(self, attributes)

        def __setitem__(self, name, value):
            Namespace._check(name)
            jinja2.utils.Namespace.__setitem__(self, name, value)

        @staticmethod
        def _check(name):
            if isinstance(name, str) and name.startswith("_"):
                raise jinja2.exceptions.SecurityError(f"namespace attribute {name!r} begins with an underscore")

    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": lambda format: datetime.now().strftime(format),
        "dict": Dict(),
        "namespace": Namespace,
    }
    return environment


def _render(template: jinja2.Template, variables: dict[str, Any], max_chars: int) -> str:
    pieces, length = [], 0
    for piece in template.generate(variables):
        length += len(piece)
        if length > max_chars:
            raise OverflowError(f"writes more than {max_chars} characters")
        pieces.append(piece)
    return "".join(pieces)


def _describe(error: Exception, limits: TemplateLimits) -> str:
    import jinja2

    if isinstance(error, MemoryError):
        return f"needs more than {limits.memory_bytes >> 20} MiB of memory"
    if isinstance(error, RecursionError):
        return "nests or recurses too deeply"
    if isinstance(error, jinja2.TemplateSyntaxError):
        return f"line {error.lineno}: {_one_line(error.message)}"
    if isinstance(error, (jinja2.TemplateError, OverflowError)):
        return _one_line(error)
    return f"{type(error).__name__}: {_one_line(error)}"


def _serve(limits: TemplateLimits) -> None:
    """Answers requests until the input ends."""
    import resource
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's
    environment = _make_environment()
    compiled = functools.lru_cache(maxsize=8)(environment.from_string)
    with contextlib.suppress(ValueError, OSError):  # macOS has no limit on address space: see TemplateLimits
        resource.setrlimit(resource.RLIMIT_AS, (limits.memory_bytes, limits.memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))

    def send(line: bytes) -> None:
        sys.stdout.buffer.write(line + b"\n")
        sys.stdout.buffer.flush()

    send(b"ready")
    for line in sys.stdin.buffer:
        # Should the parent be gone, its deadline is too: the kernel ends this process then.
        used = resource.getrusage(resource.RUSAGE_SELF)
        cpu_seconds = int(used.ru_utime + used.ru_stime + limits.seconds) + 2
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, resource.RLIM_INFINITY))
        try:
            request = json.loads(line)
            text = _render(compiled(request["template"]), request["variables"], limits.output_chars)
            reply = json.dumps({"text": text})
        except Exception as error:
            reply = json.dumps({"error": _describe(error, limits)})
        send(reply.encode())
    os._exit(0)


if __name__ == "__main__":
    _serve(TemplateLimits(**json.loads(sys.argv[3])))
