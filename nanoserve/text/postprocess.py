"""From an engine's tokens to the words that a reader sees, one choice at a time."""

from collections.abc import Iterator
from dataclasses import dataclass

from nanoserve.core.outputs import FinishReason, RequestOutput
from nanoserve.core.plan import TokenLogprobs
from nanoserve.core.request import GenerateRequest
from nanoserve.text.detokenizer import Detokenizer
from nanoserve.text.logprobs import LogprobWriter, TokenText
from nanoserve.text.policy import OutputPolicy, Thinking, ToolStyle
from nanoserve.text.reasoning import ReasoningSplit, ThoughtCount
from nanoserve.text.stop import StopMatcher
from nanoserve.text.tokenizer import Tokenizer
from nanoserve.text.tools import ToolCallDelta, ToolParser
from nanoserve.text.xml_calls import XmlCall

__all__ = ["ChoiceProcessor", "Delta", "TokenText", "ToolCallDelta"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What one ``RequestOutput`` adds to the answer. Joined over all deltas, it does not depend on their grouping.

    A delta may hold reasoning, content and tool calls together, in this order: a stream writes them as separate chunks.
    With ``echo``, the first delta's content starts with the prompt and its ``logprobs`` with the prompt's entries.
    ``finish_reason``: "stop", "length", "tool_calls", "abort" or "error", on the last delta only. ``stopped_by_text``:
    a stop string ended the answer here, the engine does not know yet and must be told to abort.
    ``num_completion_tokens``, ``num_reasoning_tokens`` (a part of them) and ``num_cached_tokens`` are totals so far.
    """

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    logprobs: tuple[TokenText, ...] = ()
    prompt_logprobs: tuple[TokenText, ...] = ()
    new_token_ids: tuple[int, ...] = ()
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: tuple[str, str] | None = None
    num_completion_tokens: int = 0
    num_reasoning_tokens: int = 0
    num_cached_tokens: int = 0
    stopped_by_text: bool = False

    def pieces(self) -> Iterator[str | ToolCallDelta]:
        """Content and calls in the order in which the model wrote them."""
        start = 0
        for call in self.tool_calls:
            if call.offset > start:
                yield self.content[start : call.offset]
                start = call.offset
            yield call
        if start < len(self.content):
            yield self.content[start:]


class ChoiceProcessor:
    """The text of one choice. Feed every output once, in order; after the last delta, further ones add nothing.

    Completion tokens are those generated up to the one that ended the answer: an EOS or stop token counts, though its
    text is not shown; so does the token that completed a stop string.
    """

    def __init__(self, tokenizer: Tokenizer, policy: OutputPolicy, request: GenerateRequest) -> None:
        self._policy = policy
        self._min_tokens = request.sampling.min_tokens
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=policy.skip_special_tokens)
        self._stops = StopMatcher(policy.stop, include=policy.include_stop_str_in_output)
        self._reasoning = None if policy.thinking is Thinking.OFF else ReasoningSplit(policy.thinking)
        tags = tokenizer.id_of("<think>"), tokenizer.id_of("</think>")
        self._thoughts = ThoughtCount(policy.thinking, *tags)
        self._tools = _tool_parser(policy) if policy.parse_tools else None
        self._logprobs = None if policy.logprobs is None else self._writer(tokenizer, policy.logprobs)
        self._prompt = _PromptEntries(tokenizer, policy, request) if policy.scores_prompt else None
        self._num_tokens = 0
        self._num_cached_tokens = 0
        self._echo = policy.prompt_text if policy.echo else ""
        self._done = False

    def _writer(self, tokenizer: Tokenizer, num_top: int) -> LogprobWriter:
        policy = self._policy
        num_chars = len(policy.prompt_text) if policy.echo else 0
        skip = policy.skip_special_tokens
        return LogprobWriter(tokenizer, num_top=num_top, skip_special_tokens=skip, num_chars=num_chars)

    def feed(self, output: RequestOutput) -> Delta:
        """What an output adds to the answer."""
        if self._done:
            return Delta(num_completion_tokens=self._num_tokens, num_cached_tokens=self._num_cached_tokens)
        self._num_cached_tokens = max(self._num_cached_tokens, output.num_cached_tokens)
        num_before = self._num_tokens
        text, stop = self._read(output)
        self._done = stop is not None or output.finish_reason is not None
        if self._done and stop is None:
            text, stop = self._finish_text(text)
        reasoning, content, tool_calls = self._split(text)
        echo, self._echo = self._echo, ""
        entries, prompt_entries = self._entries(output)
        new_token_ids = output.new_token_ids[: self._num_tokens - num_before]
        self._thoughts.add(new_token_ids)
        return Delta(
            content=echo + content,
            reasoning=reasoning,
            tool_calls=tool_calls,
            logprobs=entries,
            prompt_logprobs=prompt_entries,
            new_token_ids=new_token_ids,
            finish_reason=self._finish_reason(output, stop) if self._done else None,
            stop_reason=stop if stop is not None else self._stop_token(output),
            error=output.error if stop is None else None,
            num_completion_tokens=self._num_tokens,
            num_reasoning_tokens=self._thoughts.num_tokens,
            num_cached_tokens=self._num_cached_tokens,
            stopped_by_text=stop is not None and output.finish_reason is None,
        )

    def _read(self, output: RequestOutput) -> tuple[str, str | None]:
        """(text to show, the stop string that ended it). Token by token where a stop string could end it between."""
        token_ids = output.new_token_ids
        ended = output.stop_token_id is not None and not self._policy.include_stop_str_in_output
        if self._logprobs is None and not self._policy.stop:
            self._num_tokens += len(token_ids)
            return self._detokenizer.feed(token_ids[:-1] if ended else token_ids), None
        shown = ""
        for index, token_id in enumerate(token_ids):
            hidden = ended and index == len(token_ids) - 1
            self._num_tokens += 1
            if self._logprobs is not None:
                entry = output.logprobs[index] if index < len(output.logprobs) else None
                self._logprobs.add(token_id, entry, hidden=hidden)
            text = "" if hidden else self._detokenizer.feed((token_id,))
            text, stop = self._stops.feed(text, armed=self._num_tokens >= self._min_tokens)
            shown += text
            if stop is not None:
                return shown, stop
        return shown, None

    def _finish_text(self, text: str) -> tuple[str, str | None]:
        tail, stop = self._stops.feed(self._detokenizer.finish())
        return text + tail + ("" if stop else self._stops.finish()), stop

    def _split(self, text: str) -> tuple[str, str, tuple[ToolCallDelta, ...]]:
        """(reasoning, content, tool calls) of a piece of text; at the end with all that was held back."""
        reasoning, content = ("", text) if self._reasoning is None else self._reasoning.feed(text)
        if self._done and self._reasoning is not None:
            more_reasoning, more_content = self._reasoning.finish()
            reasoning, content = reasoning + more_reasoning, content + more_content
        if self._tools is None:
            return reasoning, content, ()
        content, calls = self._tools.feed(content)
        if self._done:
            more_content, more_calls = self._tools.finish()
            calls += [call.behind(content) for call in more_calls]
            content += more_content
        return reasoning, content, tuple(calls)

    def _entries(self, output: RequestOutput) -> tuple[tuple[TokenText, ...], tuple[TokenText, ...]]:
        """(logprobs, prompt_logprobs): with echo, the prompt's entries come before the answer's."""
        entries = () if self._logprobs is None else self._logprobs.take(final=self._done)
        if self._prompt is None:
            return entries, ()
        prompt = self._prompt.feed(output.prompt_logprobs)
        echoed = self._policy.echo and self._logprobs is not None
        return (prompt + entries if echoed else entries), (() if self._policy.prompt_logprobs is None else prompt)

    def _finish_reason(self, output: RequestOutput, stop: str | None) -> str:
        reason = FinishReason.STOP if stop is not None else output.finish_reason
        assert reason is not None
        calls = self._tools is not None and self._tools.num_calls > 0
        return "tool_calls" if reason is FinishReason.STOP and calls else reason.value

    def _stop_token(self, output: RequestOutput) -> int | None:
        return output.stop_token_id if output.stop_token_id in self._policy.stop_token_ids else None


def _tool_parser(policy: OutputPolicy) -> ToolParser:
    if policy.tool_style is ToolStyle.HERMES:
        return ToolParser(parallel=policy.parallel_tool_calls)
    return ToolParser(parallel=policy.parallel_tool_calls, new_call=lambda: XmlCall(policy.tool_schemas))


class _PromptEntries:
    """The prompt's own entries, special tokens shown; the first token has no probability."""

    def __init__(self, tokenizer: Tokenizer, policy: OutputPolicy, request: GenerateRequest) -> None:
        asked = policy.logprobs if policy.prompt_logprobs is None else policy.prompt_logprobs
        self._writer = LogprobWriter(tokenizer, num_top=asked or 0, skip_special_tokens=False)
        self._token_ids = request.prompt_token_ids
        self._next = 0

    def feed(self, entries: tuple[TokenLogprobs, ...]) -> tuple[TokenText, ...]:
        """All entries, once there are all; the engine sends those of every position but the first, in order.

        A request that was moved to another engine may bring them again: they are not written twice.
        """
        if self._next == len(self._token_ids):
            return ()
        if self._next == 0 and (entries or len(self._token_ids) == 1):
            self._append(None)
        for entry in entries:
            self._append(entry)
        return self._writer.take(final=True) if self._next == len(self._token_ids) else ()

    def _append(self, entry: TokenLogprobs | None) -> None:
        self._writer.add(self._token_ids[self._next], entry)
        self._next += 1
