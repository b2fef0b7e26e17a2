"""The command `minivllm`: generate, chat, demo, bench, fetch, doctor.

Results go to stdout, everything else to stderr. Exit codes, for scripts:

    0    done
    1    it failed: the model cannot be used, a step failed, doctor found a problem
    2    the command line or the request is wrong: mend it
    130  interrupted (Ctrl-C); 141 nobody reads the output any more (`| head`)

Engine flags are the fields of `EngineConfig`, sampling flags those of `SamplingParams`, with vLLM's
names and dashes; a flag that is not given keeps the default of the library. What a command needs is
imported when it runs: help and wrong flags should not wait for torch. Mirrors vllm/entrypoints/cli.
"""

import argparse
import dataclasses
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import minivllm
from minivllm.base import ModelError, UserError, did_you_mean, format_seconds
from minivllm.config import DTYPE_BYTES, CacheConfig, EngineConfig, SchedulerConfig
from minivllm.request import RequestOutput, SamplingParams
from minivllm.trace import NullRecorder, Recorder, write_jsonl

if TYPE_CHECKING:
    from minivllm import LLM

logger = logging.getLogger("minivllm")

DEFAULT_MODEL = "smollm2"
DONE, FAILED, WRONG, INTERRUPTED, NO_READER = 0, 1, 2, 130, 141
CHAT_TEMPERATURE = 0.3  # at 1.0 a small model talks gibberish
GENERATE_MAX_TOKENS = 128  # a completion has no natural end, and the whole context takes minutes

ENGINE_HELP = {
    "tokenizer": "take the tokenizer from another model, named like --model",
    "dtype": "compute type; auto = float32 on a CPU, bfloat16 on a GPU that has it",
    "device": "auto, cpu or cuda",
    "seed": "of all random draws",
    "max_model_len": "longest prompt + output, in tokens; default: what the model was trained for",
    "load_format": "auto, safetensors, gguf or dummy (random weights)",
    "max_logprobs": "most log-probabilities a request may ask for",
    "revision": "branch, tag or commit of a hub repository",
    "download_dir": "folder for fetched models",
    "chat_template": "a file, or the Jinja template itself",
    "paranoid": "check every invariant after each step",
    "block_size": "tokens of one KV block",
    "gpu_memory_utilization": "share of the GPU's memory that the engine may use",
    "reserved_memory_ratio": "share of the GPU's memory kept free on top of that",
    "kv_cache_memory_bytes": "size of the KV cache, in place of measuring what is free",
    "num_gpu_blocks_override": "number of KV blocks, the null block included",
    "enable_prefix_caching": "share blocks between requests that begin alike",
    "max_num_seqs": "rows: requests in one step",
    "max_num_batched_tokens": "token budget of one step",
    "enable_chunked_prefill": "cut long prompts to what a step has left",
    "long_prefill_token_threshold": "longest chunk of one prompt in a step; 0 = the budget",
    "async_scheduling": "plan the next step while one runs; default: on a GPU",
    "cudagraph_capture_sizes": "comma-separated, ascending: rows of the steps kept as CUDA graphs",
    "enforce_eager": "no CUDA graphs",
    "scheduling_policy": "fcfs (first come, first served) or priority",
}
SAMPLING_HELP = {
    "n": "continuations of each prompt",
    "temperature": "0 = always the likeliest token",
    "top_p": "keep the likeliest tokens that together reach this probability",
    "top_k": "keep this many of the likeliest tokens; 0 = all",
    "min_p": "keep tokens at least this likely, relative to the likeliest",
    "presence_penalty": "subtracted from tokens already generated",
    "frequency_penalty": "subtracted once per occurrence in the output",
    "repetition_penalty": "divides tokens of prompt and output; 1 = off",
    "logit_bias": 'JSON, token id to number: {"42": -5}',
    "allowed_token_ids": "comma-separated: no other token may be chosen",
    "bad_words": "a text that must not appear; may be repeated",
    "max_tokens": "most tokens to generate",
    "min_tokens": "no end before this many",
    "ignore_eos": "go on after the end-of-sequence token",
    "stop": "a text that ends the output; may be repeated",
    "stop_token_ids": "comma-separated: tokens that end the output",
    "include_stop_str_in_output": "keep the stop text in the output",
    "logprobs": "log-probabilities of that many alternatives a token (with --json)",
    "prompt_logprobs": "the same for the prompt's tokens (with --json)",
    "skip_special_tokens": "leave special tokens out of the text",
}  # not `seed`: on the command line that is the engine's, from which all draws follow


class Parser(argparse.ArgumentParser):
    """argparse with one-sentence errors that name the nearest flag."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, **kwargs)

    def error(self, message: str) -> NoReturn:
        """Say it in one line and leave with exit code 2."""
        if wrong := re.match(r"argument COMMAND: invalid choice: '(.*?)'", message):
            message = f"unknown command {wrong[1]!r}{did_you_mean(wrong[1], COMMANDS)}"
        self.exit(WRONG, f"{self.prog}: {message} (see {self.prog} --help)\n")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _numbers(text: str) -> tuple[int, ...]:
    """`"1,2,3"` -> `(1, 2, 3)`."""
    return tuple(int(part) for part in text.split(","))


def _logit_bias(text: str) -> dict[int, float]:
    """`'{"42": -5}'` -> `{42: -5}`."""
    return {int(token_id): bias for token_id, bias in json.loads(text).items()}


# What argparse calls these in "invalid … value".
_numbers.__name__, _logit_bias.__name__ = "comma-separated list", "JSON object"


def _add_flags(
    parser: argparse.ArgumentParser, title: str, fields: Sequence[Any], helps: dict[str, str]
) -> None:
    """One flag a field of a config. A flag that is not given leaves no attribute behind."""
    group = parser.add_argument_group(title)
    for name, text in helps.items():
        kind = next(field.type for field in fields if field.name == name)
        options: dict[str, Any] = {"default": argparse.SUPPRESS, "help": text}
        if kind in (bool, bool | None):
            options["action"] = argparse.BooleanOptionalAction
        elif name in ("stop", "bad_words"):
            options |= {"action": "append", "metavar": "TEXT"}
        elif name in ("allowed_token_ids", "stop_token_ids", "cudagraph_capture_sizes"):
            options |= {"type": _numbers, "metavar": "N,N,…"}
        elif name == "logit_bias":
            options |= {"type": _logit_bias, "metavar": "JSON"}
        elif kind in (int, int | None):
            options |= {"type": int, "metavar": "N"}
        elif kind is float:
            options |= {"type": float, "metavar": "X"}
        else:
            options["metavar"] = "auto|" + "|".join(DTYPE_BYTES) if name == "dtype" else "TEXT"
        group.add_argument(_flag(name), **options)


def _engine_fields() -> list[Any]:
    kinds = (EngineConfig, CacheConfig, SchedulerConfig)
    return [field for kind in kinds for field in dataclasses.fields(kind)]


def _parser() -> tuple[Parser, dict[str, Parser]]:
    """The whole command line, and the parser of each command."""
    parser = Parser(prog="minivllm", description="A compact, complete LLM inference engine.")
    parser.add_argument("--version", action="version", version=f"minivllm {minivllm.__version__}")
    commands = parser.add_subparsers(
        dest="command", metavar="COMMAND", required=True, parser_class=Parser
    )
    parsers = {}
    for name, summary in (
        ("generate", "complete prompts, all at once"),
        ("chat", "talk to the model, or ask it one thing"),
        ("demo", "watch ten requests share a small KV cache"),
        ("bench", "how fast, and how fast could it be?"),
        ("fetch", "put a model on this machine"),
        ("doctor", "is this machine ready?"),
    ):
        parsers[name] = commands.add_parser(name, help=summary, description=summary)
    _add_generate(parsers["generate"])
    _add_chat(parsers["chat"])
    _add_demo(parsers["demo"])
    _add_bench(parsers["bench"])
    parsers["fetch"].add_argument(
        "model", nargs="?", default=DEFAULT_MODEL, help="smollm2 or a hub name owner/name"
    )
    parsers["fetch"].add_argument("--download-dir", metavar="DIR", help="folder to put it in")
    parsers["doctor"].add_argument("--json", action="store_true", help="findings as JSON")
    parsers["doctor"].add_argument("--download-dir", metavar="DIR", help="where models lie")
    return parser, parsers


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", default=DEFAULT_MODEL, metavar="MODEL",
        help="smollm2, a folder, a .gguf file or a hub name (default: smollm2)",
    )  # fmt: skip
    parser.add_argument("--trace", metavar="FILE", help="write every event as a line of JSON")
    parser.add_argument("--verbose", action="store_true", help="log the start-up to stderr")


def _add_generate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="text to continue")
    parser.add_argument("--stdin", action="store_true", help="read prompts from stdin, one a line")
    parser.add_argument("--json", action="store_true", help="one JSON object a prompt")
    _add_common(parser)
    helps = SAMPLING_HELP | {
        "max_tokens": f"{SAMPLING_HELP['max_tokens']} (default: {GENERATE_MAX_TOKENS})"
    }
    _add_flags(parser, "sampling", dataclasses.fields(SamplingParams), helps)
    _add_flags(parser, "engine", _engine_fields(), ENGINE_HELP)


def _add_chat(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("message", nargs="?", help="ask this and leave; without it, a conversation")
    parser.add_argument("--system", metavar="TEXT", help="the system prompt")
    _add_common(parser)
    # One answer at a time, as text: what asks for several or for numbers belongs to `generate`.
    helps = {
        k: v for k, v in SAMPLING_HELP.items() if k not in ("n", "logprobs", "prompt_logprobs")
    }
    helps["temperature"] += f" (default: {CHAT_TEMPERATURE})"
    _add_flags(parser, "sampling", dataclasses.fields(SamplingParams), helps)
    _add_flags(parser, "engine", _engine_fields(), ENGINE_HELP)


def _add_demo(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--plain", action="store_true", help="lines, even in a terminal")
    _add_common(parser)
    # Everything is drawn greedily here: a seed would change nothing.
    helps = {name: text for name, text in ENGINE_HELP.items() if name not in ("seed",)}
    _add_flags(parser, "engine", _engine_fields(), helps)


def _add_bench(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what", metavar="throughput|latency|startup|kernels|ladder", help="what to measure"
    )
    for name, options in {
        "--preset": {"nargs": "+", "metavar": "W", "dest": "presets",
                     "help": "throughput: W1 W3 W4 W5; latency: W2 W6; startup: W7"},
        "--model": {"metavar": "MODEL", "help": "qwen3-0.6b, qwen3-8b, tiny (random weights), "
                    "or as for generate; default: qwen3-0.6b on a GPU, tiny on a CPU"},
        "--engine": {"metavar": "NAME", "help": "minivllm, vllm or transformers"},
        "--repeats": {"type": int, "metavar": "N", "help": "measured runs, after one to warm up"},
        "--scale": {"type": float, "metavar": "X",
                    "help": "share of the workload's requests and lengths, for slow machines"},
        "--seconds": {"type": float, "metavar": "S", "help": "how long W6 sends requests"},
        "--plot": {"metavar": "FILE", "help": "draw the ladder as a PNG"},
    }.items():  # fmt: skip
        parser.add_argument(name, default=argparse.SUPPRESS, **options)  # type: ignore[arg-type]
    parser.add_argument("--verbose", action="store_true", help="log the start-up to stderr")
    _add_flags(parser, "engine", _engine_fields(), ENGINE_HELP)


def _given(arguments: argparse.Namespace, helps: dict[str, str]) -> dict[str, Any]:
    """The flags of a group that were really given."""
    return {name: getattr(arguments, name) for name in helps if hasattr(arguments, name)}


@contextmanager
def _recording(path: str | None) -> Iterator[Recorder | NullRecorder]:
    """A recorder whose events are in the file at the end, also when the run failed."""
    if path is None:
        yield NullRecorder()
        return
    recorder = Recorder()
    try:
        Path(path).touch()  # better to hear it now than after the run
    except OSError as error:
        raise UserError(f"cannot write the trace {path}: {error.strerror}") from None
    try:
        yield recorder
    finally:
        write_jsonl(path, recorder.events)


def _generate(arguments: argparse.Namespace) -> int:
    prompts = list(arguments.prompts)
    if arguments.stdin:
        prompts += [line.rstrip("\n") for line in sys.stdin if line.strip()]
    if not prompts:
        raise UserError("no prompt: give one or more, or --stdin to read one a line")
    sampling = {"max_tokens": GENERATE_MAX_TOKENS, **_given(arguments, SAMPLING_HELP)}
    for name in ("logprobs", "prompt_logprobs"):
        if name in sampling and not arguments.json:
            raise UserError(f"{_flag(name)} is shown with --json only: add it")
    params = SamplingParams(**sampling)
    with _recording(arguments.trace) as recorder, _llm(arguments, recorder) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=sys.stderr.isatty())
    for number, output in enumerate(outputs):
        if arguments.json:
            print(json.dumps(_as_json(output), ensure_ascii=False))
            continue
        for completion in output.outputs:
            if len(outputs) * len(output.outputs) > 1:
                print(f"=== {number}" + (f".{completion.index}" if params.n > 1 else ""))
            print(completion.text)
    return DONE


def _as_json(output: RequestOutput) -> dict[str, Any]:
    """An output as plain values, without what only a stream needs."""
    values = dataclasses.asdict(output)
    for completion in values["outputs"]:
        del completion["delta"]
    return values


def _llm(arguments: argparse.Namespace, recorder: Recorder | NullRecorder) -> "LLM":
    return minivllm.LLM(arguments.model, recorder=recorder, **_given(arguments, ENGINE_HELP))


def _chat(arguments: argparse.Namespace) -> int:
    params = SamplingParams(**{"temperature": CHAT_TEMPERATURE, **_given(arguments, SAMPLING_HELP)})
    history: list[dict[str, str]] = []
    if arguments.system is not None:
        history.append({"role": "system", "content": arguments.system})
    with _recording(arguments.trace) as recorder, _llm(arguments, recorder) as llm:
        if arguments.message is not None:
            history.append({"role": "user", "content": arguments.message})
            _answer(llm, history, params)
            return DONE
        _converse(llm, history, params)
    return DONE


def _converse(llm: "LLM", history: list[dict[str, str]], params: SamplingParams) -> None:
    """Read, answer, repeat. Ctrl-C stops an answer, Ctrl-D the conversation."""
    person = sys.stdin.isatty()
    if person:
        print("Ctrl-C stops an answer, Ctrl-D ends the conversation.", file=sys.stderr)
    while True:
        try:
            message = input("> ") if person else next(sys.stdin).rstrip("\n")
        except (EOFError, StopIteration):
            if person:
                print(file=sys.stderr)
            return
        except KeyboardInterrupt:
            print("\n(Ctrl-D ends the conversation)", file=sys.stderr)
            continue
        if not message.strip():
            continue
        history.append({"role": "user", "content": message})
        try:
            answer = _answer(llm, history, params)
        except UserError as error:  # too long by now, say: the conversation so far stays
            history.pop()
            print(f"minivllm: {error}", file=sys.stderr)
            continue
        except KeyboardInterrupt as interrupt:
            print("\n(stopped)", file=sys.stderr)
            answer = str(interrupt.args[0]) if interrupt.args else ""
        history.append({"role": "assistant", "content": answer})


def _answer(llm: "LLM", history: list[dict[str, str]], params: SamplingParams) -> str:
    """Stream one answer to stdout and return it; an interrupt carries what there was of it."""
    output = None
    try:
        for output in llm.stream(history, params):
            print(output.outputs[0].delta, end="", flush=True)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(output.outputs[0].text if output else "") from None
    print(flush=True)
    assert output is not None, "a stream yields at least its end"
    completion = output.outputs[0]
    if sys.stderr.isatty() and output.elapsed:
        print(
            f"({len(completion.token_ids)} tokens, {len(completion.token_ids) / output.elapsed:.1f}"
            f" tokens/s, first after {format_seconds(output.time_to_first_token or 0)}; "
            f"{output.num_cached_tokens} of {len(output.prompt_token_ids)} prompt tokens cached)",
            file=sys.stderr,
        )
    return completion.text


def _demo(arguments: argparse.Namespace) -> int:
    from minivllm.demo import run_demo

    flags = _given(arguments, ENGINE_HELP)
    recorder = Recorder()
    with _recording(arguments.trace) as kept:
        if isinstance(kept, Recorder):
            recorder = kept
        return run_demo(
            arguments.model, flags, recorder=recorder, file=sys.stdout, plain=arguments.plain
        )


def _bench(arguments: argparse.Namespace) -> int:
    from minivllm.bench.bench import Options, run_bench

    names = [field.name for field in dataclasses.fields(Options) if field.name != "engine_args"]
    values = {name: getattr(arguments, name) for name in names if hasattr(arguments, name)}
    options = Options(**values, engine_args=_given(arguments, ENGINE_HELP))
    run_bench(options, ["minivllm", *arguments.line])
    return DONE


def _fetch(arguments: argparse.Namespace) -> int:
    from minivllm.models.hub import fetch

    print(fetch(arguments.model, arguments.download_dir))
    return DONE


def _doctor(arguments: argparse.Namespace) -> int:
    from minivllm.doctor import judge, look

    findings = judge(look(arguments.download_dir))
    if arguments.json:
        print(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
    else:
        for finding in findings:
            print(f"{finding.verdict:8} {finding.subject:16} {finding.detail}")
            if finding.remedy:
                print(f"{'':25} -> {finding.remedy}")
    return FAILED if any(finding.verdict == "problem" for finding in findings) else DONE


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "generate": _generate,
    "chat": _chat,
    "demo": _demo,
    "bench": _bench,
    "fetch": _fetch,
    "doctor": _doctor,
}


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser, parsers = _parser()
    known, rest = parser.parse_known_args(arguments)
    if rest:
        command = parsers[known.command]
        flags = [option for action in command._actions for option in action.option_strings]
        if rest[0].startswith("-"):
            name = rest[0].partition("=")[0]
            command.error(f"unknown flag {name}{did_you_mean(name, flags)}")
        command.error(f"unexpected argument {rest[0]!r}")
    known.line = sys.argv[1:] if arguments is None else list(arguments)
    return known


def _set_up_log(verbose: bool) -> None:
    """Warnings to stderr, with `--verbose` what the loader reports too."""
    logging.basicConfig(stream=sys.stderr, format="%(levelname)s %(message)s")
    logger.setLevel(logging.INFO if verbose else logging.WARNING)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit code."""
    # Threads that wait for one another must sleep, not spin: on a busy machine spinning made the
    # demo 20 times slower (measured). OpenMP reads this once, when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a terminal of another encoding gets a "?", no error
            stream.reconfigure(errors="replace")
    try:
        parsed = _parse(arguments)
        _set_up_log(getattr(parsed, "verbose", False))
        # Before torch: its own import of numpy swallows an interrupt that comes in between.
        import numpy  # noqa: F401

        code = COMMANDS[parsed.command](parsed)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("minivllm: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # Python flushes stdout once more at exit: give it somewhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return NO_READER
    except (UserError, RuntimeError) as error:  # RuntimeError: a failed step, a lost device
        logger.info("where it happened:", exc_info=True)
        print(f"minivllm: {error}", file=sys.stderr)
        return FAILED if isinstance(error, (ModelError, RuntimeError)) else WRONG
