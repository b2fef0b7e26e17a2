"""Incremental text equals text decoded at once, and stop strings never leak their start.

The oracle of the text is `tokenizer.decode` of all ids; that of stop strings looks at every end of
every prefix of the finished text.
"""

import ast
import functools
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

import minivllm.engine.detokenizer
from minivllm.engine.detokenizer import MAX_WAIT, WINDOW, Detokenizer, StopString, TextStream
from minivllm.models.hub import resolve_model
from minivllm.models.tokenizer import load_tokenizer
from minivllm.request import SamplingParams

MIXED = "lab 🧪 新しい naïve 👩‍🚀 ok"
SPACES = "x    y.  It ends.\n\n  - item"
CORPUS = [
    "All set. It is done; the end of the line, and the start of another line.",
    "x    y.  It ends.\n\n  - item one\n  - item two, naïve café, 新しい",
    "one two three four five six seven eight nine ten ## DONE ##",
] * 3
TEXTS = [
    MIXED,
    SPACES,
    " leading",
    "👩‍🚀" * 12,
    "a\ufffdb",
    "\ufffd" * 5 + "🧪",
    "e\u0301\n\t\x00",
]


@functools.cache
def byte_level() -> Tokenizer:
    """GPT-2 style: any character may lie across tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", "</s>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


@functools.cache
def sentence_piece() -> Tokenizer:
    """Llama-2 style: "▁" is a space, dropped at the start; unknown characters are bytes."""
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.normalizer = normalizers.Replace(" ", "▁")
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False)
    trained.train_from_iterator(CORPUS, trainer)
    state = ast.literal_eval(
        trained.to_str().replace("null", "None").replace("true", "True").replace("false", "False")
    )
    merges = [tuple(merge) for merge in state["model"]["merges"]]
    tokenizer = Tokenizer(
        models.BPE(state["model"]["vocab"], merges, unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


TOKENIZERS = [byte_level, sentence_piece]


@functools.cache
def smollm2() -> Tokenizer:
    return load_tokenizer(resolve_model("smollm2")).backend


def pieces(strings: Sequence[str]) -> tuple[Tokenizer, list[int]]:
    """A tokenizer whose tokens are these strings, and the ids that spell them in order."""
    vocab = {string: i for i, string in enumerate(dict.fromkeys(strings))}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=strings[0]))
    tokenizer.decoder = decoders.Fuse()
    return tokenizer, [vocab[string] for string in strings]


def stream(
    tokenizer: Tokenizer, ids: Sequence[int], prompt: Sequence[int] = (), **params: object
) -> tuple[list[str], Detokenizer]:
    """The delta of each token, and last that of the end."""
    detokenizer = Detokenizer(tokenizer, SamplingParams(**params), prompt)
    deltas = [detokenizer.append([token_id]) for token_id in ids]
    deltas.append(detokenizer.append([], finished=True))
    assert detokenizer.text == "".join(deltas)
    return deltas, detokenizer


def output_part(tokenizer: Tokenizer, prompt: Sequence[int], ids: Sequence[int]) -> str:
    """What the ids add to the text of the prompt, decoded at once."""
    before = tokenizer.decode(list(prompt))
    whole = tokenizer.decode([*prompt, *ids])
    assert whole.startswith(before)
    return whole[len(before) :]


# --- text ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", TOKENIZERS)
def test_characters_across_tokens_in_three_requests_at_once(make) -> None:  # OUT-1
    tokenizer = make()
    ids = tokenizer.encode(MIXED).ids
    running = {offset: (Detokenizer(tokenizer, SamplingParams(), ()), []) for offset in (0, 3, 7)}
    for step in range(len(ids) + 7):
        for offset, (detokenizer, deltas) in running.items():
            if 0 <= step - offset < len(ids):
                deltas.append(detokenizer.append([ids[step - offset]]))
    for detokenizer, deltas in running.values():
        assert not any("\ufffd" in delta for delta in deltas)
        assert "" in deltas, "no character lay across tokens: the test shows nothing"
        assert detokenizer.append([], finished=True) == ""
        assert "".join(deltas) == tokenizer.decode(ids) == MIXED


@pytest.mark.parametrize("make", TOKENIZERS)
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("prompt", ["", "Hi", "Say x:", "🧪"])
def test_spaces_and_the_place_after_the_prompt(make, text, prompt) -> None:  # OUT-4
    tokenizer = make()
    prompt_ids = tokenizer.encode(prompt).ids
    ids = tokenizer.encode(text).ids
    deltas, _ = stream(tokenizer, ids, prompt_ids)
    assert "".join(deltas) == output_part(tokenizer, prompt_ids, ids)


def test_first_output_token_keeps_the_space_it_brings() -> None:
    """Decoded alone, "▁It" is "It": the sentence would be glued to the prompt."""
    tokenizer = sentence_piece()
    ids = tokenizer.encode("It ends.").ids
    assert stream(tokenizer, ids, tokenizer.encode("x.").ids)[1].text == " It ends."
    assert stream(tokenizer, ids)[1].text == "It ends."
    # A lone "▁" has no text at the start, but the next space is then one to be shown.
    assert stream(tokenizer, [tokenizer.token_to_id("▁"), *ids])[1].text == " It ends."
    # Special tokens have no text: the prompt's end must reach back to one that has.
    end = tokenizer.token_to_id("</s>")
    assert stream(tokenizer, ids, [*tokenizer.encode("x.").ids, *[end] * 20])[1].text == " It ends."


@pytest.mark.parametrize("cut", range(1, 4))
def test_output_that_ends_inside_a_character_loses_nothing(cut) -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("ok 🧪").ids[:-cut]
    deltas, _ = stream(tokenizer, ids)
    assert "".join(deltas[:-1]) == "ok "
    assert "".join(deltas) == tokenizer.decode(ids) == "ok \ufffd"


def test_broken_bytes_beside_whole_characters_in_byte_fallback() -> None:
    """Decoding at once would turn the whole run into U+FFFD; what was shown already stays."""
    tokenizer = sentence_piece()
    ids = tokenizer.encode("🧪🧪").ids
    assert stream(tokenizer, ids[:-1])[1].text == "🧪" + "\ufffd" * 3
    after = [*ids[:-1], *tokenizer.encode("ok").ids]
    assert stream(tokenizer, after)[1].text == "🧪" + "\ufffd" * 3 + " ok"


def test_prompt_that_ends_inside_a_character() -> None:
    """The rest of the character cannot become one; the prompt's text never shows up."""
    tokenizer = byte_level()
    ids = tokenizer.encode("ok 🧪 done").ids
    inside = next(i for i in range(len(ids)) if tokenizer.decode(ids[:i]).endswith("\ufffd"))
    text = stream(tokenizer, ids[inside:], ids[:inside])[1].text
    assert text == "\ufffd done"


@pytest.mark.parametrize("make", TOKENIZERS)
def test_special_tokens_are_shown_only_when_asked_for(make) -> None:
    tokenizer = make()
    end = tokenizer.token_to_id("</s>")
    ids = [end, *tokenizer.encode("It is").ids, end, *tokenizer.encode("done").ids]
    for skip in (True, False):
        deltas, _ = stream(tokenizer, ids, tokenizer.encode("x").ids, skip_special_tokens=skip)
        assert ("</s>" in "".join(deltas)) is not skip
        prompt = tokenizer.encode("x").ids
        whole = tokenizer.decode([*prompt, *ids], skip_special_tokens=skip)
        assert "x" + "".join(deltas) == whole


@pytest.mark.parametrize("make", TOKENIZERS)
def test_work_per_token_does_not_grow(make) -> None:
    """However long, and whatever comes: text, a skipped token, a flood of broken bytes."""
    tokenizer = make()
    byte = tokenizer.encode("🧪").ids[-1]
    floods = (
        tokenizer.encode(SPACES).ids * 20,
        [tokenizer.token_to_id("</s>")] * 300,
        [byte] * 300,
    )
    for ids in floods:
        for prompt in ((), tokenizer.encode(SPACES).ids * 10):
            longest = 0

            class Counting:
                def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
                    nonlocal longest
                    longest = max(longest, len(ids))
                    return tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

            text = TextStream(Counting(), prompt, skip_special_tokens=True)
            shown = "".join(map(text.push, ids)) + text.flush()
            assert shown == output_part(tokenizer, prompt, ids)
            assert longest <= 2 * WINDOW + MAX_WAIT


def check_stream(tokenizer: Tokenizer, prompt: str, ids: list[int]) -> None:
    prompt_ids = tokenizer.encode(prompt, add_special_tokens=False).ids
    deltas, _ = stream(tokenizer, ids, prompt_ids)
    expected = output_part(tokenizer, prompt_ids, ids)
    assert "".join(deltas) == expected
    if "\ufffd" not in expected:
        assert not any("\ufffd" in delta for delta in deltas)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(TOKENIZERS), st.text(max_size=12), st.text(max_size=60))
def test_any_text_round_trips(make, prompt, text) -> None:
    check_stream(make(), prompt, make().encode(text, add_special_tokens=False).ids)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=12), st.lists(st.integers(0, 399), max_size=60))
def test_any_token_ids_round_trip(prompt, ids) -> None:
    """Random ids are mostly broken UTF-8."""
    check_stream(byte_level(), prompt, ids)


@pytest.mark.weights
@settings(max_examples=100, deadline=None)
@given(st.text(max_size=12), st.text(max_size=60), st.lists(st.integers(0, 49151), max_size=30))
@example("", MIXED, [])
@example("", SPACES, [])
def test_any_text_round_trips_in_the_real_tokenizer(prompt, text, ids) -> None:
    check_stream(smollm2(), prompt, smollm2().encode(text, add_special_tokens=False).ids)
    check_stream(smollm2(), prompt, ids)


# --- stop strings -------------------------------------------------------------------------------


def first_stop(text: str, stops: Sequence[str]) -> tuple[str | None, int]:
    """The stop string that is complete first (of several the longest), and where it ends."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return max(found, key=len), end
    return None, len(text)


def could_still_match(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of the text that begins a stop string without being one."""
    return max(
        n
        for n in range(len(text) + 1)
        if n == 0 or any(len(s) > n and s.startswith(text[-n:]) for s in stops)
    )


@pytest.mark.parametrize(
    ("script", "deltas", "stopped_by"),
    [
        (
            ["All set", ". ", "##", "DO", "NE", "##", " junk"],
            ["All set", ". ", "", "", "", "", "", ""],
            "##DONE##",
        ),
        (["a ", "##", "DO", "G"], ["a ", "", "", "##DOG", ""], None),
        (["a ", "##"], ["a ", "", "##"], None),
    ],
)
def test_stop_string_over_several_tokens_does_not_leak(script, deltas, stopped_by) -> None:  # OUT-2
    tokenizer, ids = pieces(script)
    got, detokenizer = stream(tokenizer, ids, stop=["##DONE##"])
    assert got == deltas
    assert detokenizer.stopped_by == stopped_by
    at_once = Detokenizer(tokenizer, SamplingParams(stop=["##DONE##"]), ())
    assert at_once.append(ids, finished=True) == "".join(deltas)
    assert (at_once.stopped_by, at_once.num_tokens) == (stopped_by, detokenizer.num_tokens)


def test_text_grows_by_prefixes_and_the_stop_token_is_not_shown() -> None:  # OUT-3 (a)
    tokenizer, ids = pieces(["A", "B", "C", "S"])
    detokenizer = Detokenizer(tokenizer, SamplingParams(stop_token_ids=[ids[3]]), ())
    texts = []
    for token_id in ids[:3]:
        detokenizer.append([token_id])
        texts.append(detokenizer.text)
    detokenizer.append([], finished=True)  # what ended it is not passed
    assert [*texts, detokenizer.text] == ["A", "AB", "ABC", "ABC"]


@pytest.mark.parametrize(("include", "text"), [(False, "one"), (True, "one;")])
def test_include_stop_str_in_output(include, text) -> None:  # OUT-3 (b)
    tokenizer, ids = pieces(["one", ";", "two"])
    deltas, detokenizer = stream(tokenizer, ids, stop=[";"], include_stop_str_in_output=include)
    assert "".join(deltas) == detokenizer.text == text
    assert (detokenizer.stopped_by, detokenizer.num_tokens) == (";", 2)


def test_the_first_to_be_complete_wins_and_then_the_longest() -> None:
    tokenizer, ids = pieces(["xabcd", "e"])
    assert stream(tokenizer, ids, stop=["abcd", "bc"])[1].stopped_by == "bc"
    assert stream(tokenizer, ids, stop=["cd", "bcd", "d"])[1].stopped_by == "bcd"
    assert stream(tokenizer, ids, stop=["e", "abcde"])[1].text == "x"


def test_no_stop_within_min_tokens() -> None:
    tokenizer, ids = pieces(["a", ";", "b", ";", "c"])
    assert stream(tokenizer, ids, stop=";", min_tokens=1)[1].text == "a"
    assert stream(tokenizer, ids, stop=";", min_tokens=2)[1].text == "a;b"
    assert stream(tokenizer, ids, stop=";", min_tokens=4)[1].text == "a;b;c"
    # Begun within, complete after: counts. A match inside what is held does not count later.
    assert stream(tokenizer, ids, stop=";b", min_tokens=2)[1].text == "a"
    assert stream(tokenizer, ids, stop=[";", ";b;x"], min_tokens=2)[1].text == "a;b"


def test_nothing_is_taken_in_after_the_stop() -> None:
    tokenizer, ids = pieces(["a", ";", "b"])
    detokenizer = Detokenizer(tokenizer, SamplingParams(stop=";"), ())
    assert detokenizer.append(ids) == "a"
    assert detokenizer.append(ids) == detokenizer.append([], finished=True) == ""
    assert (detokenizer.text, detokenizer.num_tokens) == ("a", 2)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.text("ab", min_size=1, max_size=3), min_size=1, max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=4),
    st.booleans(),
    st.integers(0, 4),
)
def test_stop_strings_over_two_letters(script, stops, include, min_tokens) -> None:
    """Two letters: everything overlaps everything. Each delta is as long as it may be."""
    tokenizer, ids = pieces(script)
    detokenizer = Detokenizer(
        tokenizer,
        SamplingParams(stop=stops, include_stop_str_in_output=include, min_tokens=min_tokens),
        (),
    )
    free = len("".join(script[:min_tokens]))  # matches that end here do not count
    seen = ""
    for token_id, piece in zip(ids, script, strict=True):
        detokenizer.append([token_id])
        seen += piece
        ends = (n for n in range(free + 1, len(seen) + 1) if seen[:n].endswith(tuple(stops)))
        end = next(ends, None)
        if end is not None:
            stop = max((s for s in stops if seen[:end].endswith(s)), key=len)
            assert detokenizer.stopped_by == stop
            assert detokenizer.text == seen[: end if include else end - len(stop)]
            return
        assert detokenizer.text == seen[: len(seen) - could_still_match(seen, stops)]
    detokenizer.append([], finished=True)
    assert (detokenizer.text, detokenizer.stopped_by) == (seen, None)


def check_stops(tokenizer: Tokenizer, text: str, data: random.Random) -> None:
    """Stop strings cut out of the text itself, and some that only nearly occur."""
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    whole = tokenizer.decode(ids)
    stops = []
    for _ in range(data.randint(1, 3)):
        start = data.randrange(len(whole)) if whole else 0
        stops.append(whole[start : start + data.randint(1, 8)] + data.choice(["", "", "!"]) or "?")
    stop, end = first_stop(whole, stops)
    for include in (False, True):
        deltas, detokenizer = stream(tokenizer, ids, stop=stops, include_stop_str_in_output=include)
        assert detokenizer.stopped_by == stop
        assert "".join(deltas) == whole[: end if include or stop is None else end - len(stop)]


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(TOKENIZERS), st.text(max_size=60), st.randoms(use_true_random=False))
def test_stop_strings_in_any_text(make, text, data) -> None:
    check_stops(make(), text, data)


@pytest.mark.weights
@settings(max_examples=100, deadline=None)
@given(st.text(max_size=60), st.randoms(use_true_random=False))
def test_stop_strings_in_any_text_in_the_real_tokenizer(text, data) -> None:
    check_stops(smollm2(), text, data)


def test_stop_string_is_linear_in_the_text() -> None:
    """A long stop string that nearly matches everywhere costs a few looks a character."""
    stop = StopString("a" * 500 + "b")
    looks = 0

    class Counting(str):
        def __getitem__(self, index):
            nonlocal looks
            looks += 1
            return str.__getitem__(self, index)

    stop.string = Counting(stop.string)
    assert not any(stop.push(char) for char in "a" * 5000)
    assert stop.push("b")
    assert looks <= 3 * 5001


def test_no_torch_here() -> None:
    source = Path(minivllm.engine.detokenizer.__file__).read_text(encoding="utf-8")
    names = {
        alias.name.split(".")[0]
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    names |= {
        node.module.split(".")[0]
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and node.module
    }
    assert not names & {"torch", "numpy", "transformers"}
