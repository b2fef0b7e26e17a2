"""Token ids become text, one token at a time; stop strings are found on the way. Knows no tensors.

Two stages, each of them keeping back only what may still change:

```
 ids ──> text that no further token can change ──> and that no stop string can swallow ──> delta
         (held: an unfinished character)           (held: the start of a stop string)
```

A token has no text of its own: bytes of one character lie in several tokens, and a leading space
depends on what stands before. So a few newest tokens, the prompt's at first, are decoded together
with each new one, and what was there before is taken off.

Mirrors vllm/v1/engine/detokenizer.py. Chapter 11 reads this file.
"""

from collections.abc import Sequence

from tokenizers import Tokenizer

from minivllm.request import SamplingParams

REPLACEMENT = "\ufffd"  # what decoding makes of bytes that are no character (yet)
MAX_UNFINISHED = 3  # replacement characters that an unfinished UTF-8 character can show as
MAX_WAIT = 24  # tokens; what is still broken after so many is broken for good
WINDOW = 8  # tokens of context; a character spans 4 at most


class TextStream:
    """Incremental decoding: the pieces from `push`, then `flush`, join to the text of all ids.

    ```
     ids   [ context ........ | newest ]
     text  "what was pushed, what is held"
                            ^ num_sent
    ```

    The one exception to "as if decoded at once": of neighbouring byte-fallback tokens tokenizers
    turns all to U+FFFD if one character among them is broken; here only the broken one is.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        *,
        skip_special_tokens: bool,
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        # The shortest end of the prompt that has a text: then its start is no leading space.
        num_ids = WINDOW
        while True:
            self._ids = list(prompt_token_ids[-num_ids:])
            self._text = self._decode(self._ids)
            whole = self._text and REPLACEMENT not in self._text
            if whole or num_ids >= len(prompt_token_ids):
                break
            num_ids *= 2
        self._num_sent = len(self._text)
        self._num_clean = len(self._ids)  # ids at the front whose text is sent in full

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip_special_tokens)

    def push(self, token_id: int) -> str:
        """Take one token; return the text that is certain now, often its own, sometimes none."""
        self._ids.append(token_id)
        text = self._decode(self._ids)
        if text == self._text and text and not self._decode([token_id]):
            self._ids.pop()  # a special token that is skipped
            return ""
        if not text.startswith(self._text[: self._num_sent]):
            self._ids, self._num_sent = self._ids[self._num_clean :], 0
            self._num_clean = 0
            text = self._decode(self._ids)
        num_held = len(text) - len(text.rstrip(REPLACEMENT))
        if len(self._ids) - self._num_clean > MAX_WAIT:
            num_held = min(num_held, MAX_UNFINISHED)
        num_certain = max(self._num_sent, len(text) - num_held)
        delta = text[self._num_sent : num_certain]
        self._text, self._num_sent = text, num_certain
        if num_certain == len(text):
            self._num_clean = len(self._ids)
        if len(self._ids) >= 2 * WINDOW and num_held <= MAX_UNFINISHED:
            self._trim()
        return delta

    def push_all(self, token_ids: Sequence[int]) -> str:
        """Take several tokens with one decoding; the text is that of one by one."""
        self._ids += token_ids[:-1]
        return self.push(token_ids[-1]) if token_ids else ""

    def flush(self) -> str:
        """The end: return what was held, an unfinished character as U+FFFD."""
        delta = self._text[self._num_sent :]
        self._num_sent, self._num_clean = len(self._text), len(self._ids)
        return delta

    def _trim(self) -> None:
        """Forget the oldest ids, up to where the rest decodes to the same text without them."""
        num_held = len(self._text) - self._num_sent
        for start in range(len(self._ids) - WINDOW, len(self._ids) - 2 * WINDOW, -1):
            text = self._decode(self._ids[start:])
            if self._text.endswith(text) and (len(text) > num_held or not self._text):
                del self._ids[:start]
                self._text, self._num_sent = text, len(text) - num_held
                self._num_clean = max(0, self._num_clean - start)
                return


class StopString:
    """Looks for one string in a text that comes in pieces (Knuth, Morris and Pratt 1977).

    `num_matched` is the length of the longest end of the text so far that begins the string.
    """

    def __init__(self, string: str) -> None:
        self.string = string
        self.num_matched = 0
        # fallback[i]: the longest proper end of string[: i + 1] that also begins the string.
        self._fallback = [0]
        for char in string[1:]:
            self._fallback.append(self._next(self._fallback[-1], char))

    def _next(self, num_matched: int, char: str) -> int:
        while num_matched and self.string[num_matched] != char:
            num_matched = self._fallback[num_matched - 1]
        return num_matched + (self.string[num_matched] == char)

    def push(self, char: str) -> bool:
        """Take one character; return whether the string ends with it."""
        self.num_matched = self._next(self.num_matched, char)
        if self.num_matched < len(self.string):
            return False
        self.num_matched = self._fallback[-1]
        return True


class Detokenizer:
    """The text of one continuation, cut at its first stop string.

    The first stop string to be complete wins, and of those that end together the longest. Matches
    that are complete within the first `min_tokens` tokens do not count.

    Args:
        tokenizer: the backend of the model's tokenizer.
        params: stop, include_stop_str_in_output, min_tokens and skip_special_tokens are read.
        prompt_token_ids: what stands before the text; decides on a leading space.
    """

    def __init__(
        self, tokenizer: Tokenizer, params: SamplingParams, prompt_token_ids: Sequence[int]
    ) -> None:
        self._stream = TextStream(
            tokenizer, prompt_token_ids, skip_special_tokens=params.skip_special_tokens
        )
        self._stops = [StopString(string) for string in params.stop_strings]
        self._min_tokens = params.min_tokens
        self._include_stop = params.include_stop_str_in_output
        self._held = ""  # could become a stop string
        self._pieces: list[str] = []
        self.num_tokens = 0  # tokens taken in, the one that completed a stop string included
        self.stopped_by: str | None = None

    @property
    def text(self) -> str:
        """All text given out so far."""
        self._pieces = ["".join(self._pieces)]
        return self._pieces[0]

    def append(self, token_ids: Sequence[int], *, finished: bool = False) -> str:
        """Take new tokens; return the text to show for them. Ends at the first stop string.

        A stop token that ended the request is not to be shown, so do not pass it (except with
        `include_stop_str_in_output`). With `finished` everything that was held is given out.
        """
        deltas = []
        if not self._stops:
            self.num_tokens += len(token_ids)
            deltas.append(self._stream.push_all(token_ids))
        else:
            for token_id in token_ids:
                if self.stopped_by is not None:
                    break
                self.num_tokens += 1
                deltas.append(self._cut(self._stream.push(token_id)))
        if finished and self.stopped_by is None:
            deltas += self._cut(self._stream.flush()), self._held
            self._held = ""
        delta = "".join(deltas)
        self._pieces.append(delta)
        return delta

    def _cut(self, new: str) -> str:
        """Let through what can no longer belong to a stop string."""
        if not self._stops:
            return new
        text = self._held + new
        for end, char in enumerate(new, start=len(self._held) + 1):
            found = [stop.string for stop in self._stops if stop.push(char)]
            if found and self.num_tokens > self._min_tokens:
                self.stopped_by, self._held = max(found, key=len), ""
                return text[: end if self._include_stop else end - len(self.stopped_by)]
        num_certain = len(text) - max(stop.num_matched for stop in self._stops)
        self._held = text[num_certain:]
        return text[:num_certain]
