"""Tokenizers from folders and GGUFs, and chat templates in their sandbox.

The ids of the default model are llama.cpp's. Covers CASES TOK-1 (one BOS), TOK-2 (templates and odd
messages), STP-1 (the tokenizer's eos), OUT-4 (round trips) and the tokenizer half of QNT-2.
"""

import functools
import json
import random
import time

import pytest
from model_files import write_gguf
from test_decoder import hf_model
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.normalizers import NFC
from tokenizers.processors import TemplateProcessing

from minivllm.base import ModelError, UserError
from minivllm.models.chat_template import MAX_CHARACTERS, ChatTemplate, check_messages
from minivllm.models.hub import ModelFiles, resolve_model
from minivllm.models.tokenizer import load_tokenizer

LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_WORDS = LLAMA3_WORDS.replace("{1,3}", "")
CHATML = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXTS = [
    "x  5", "a\n\n2. b", "The year 2024, 1,234.5!", "it's WE'LL  they'd", "naïve café ñandú",
    "e\u0301 decomposed", "新しい 日本語", "👩‍🚀 lab 🧪", "\t tabs\r\n\r\n", " leading", "end  ",
    "<|im_end|>", "a<|im_start|>b <tool> c", "", " ", "\0nul", "مرحبا ١٢٣",
]  # fmt: skip
USER = [{"role": "user", "content": "hi"}]


def files_at(path) -> ModelFiles:
    return ModelFiles("test", "gguf" if path.suffix else "dummy", path, path)


def random_texts(count: int) -> list[str]:
    generator = random.Random(7)
    letters = "ab cde  \n\t12345éñ新しい🧪👩‍🚀.,!?'sl\r<|im_end|>\u0301 "
    return ["".join(generator.choices(letters, k=generator.randrange(50))) for _ in range(count)]


@functools.cache
def trained_model() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Trained without a word rule, so that merges across words exist and the rule decides."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(random_texts(300) + TEXTS * 9, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], [tuple(merge) for merge in model["merges"]]


def hf_tokenizer(pre: str) -> Tokenizer:
    """A small byte-level BPE tokenizer as a hub repository has it, with the named word rule."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    words = {
        "gpt-2": gpt2,
        "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2]),
        "qwen2": pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(QWEN2_WORDS), "isolated"), byte_level]
        ),
        "llama-bpe": pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(LLAMA3_WORDS), "isolated"), byte_level]
        ),
    }
    tokenizer = Tokenizer(models.BPE(ignore_merges=pre == "llama-bpe"))
    tokenizer.pre_tokenizer, tokenizer.decoder = words[pre], decoders.ByteLevel()
    if pre == "qwen2":
        tokenizer.normalizer = NFC()
    vocab, merges = trained_model()
    tokenizer.model = models.BPE(vocab, merges, ignore_merges=pre == "llama-bpe")
    tokenizer.add_special_tokens(["<bos>", "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    return tokenizer


def gguf_keys(tokenizer: Tokenizer, pre: str, **more) -> dict:
    """The keys that an exporter writes for a byte-level BPE tokenizer."""
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    added = tokenizer.get_added_tokens_decoder()
    size = len(vocab)
    kinds = [(3 if added[i].special else 4) if i in added else 1 for i in range(size)]
    model = json.loads(tokenizer.to_str())["model"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": sorted(vocab, key=vocab.get),
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.bos_token_id": vocab["<bos>"],
        "tokenizer.ggml.eos_token_id": vocab["<|im_end|>"],
        **{f"tokenizer.{name}": value for name, value in more.items()},
    }


def save_gguf(path, keys):
    return write_gguf(path, hf_model("llama"), metadata=keys)


def save_folder(folder, tokenizer, **config):
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def smollm2():
    return load_tokenizer(resolve_model("smollm2"))


@pytest.mark.weights
class TestDefaultModel:
    def test_digits_are_split(self, smollm2):
        """The rule that the naive rebuild loses: it gives [104, 216, 216, 37] here."""
        assert smollm2.encode("x  5") == [104, 256, 37]
        assert 1116 in smollm2.encode("a\n\n2. b")
        assert smollm2.encode("2024") == [smollm2.encode(d)[0] for d in "2024"]

    def test_vocabulary(self, smollm2):
        assert (smollm2.vocab_size, smollm2.bos_token_id, smollm2.eos_token_ids) == (49152, 1, (2,))
        assert smollm2.all_special_ids == frozenset(range(17))
        assert smollm2.encode("<|im_end|>") == [2]
        assert smollm2.decode([2, 504]) == smollm2.decode([504])
        assert smollm2.decode([2, 504], skip_special_tokens=False).startswith("<|im_end|>")

    def test_chat(self, smollm2):
        """37 tokens for this question (measured with transformers)."""
        prompt = smollm2.apply_chat_template(
            [{"role": "user", "content": "What is the capital of France?"}]
        )
        assert prompt.endswith("<|im_start|>assistant\n") and "SmolLM" in prompt
        assert len(smollm2.encode(prompt, add_special_tokens=False)) == 37

    def test_round_trip(self, smollm2):
        for text in TEXTS + random_texts(200):
            ids = smollm2.encode(text)
            assert smollm2.decode(ids, skip_special_tokens=False) == text


class TestGGUF:
    @pytest.mark.parametrize("pre", ["gpt-2", "smollm", "qwen2", "llama-bpe"])
    def test_same_ids_as_the_original(self, pre, tmp_path):
        """QNT-2: words are cut by the named rule, added tokens keep their ids and kinds."""
        original = hf_tokenizer(pre)
        keys = gguf_keys(original, pre) | {"tokenizer.ggml.add_bos_token": False}
        ours = load_tokenizer(files_at(save_gguf(tmp_path / "m.gguf", keys)))
        assert ours.vocab_size == original.get_vocab_size()
        special = {i for i, t in original.get_added_tokens_decoder().items() if t.special}
        assert ours.all_special_ids == special
        for text in TEXTS + random_texts(200):
            ids = original.encode(text).ids
            assert ours.encode(text) == ids
            for skip in (False, True):
                assert ours.decode(ids, skip) == original.decode(ids, skip_special_tokens=skip)

    def test_the_rules_differ(self, tmp_path):
        """Otherwise the test above would hold with any rule."""
        ids = {
            pre: [tuple(hf_tokenizer(pre).encode(text).ids) for text in TEXTS]
            for pre in ("gpt-2", "smollm", "qwen2", "llama-bpe")
        }
        assert len({tuple(value) for value in ids.values()}) == 4

    def test_padded_vocabulary(self, tmp_path):
        """UNUSED tokens at the end are padding: ids that no text has and no model may sample."""
        original = hf_tokenizer("smollm")
        keys = gguf_keys(original, "smollm")
        keys["tokenizer.ggml.tokens"] += ["[PAD1]", "[PAD2]"]
        keys["tokenizer.ggml.token_type"] += [5, 5]
        ours = load_tokenizer(files_at(save_gguf(tmp_path / "m.gguf", keys)))
        assert ours.vocab_size == original.get_vocab_size()

    @pytest.mark.parametrize(
        "change, part",
        [
            ({"ggml.pre": "tekken"}, "by the rule 'tekken'"),
            ({"ggml.model": "bert"}, "of kind 'bert'"),
            ({"ggml.merges": ["a zzz"]}, "merges of tokens that it does not have"),
            ({"ggml.merges": ["ab"]}, "merges of tokens that it does not have"),
            ({"ggml.token_type": [1, 1]}, "broken vocabulary"),
            ({"ggml.tokens": ["a", "a"], "ggml.token_type": [1, 1]}, "broken vocabulary"),
            ({"ggml.tokens": 3}, "is a int"),
        ],
    )
    def test_refusals(self, change, part, tmp_path):
        """Never a tokenizer that is nearly right."""
        keys = gguf_keys(hf_tokenizer("smollm"), "smollm", **change)
        with pytest.raises(ModelError) as caught:
            load_tokenizer(files_at(save_gguf(tmp_path / "m.gguf", keys)))
        assert part in str(caught.value)

    def test_without_a_tokenizer(self, tmp_path):
        with pytest.raises(ModelError, match="holds no tokenizer: name another"):
            load_tokenizer(files_at(save_gguf(tmp_path / "m.gguf", {})))


class TestSentencePiece:
    """Llama 2's kind of GGUF tokenizer, against the algorithm written down plainly."""

    PIECES = ("▁", "a", "b", "c", "x", "y", ".", "▁a", "ab", "▁ab", "bc", "abc", "▁▁", "▁x", "xy")

    @pytest.fixture
    def tokenizer(self, tmp_path):
        tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *self.PIECES]
        scores = [0.0] * 259 + [
            -float(i) for i in (20, 21, 22, 23, 24, 25, 26, 3, 5, 1, 2, 4, 6, 8, 7)
        ]
        keys = {
            "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.scores": scores,
            "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(self.PIECES),
            "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.ggml.unknown_token_id": 0,
        }  # fmt: skip
        self.scores = dict(zip(tokens, scores, strict=True))
        self.ids = {token: i for i, token in enumerate(tokens)}
        return load_tokenizer(files_at(save_gguf(tmp_path / "m.gguf", keys)))

    def plain(self, text: str) -> list[int]:
        """Join the neighbours whose union scores highest, leftmost first, until none is known."""
        pieces = list(("▁" + text.replace(" ", "▁")) if text else "")
        while True:
            pairs = enumerate(zip(pieces, pieces[1:], strict=False))
            joined = [(-self.scores[a + b], i) for i, (a, b) in pairs if a + b in self.PIECES]
            if not joined:
                break
            i = min(joined)[1]
            pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]
        ids = []
        for piece in pieces:
            unknown = [self.ids[f"<0x{byte:02X}>"] for byte in piece.encode()]
            ids += [self.ids[piece]] if piece in self.ids else unknown
        return ids

    def test_ids_and_round_trip(self, tokenizer):
        """OUT-4: runs of blanks, leading blanks and unknown characters survive."""
        generator = random.Random(3)
        texts = ["".join(generator.choices("abcxy.  é新", k=12)) for _ in range(200)]
        for text in ["x    y.  ab\n\n  - abc", " abc", "", *texts]:
            assert tokenizer.encode(text) == [1, *self.plain(text)]
            assert tokenizer.decode(tokenizer.encode(text)) == text

    def test_needs_scores(self, tmp_path):
        keys = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": ["a"]}
        with pytest.raises(ModelError, match="without scores"):
            load_tokenizer(files_at(save_gguf(tmp_path / "m.gguf", keys)))


class TestFolder:
    def test_special_tokens_and_template(self, tmp_path):
        """STP-1: eos from tokenizer_config.json, as a string or as an object."""
        tokenizer = hf_tokenizer("qwen2")
        eos = {"__type": "AddedToken", "content": "<|im_end|>"}
        save_folder(tmp_path, tokenizer, eos_token=eos, bos_token="<bos>", chat_template="own")
        ours = load_tokenizer(files_at(tmp_path))
        assert ours.eos_token_ids == (tokenizer.token_to_id("<|im_end|>"),)
        assert ours.bos_token_id == tokenizer.token_to_id("<bos>")
        assert ours.apply_chat_template(USER) == "own"
        (tmp_path / "chat_template.jinja").write_text("file {{ messages[0].content }}")
        assert load_tokenizer(files_at(tmp_path)).apply_chat_template(USER) == "file hi"
        given = tmp_path / "mine.jinja"
        given.write_text("mine")
        files = files_at(tmp_path)
        assert load_tokenizer(files, str(given)).apply_chat_template(USER) == "mine"
        assert load_tokenizer(files, "{{ 1 + 1 }}").apply_chat_template(USER) == "2"
        with pytest.raises(UserError, match="neither a readable file nor a Jinja template"):
            load_tokenizer(files, "nowhere.jinja")
        with pytest.raises(UserError, match="no valid Jinja"):
            load_tokenizer(files, "{% if %}")

    def test_named_templates(self, tmp_path):
        templates = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
        save_folder(tmp_path, hf_tokenizer("gpt-2"), chat_template=templates)
        assert load_tokenizer(files_at(tmp_path)).apply_chat_template(USER) == "d"

    def test_broken_template_leaves_plain_prompts(self, tmp_path):
        save_folder(tmp_path, hf_tokenizer("gpt-2"), chat_template="{% for %}")
        ours = load_tokenizer(files_at(tmp_path))
        assert ours.encode("hi")
        with pytest.raises(UserError, match="no valid Jinja"):
            ours.apply_chat_template(USER)

    def test_no_tokenizer_json(self, tmp_path):
        """Older folders (vocab.json and merges.txt) go through transformers."""
        tokenizer = hf_tokenizer("gpt-2")
        tokenizer.model.save(str(tmp_path))
        (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
        (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
        ours = load_tokenizer(files_at(tmp_path))
        assert ours.encode("the year 2024") == tokenizer.encode("the year 2024").ids

    @pytest.mark.parametrize("content", ["", "{}", '{"version": "1.0", "model": {}}', None])
    def test_broken(self, content, tmp_path):
        if content is not None:
            (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(ModelError) as caught:
            load_tokenizer(files_at(tmp_path))
        assert "\n" not in str(caught.value)


class TestOneBOS:
    """TOK-1: a Llama-3-style tokenizer adds BOS, and so does its template."""

    @pytest.fixture(params=["gguf", "folder"])
    def tokenizer(self, request, tmp_path):
        original = hf_tokenizer("llama-bpe")
        if request.param == "gguf":
            keys = gguf_keys(original, "llama-bpe", chat_template=CHATML)
            return load_tokenizer(files_at(save_gguf(tmp_path / "m.gguf", keys)))
        bos = ("<bos>", original.token_to_id("<bos>"))
        original.post_processor = TemplateProcessing(["<bos>", "$A"], special_tokens=[bos])
        save_folder(tmp_path, original, bos_token="<bos>", chat_template=CHATML)
        return load_tokenizer(files_at(tmp_path))

    def test_everywhere(self, tokenizer):
        prompt = tokenizer.apply_chat_template(USER)
        chat = tokenizer.encode(prompt, add_special_tokens=False)
        assert prompt.startswith("<bos>") and chat.count(tokenizer.bos_token_id) == 1
        assert tokenizer.encode(prompt) == chat  # as a raw prompt: still one
        assert tokenizer.encode("hi")[0] == tokenizer.bos_token_id
        assert tokenizer.encode("hi").count(tokenizer.bos_token_id) == 1
        assert tokenizer.encode("") == [tokenizer.bos_token_id]


class TestMessages:
    """TOK-2: odd messages are one sentence each, never a template's traceback."""

    @pytest.mark.parametrize(
        "messages, part",
        [
            ([], "non-empty list"),
            ("hi", "non-empty list"),
            (None, "non-empty list"),
            (["hi"], "messages[0] must be a dictionary"),
            ([{"content": "hi"}], "'role' and 'content'"),
            ([{"role": "banana", "content": "hi"}], "role 'banana'"),
            ([{"role": [], "content": "hi"}], "role '[]'"),
            ([{"role": "user"}], "has no content"),
            ([{"role": "user", "content": 3}], "string or a list"),
            ([*USER, {"role": "user", "content": [{"type": "image_url"}]}], "messages[1].content"),
            ([{"role": "user", "content": [{"type": "text"}]}], "without a string 'text'"),
            ([{"role": "assistant", "tool_calls": "x"}], "list of dictionaries"),
            ([{"role": "assistant", "tool_calls": [{}]}], "function with a name"),
            ([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
             "not JSON"),
        ],
    )  # fmt: skip
    def test_refused(self, messages, part):
        with pytest.raises(UserError) as caught:
            check_messages(messages)
        assert part in str(caught.value)

    def test_accepted(self):
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        call = {"function": {"name": "f", "arguments": '{"x": 1}'}}
        given = [
            {"role": "system", "content": "s"}, {"role": "user", "content": parts},
            {"role": "system", "content": "again"}, {"role": "developer", "content": ""},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "1", "tool_call_id": "c"},
        ]  # fmt: skip
        before = json.dumps(given)
        checked = check_messages(given)
        assert [m["content"] for m in checked] == ["s", "a\nb", "again", "", "", "1"]
        assert checked[4]["tool_calls"][0]["function"]["arguments"] == {"x": 1}
        assert checked[5]["tool_call_id"] == "c" and json.dumps(given) == before

    def test_no_template(self, tmp_path):
        save_folder(tmp_path, hf_tokenizer("gpt-2"))
        with pytest.raises(UserError, match="--chat-template"):
            load_tokenizer(files_at(tmp_path)).apply_chat_template(USER)


class TestSandbox:
    def render(self, source: str, **variables) -> str:
        return ChatTemplate(source).render(USER, **variables)

    @pytest.mark.parametrize(
        "source",
        [
            CHATML,
            "{%- for m in messages %}\n    {%- if not loop.first %}\n|{% endif %}\n  {{ m.role }}\n"
            "{% endfor %}",
            "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
            "{% endfor %}{{ ns.n }}{{ tools | tojson }}{{ tools | tojson(indent=2) }}",
            "{% macro say(x) %}[{{ x|trim }}]{% endmacro %}{{ say(' a ') ~ '-' * 3 ~ 1 }}",
            "{% for i in range(9) %}{% if i == 2 %}{% continue %}{% endif %}{% if i > 4 %}"
            "{% break %}{% endif %}{{ i }}{% endfor %}{{ messages[0]['content'][:1] + 'x' }}"
            "{{ 7 % 3 }}{{ 2 ** 5 }}",
            "{{ 'a' if enable_thinking is defined and enable_thinking else 'b' }}{{ unknown }}",
            "{{ messages[0].content.split('h')[-1].strip() | upper }}{{ messages | length }}",
        ],
    )  # fmt: skip
    def test_as_transformers(self, source):
        from transformers.utils.chat_template_utils import render_jinja_template

        tools = [{"name": "f", "text": "<é & 'x'>"}]
        rendered, _ = render_jinja_template(
            conversations=[USER], tools=tools, chat_template=source, add_generation_prompt=True,
            bos_token="<bos>", enable_thinking=True,
        )  # fmt: skip
        ours = self.render(source, tools=tools, add_generation_prompt=True, bos_token="<bos>",
                           enable_thinking=True)  # fmt: skip
        assert ours == rendered[0]

    @pytest.mark.parametrize(
        "source, part",
        [
            ("{{ raise_exception('roles must\n alternate') }}", "roles must alternate"),
            ("{{ messages[0].content.x.y }}", "no attribute 'x'"),
            ("{{ 1 / 0 }}", "division by zero"),
            ("{{ messages.append(1) }}", "unsafe"),
            ("{{ ''.__class__.__mro__ }}", "unsafe"),
            ("{{ messages.__class__.__base__.__subclasses__() }}", "unsafe"),
            ("{{ raise_exception.__globals__[0] }}", "unsafe"),
            ("{{ self.__init__.__globals__ }}", "unsafe"),
            ("{% include 'x' %}", "no loader"),
            ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
            ("{{ 'x' * 10**9 }}", "grew beyond"),
            ("{{ 10 ** 10 ** 10 }}", "too large"),
            ("{% set n = namespace(s='x') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}"
             "{% endfor %}", "grew beyond"),
            ("{% set n = namespace(s='x') %}{% for i in range(60) %}{% set n.s = n.s + n.s %}"
             "{% endfor %}", "grew beyond"),
            ("{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}", "grew beyond"),
            ("{{ 'x' | center(10 ** 9) }}", "center"),
            ("{{ '%999999999d' % 1 }}", "not supported"),
            ("{{ tools | tojson(indent=10 ** 9) }}", "indents"),
            ("{% for i in range(10 ** 9) %}{% endfor %}", "too big"),
        ],
    )  # fmt: skip
    def test_refused(self, source, part):
        start = time.monotonic()
        with pytest.raises(UserError) as caught:
            self.render(source, tools=[1])
        message = str(caught.value)
        assert part in message and "\n" not in message and len(message) < 400
        assert time.monotonic() - start < 20

    @pytest.mark.parametrize(
        "source",
        [
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
            "{{ f(60) }}",
            "{% set tick = 1 %}{% set deadline = 10 ** 9 %}{% set context = 1 %}"
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        ],
    )  # fmt: skip
    def test_endless(self, source, monkeypatch):
        """Loops without output, recursion that branches, names that try to hide the clock."""
        monkeypatch.setattr("minivllm.models.chat_template.MAX_SECONDS", 0.2)
        with pytest.raises(UserError, match="ran longer than 0.2 seconds"):
            self.render(source)

    def test_limits_leave_room(self):
        """A long conversation is no attack."""
        long = [{"role": "user", "content": "x" * 1000}] * 2000
        assert MAX_CHARACTERS > len(ChatTemplate(CHATML).render(long)) > 2_000_000
