"""Messages -> one prompt string, by the model's own Jinja template in a sandbox with limits.

A template comes with the model and is a program. jinja2's immutable sandbox keeps it from Python
and from our objects; the limits here keep it from running or growing for ever: every turn of a loop
or macro looks at the clock, and what multiplies or joins strings looks at the length.

Renders as transformers does (trim_blocks, lstrip_blocks, tojson, raise_exception, strftime_now,
loop controls); left out: the generation tag, which is for training. Chapter 3 reads this file.
"""

import datetime
import functools
import json
import time
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
from jinja2.visitor import NodeTransformer

from minivllm.base import UserError

MAX_SECONDS = 5.0  # a conversation of a thousand messages takes some milliseconds
MAX_CHARACTERS = 16 << 20
ROLES = ("system", "developer", "user", "assistant", "tool")


class ChatTemplate:
    """A chat template. Rendering is thread-safe: each call has its own clock."""

    def __init__(self, source: str) -> None:
        self.source = source

    @functools.cached_property
    def compiled(self) -> Template:
        """The template, compiled when first asked for: a broken one must not stop plain prompts.

        Raises:
            UserError: the template is not valid Jinja.
        """
        try:
            return _Sandbox().from_string(self.source)
        except Exception as error:  # besides syntax errors: too deep a nesting, broken constants
            raise UserError(f"the chat template is no valid Jinja: {_sentence(error)}") from None

    def render(self, messages: list[dict[str, Any]], **variables: Any) -> str:
        """The prompt for checked `messages`; `variables` are what else the template may read.

        Raises:
            UserError: the template refuses the messages, fails, or exceeds its limits.
        """
        variables |= {"messages": messages, "deadline": time.monotonic() + MAX_SECONDS}
        template, pieces, length = self.compiled, [], 0
        try:
            for piece in template.generate(**variables):
                length += len(piece)
                _check_length(length)
                pieces.append(piece)
        except Exception as error:  # a template can fail in any way that Python can
            raise UserError(f"the chat template refused the messages: {_sentence(error)}") from None
        return "".join(pieces)


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """Messages as a template expects them: a known role, and text content.

    Content given as parts `{"type": "text", "text": ...}` is joined by newlines; null becomes "";
    JSON strings in a tool call's arguments become objects. The caller's objects stay as they are.

    Raises:
        UserError: not a list of such messages; the sentence says where.
    """
    if not isinstance(messages, list | tuple) or not messages:
        raise UserError("messages must be a non-empty list of {'role': ..., 'content': ...}")
    return [_check_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _check_message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict) or "role" not in message:
        raise UserError(f"{where} must be a dictionary with 'role' and 'content'")
    if message["role"] not in ROLES:
        role = str(message["role"])[:40]
        raise UserError(f"{where} has role {role!r}, but it must be one of {', '.join(ROLES)}")
    calls = message.get("tool_calls")
    if message.get("content") is None and not calls:
        raise UserError(f"{where} has no content: give a string")
    checked = {**message, "content": _text(message.get("content"), where)}
    if calls is not None:
        checked["tool_calls"] = _check_calls(calls, where)
    return checked


def _text(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise UserError(f"{where}.content must be a string or a list of text parts")
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise UserError(f"{where}.content has a part of type {str(kind)[:40]!r}, but only "
                            f"'text' is supported")  # fmt: skip
        if not isinstance(part.get("text"), str):
            raise UserError(f"{where}.content has a text part without a string 'text'")
        texts.append(part["text"])
    return "\n".join(texts)


def _check_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise UserError(f"{where}.tool_calls must be a list of dictionaries")
    checked = []
    for call in calls:
        function = call.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise UserError(f"{where}.tool_calls must each have a function with a name")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments) if arguments else {}
            except ValueError:
                raise UserError(f"{where}.tool_calls has arguments that are not JSON") from None
        checked.append({**call, "function": {**function, "arguments": arguments}})
    return checked


class _Limits(NodeTransformer):
    """Puts the checks into a parsed template, where no template can name or replace them."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802  (jinja's name)
        return self._with_tick(node)

    visit_Macro = visit_CallBlock = visit_For  # noqa: N815

    def _with_tick(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        tick = _call("tick", [nodes.ContextReference()], node.lineno)
        node.body.insert(0, nodes.ExprStmt(tick, lineno=node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _call("join_strings", node.nodes, node.lineno)


def _call(method: str, arguments: list[Any], lineno: int) -> nodes.Call:
    target = nodes.EnvironmentAttribute(method, lineno=lineno)
    return nodes.Call(target, arguments, [], None, None, lineno=lineno)


class _Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self) -> None:
        # Not optimised: constants would be folded while compiling, before any limit holds.
        super().__init__(trim_blocks=True, lstrip_blocks=True, optimized=False,
                         extensions=["jinja2.ext.loopcontrols"])  # fmt: skip
        self.filters["tojson"] = _to_json
        for name in ("center", "format", "wordwrap"):  # they take a width, which can be anything
            del self.filters[name]
        self.globals["raise_exception"] = _raise
        self.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _Limits().visit(super()._parse(source, name, filename))

    def tick(self, context: Context) -> None:
        if time.monotonic() > context.parent["deadline"]:
            raise SecurityError(f"it ran longer than {MAX_SECONDS:g} seconds")

    def join_strings(self, *values: Any) -> str:
        strings = [str(value) for value in values]
        _check_length(sum(map(len, strings)))
        return "".join(strings)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and not (abs(left) < 1 << 32 and abs(right) <= 64):
            raise SecurityError("a power is too large")
        if operator == "*":
            sizes = [len(v) if isinstance(v, str | list | tuple) else abs(v) for v in (left, right)]
            _check_length(sizes[0] * sizes[1] if any(map(_sized, (left, right))) else 0)
        if operator == "+" and _sized(left) and _sized(right):
            _check_length(len(left) + len(right))
        if operator == "%" and isinstance(left, str):
            raise SecurityError("formatting with % is not supported: use ~")
        return super().call_binop(context, operator, left, right)


def _sized(value: Any) -> bool:
    return isinstance(value, str | list | tuple)


def _check_length(length: int) -> None:
    if length > MAX_CHARACTERS:
        raise SecurityError(f"a text grew beyond {MAX_CHARACTERS:,} characters")


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None,
             separators: Any = None, sort_keys: bool = False) -> str:  # fmt: skip
    """transformers' tojson: plain JSON, where jinja2's own escapes for HTML."""
    if indent is not None and not 0 <= indent <= 16:
        raise SecurityError("tojson indents by at most 16")
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: Any) -> None:
    raise TemplateError(str(message))


def _sentence(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text[:300]
