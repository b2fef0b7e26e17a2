"""Text <-> token ids, and chats -> text, over the `tokenizers` library.

A folder's tokenizer.json is used as it is. From a GGUF the tokenizer is rebuilt here: the file
holds the vocabulary and the merges, but of the pre-tokenizer, which cuts a text into words before
any merge, only a name. A wrong rule still round-trips and yields other ids than the model was
trained on ("x  5": digits that stick to spaces), so an unknown name is refused.

Mirrors vllm/transformers_utils/tokenizer.py and llama.cpp's llama-vocab.cpp. Chapter 3.
"""

import functools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import (
    AddedToken,
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from tokenizers import Tokenizer as Backend

from minivllm.base import ModelError, UserError
from minivllm.models.chat_template import ChatTemplate, check_messages
from minivllm.models.checkpoint import read_json
from minivllm.models.gguf import GGUFFile, read_gguf
from minivllm.models.hub import ModelFiles

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")
UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 2, 3, 4, 5  # GGUF token types

# How words are cut, by the name in `tokenizer.ggml.pre`: {0} is how many digits stay together.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{0}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PRE_TOKENIZERS = {
    "gpt-2": None,
    "smollm": "digits",
    "qwen2": WORDS.format(""),
    "deepseek-r1-qwen": WORDS.format(""),
    "llama-bpe": WORDS.format("{1,3}"),
    "llama-v3": WORDS.format("{1,3}"),
    "llama3": WORDS.format("{1,3}"),
}
BEGINS_WITH_BOS = ("llama-bpe", "llama-v3", "llama3")  # unless the file says otherwise


@dataclass(frozen=True)
class Tokenizer:
    """One model's tokenizer, thread-safe. `backend` also serves tokenizers' DecodeStream."""

    backend: Backend
    special_tokens: dict[str, str]  # "bos_token" -> "<s>", ...
    chat_template: ChatTemplate | None = None

    @functools.cached_property
    def vocab_size(self) -> int:
        """The largest id + 1. A model's table may be longer: padding that is never sampled."""
        return max(self.backend.get_vocab().values(), default=-1) + 1

    @functools.cached_property
    def _named_ids(self) -> dict[str, int]:
        ids = {name: self.backend.token_to_id(t) for name, t in self.special_tokens.items()}
        return {name: token for name, token in ids.items() if token is not None}

    @property
    def bos_token_id(self) -> int | None:
        """The token that begins a text, if there is one."""
        return self._named_ids.get("bos_token")

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokenizer's own end of a text; `ModelConfig.eos_token_ids` has the others."""
        return tuple(self._named_ids[n] for n in ("eos_token",) if n in self._named_ids)

    @functools.cached_property
    def all_special_ids(self) -> frozenset[int]:
        """Ids that are no text: what `skip_special_tokens` leaves out, and the named ones."""
        added = self.backend.get_added_tokens_decoder()
        return frozenset({i for i, t in added.items() if t.special} | {*self._named_ids.values()})

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; a text that brings its own BOS does not get a second one.

        Raises:
            UserError: the text holds half a surrogate pair, which is no character.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise UserError(
                "the text holds a lone surrogate (U+D800 to U+DFFF), which is no character: decode "
                "the input as UTF-8"
            ) from None
        ids = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        if add_special_tokens and ids[:2] == [self.bos_token_id] * 2:
            plain = self.backend.encode(text, add_special_tokens=False).ids
            return ids[1:] if plain[:1] == [self.bos_token_id] else ids
        return ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of some token ids."""
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt of a chat, special tokens included: encode it without adding any.

        Args:
            messages: [{"role": "user", "content": "..."}, ...].
            add_generation_prompt: end with the opening of the assistant's turn.
            tools: JSON schemas of functions, for templates that know them.
            variables: what else the template reads (enable_thinking, ...).

        Raises:
            UserError: malformed messages, no template, or the template refuses them.
        """
        if self.chat_template is None:
            raise UserError(
                "this model has no chat template: pass one with chat_template (--chat-template), "
                "or use a plain prompt"
            )
        known = {
            **self.special_tokens, "tools": tools, "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }  # fmt: skip
        return self.chat_template.render(check_messages(messages), **{**known, **variables})


def load_tokenizer(files: ModelFiles, chat_template: str | None = None) -> Tokenizer:
    """The tokenizer of a model's files.

    Args:
        files: what `resolve_model` found.
        chat_template: takes the place of the model's own: a file, or the template itself.

    Raises:
        ModelError: there is none, it is broken, or of a kind that cannot be restored exactly.
        UserError: chat_template is no file and no template.
    """
    path = files.tokenizer
    if path.suffix.lower() == ".gguf" and path.is_file():
        tokenizer = _from_gguf(read_gguf(path))
    elif (path / "tokenizer.json").is_file():
        tokenizer = _from_folder(path)
    else:
        tokenizer = _from_transformers(path)
    if chat_template is None:
        return tokenizer
    template = ChatTemplate(_read_template(chat_template))
    _ = template.compiled  # the caller's own: say at once if it is broken
    return replace(tokenizer, chat_template=template)


def _read_template(given: str) -> str:
    if "{{" in given or "{%" in given:
        return given
    try:
        return Path(given).expanduser().read_text("utf-8")
    except (OSError, ValueError):
        raise UserError(
            f"chat_template {given[:200]!r} is neither a readable file nor a Jinja template"
        ) from None


def _from_folder(folder: Path) -> Tokenizer:
    try:
        backend = Backend.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the library raises plain Exception
        reason = " ".join(str(error).split())[:200]
        raise ModelError(f"{folder}/tokenizer.json is broken ({reason}): fetch it again") from None
    special: dict[str, str] = {}
    template = None
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            config = read_json(folder / name)
            special |= _special_tokens(config)
            template = config.get("chat_template", template)
    if (folder / "chat_template.jinja").is_file():
        template = (folder / "chat_template.jinja").read_text("utf-8", errors="replace")
    if isinstance(template, list):  # several, by name
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default")
    return Tokenizer(backend, special, _template(template))


def _template(source: Any) -> ChatTemplate | None:
    return ChatTemplate(source) if isinstance(source, str) else None


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    tokens = {}
    for name in SPECIAL_NAMES:
        value = config.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            tokens[name] = value
    return tokens


def _from_transformers(folder: Path) -> Tokenizer:
    """Older kinds (tokenizer.model, vocab.json) go through transformers' converters."""
    # Slow to import, and only needed where there is no tokenizer.json.
    from transformers import AutoTokenizer

    try:
        theirs = AutoTokenizer.from_pretrained(
            str(folder), trust_remote_code=False, local_files_only=True
        )
        backend = theirs.backend_tokenizer
    except Exception as error:  # missing, unknown or broken files, each with its own exception
        reason = " ".join(str(error).split())[:200]
        raise ModelError(
            f"{folder} holds no usable tokenizer ({reason}): add its tokenizer.json, or name "
            f"another model with tokenizer"
        ) from None
    special = {n: t for n in SPECIAL_NAMES if isinstance(t := getattr(theirs, n, None), str)}
    return Tokenizer(backend, special, _template(theirs.chat_template))


def _from_gguf(file: GGUFFile) -> Tokenizer:
    prefix = "tokenizer.ggml."
    tokens = file.get(prefix + "tokens", list)
    if not tokens:
        raise ModelError(f"{file.path} holds no tokenizer: name another model with tokenizer")
    types = file.get(prefix + "token_type", np.ndarray, np.ones(len(tokens), int)).tolist()
    # Padding to a round vocabulary is no part of the tokenizer.
    while types and len(types) == len(tokens) and types[-1] == UNUSED:
        tokens, types = tokens[:-1], types[:-1]
    if len(types) != len(tokens) or len(set(tokens)) != len(tokens):
        raise ModelError(f"{file.path} has a broken vocabulary: fetch it again")
    model = file.get(prefix + "model", str)
    builders = {"gpt2": _byte_level_bpe, "llama": _sentencepiece_bpe}
    if model not in builders:
        raise ModelError(
            f"{file.path} has a tokenizer of kind {str(model)[:40]!r}, but only "
            f"{', '.join(builders)} can be restored: name another model with tokenizer"
        )
    ids = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    special = {}
    for name, key in ids.items():
        token = file.get(f"{prefix}{key}_token_id", int)
        if token is not None and 0 <= token < len(tokens):
            special[name] = tokens[token]
    try:
        backend = builders[model](file, {t: i for i, t in enumerate(tokens)}, special)
        # Declared in the order of their ids: all are in the vocabulary, so none gets a new id.
        backend.add_tokens(
            [
                AddedToken(token, special=kind != USER_DEFINED, normalized=False)
                for token, kind in zip(tokens, types, strict=True)
                if kind in (CONTROL, USER_DEFINED) and token
            ]
        )
        _add_bos(file, backend, special)
    except ModelError:
        raise
    except Exception as error:  # the library raises plain Exception
        reason = " ".join(str(error).split())[:200]
        raise ModelError(f"{file.path} has a broken tokenizer ({reason}): fetch it again") from None
    return Tokenizer(backend, special, _template(file.get("tokenizer.chat_template", str)))


def _byte_level_bpe(file: GGUFFile, vocab: dict[str, int], special: dict[str, str]) -> Backend:
    """GPT-2's kind: bytes as printable characters, merges in order, words cut by a named rule."""
    pre = file.get("tokenizer.ggml.pre", str)
    if pre not in PRE_TOKENIZERS:
        raise ModelError(
            f"{file.path} cuts words by the rule {str(pre)[:40]!r}, but only "
            f"{', '.join(PRE_TOKENIZERS)} are known: name another model with tokenizer"
        )
    merges = [tuple(merge.split(" ")) for merge in file.get("tokenizer.ggml.merges", list, [])]
    if any(len(m) != 2 or not {*m, m[0] + m[1]} <= vocab.keys() for m in merges):
        raise ModelError(f"{file.path} has merges of tokens that it does not have: fetch it again")
    backend = Backend(models.BPE(vocab, merges, ignore_merges=pre in BEGINS_WITH_BOS))
    rule = PRE_TOKENIZERS[pre]
    byte_level = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=rule in (None, "digits")
    )
    cut = [byte_level]
    if rule == "digits":
        cut = [pre_tokenizers.Digits(individual_digits=True), byte_level]
    elif rule is not None:
        cut = [pre_tokenizers.Split(Regex(rule), "isolated"), byte_level]
    backend.pre_tokenizer = pre_tokenizers.Sequence(cut)
    if pre in ("qwen2", "deepseek-r1-qwen"):
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece_bpe(file: GGUFFile, vocab: dict[str, int], special: dict[str, str]) -> Backend:
    """Llama 2's kind: words keep their space as a mark, unknown characters fall back to bytes.

    SentencePiece merges the pair whose union has the highest score, so the scores are the order of
    the merges.
    """
    scores = file.get("tokenizer.ggml.scores", np.ndarray)
    if scores is None or len(scores) < len(vocab):
        raise ModelError(f"{file.path} has a tokenizer without scores: fetch it again")
    splits = []
    for piece, token in vocab.items():
        for cut in range(1, len(piece)):
            left, right = vocab.get(piece[:cut]), vocab.get(piece[cut:])
            if left is not None and right is not None:
                splits.append((-float(scores[token]), left, right, piece[:cut], piece[cut:]))
    merges = [(left, right) for *_, left, right in sorted(splits)]
    unknown = special.get("unk_token")
    backend = Backend(
        models.BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    prefix = file.get("tokenizer.ggml.add_space_prefix", bool, True)
    marks = [normalizers.Replace(" ", "▁")]
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁")] * prefix + marks)
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(parts + [decoders.Strip(" ", 1, 0)] * prefix)
    return backend


def _add_bos(file: GGUFFile, backend: Backend, special: dict[str, str]) -> None:
    model, pre = file.metadata["tokenizer.ggml.model"], file.metadata.get("tokenizer.ggml.pre")
    default = model == "llama" or pre in BEGINS_WITH_BOS
    bos = special.get("bos_token")
    if file.get("tokenizer.ggml.add_bos_token", bool, default) and bos:
        backend.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", bos, "$B"],
            special_tokens=[(bos, backend.token_to_id(bos))],
        )  # fmt: skip
