"""Which token sequences a whole answer's grammar lets through."""

from pathlib import Path

import pytest
from llguidance import LLMatcher, LLTokenizer

from nanoserve.core.sampling import StructuredOutputs
from nanoserve.text.grammar import grammar_text, strict_calls, tool_call_grammar, whole_answer, xml_call_grammar
from nanoserve.text.policy import Thinking
from nanoserve.text.tokenizer import Tokenizer
from tests.text.small_tokenizer import write_tokenizer
from tests.text.test_xml_calls import call as xml_call

JSON = grammar_text(StructuredOutputs(json_object=True))
REGEX = grammar_text(StructuredOutputs(regex="[ab]+"))
CHOICE = grammar_text(StructuredOutputs(choice=("yes", "no")))
ADD = {"name": "add", "parameters": {"properties": {"x": {"type": "integer"}}, "required": ["x"]}}
CALL = tool_call_grammar([{"name": "ping"}, ADD], tag_tokens=True)
WRITE = {
    "name": "write",
    "parameters": {
        "properties": {
            "path": {"type": "string"},
            "n": {"$ref": "#/$defs/small"},
            "mode": {"enum": ["a", "w"]},
        },
        "required": ["path"],
        "$defs": {"small": {"type": "integer", "maximum": 9}},
    },
}
XML = xml_call_grammar([{"name": "ping"}, WRITE], tag_tokens=True)
STRICT = strict_calls(CALL)
TAGS = grammar_text(
    StructuredOutputs(tags=(("<f=", "<f=a>", '{"type": "integer"}', "</f>"), ("<f=", "<f=b>", '{"type": "null"}', ""))),
)
PING = '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>'


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, LLTokenizer]:
    folder: Path = write_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    tokenizer = Tokenizer.load(folder)
    text = (folder / "tokenizer.json").read_text(encoding="utf-8")
    return tokenizer, LLTokenizer(text, n_vocab=tokenizer.num_tokens, eos_token=[tokenizer.id_of("<|im_end|>")])


@pytest.mark.parametrize(
    ("forms", "thinking", "text", "passes"),
    [
        ([CALL], Thinking.OFF, PING, True),
        ([CALL], Thinking.OFF, '<tool_call>\n{"name": "add", "arguments": {"x": 2}}\n</tool_call>', True),
        ([CALL], Thinking.OFF, '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>', False),
        ([CALL], Thinking.OFF, '<tool_call>\n{"name": "nope", "arguments": {}}\n</tool_call>', False),
        ([CALL], Thinking.OFF, "words", False),
        ([JSON], Thinking.AUTO, '<think>\n{ hm\n</think>\n\n{"a": 1}', True),
        ([JSON], Thinking.AUTO, '{"a": 1}', True),
        ([JSON], Thinking.AUTO, "<think>\nhm\n</think>\n\nwords", False),
        ([JSON], Thinking.OFF, "<think>\nhm\n</think>\n\n{}", False),
        ([JSON], Thinking.OPEN, "hm\n</think>\n\n{}", True),
        ([JSON], Thinking.OPEN, "{}", False),
        ([JSON, CALL], Thinking.OFF, PING, True),
        ([JSON, CALL], Thinking.OFF, "{}", True),
        ([REGEX], Thinking.AUTO, "<think></think>abba", True),
        ([CHOICE], Thinking.AUTO, "no", True),
        ([CHOICE], Thinking.AUTO, "maybe", False),
        ([XML], Thinking.OFF, xml_call("ping"), True),
        ([XML], Thinking.AUTO, "<think>\nhm\n</think>\n\n" + xml_call("write", path="a <b>\nc"), True),
        ([XML], Thinking.OFF, xml_call("write", path="", n="3", mode="w"), True),
        ([XML], Thinking.OFF, xml_call("write", n="3"), False),
        ([XML], Thinking.OFF, xml_call("write", path="a", n="30"), False),
        ([XML], Thinking.OFF, xml_call("write", path="a", mode="x"), False),
        ([XML], Thinking.OFF, xml_call("ping", path="a"), False),
        ([STRICT], Thinking.OFF, "words alone", True),
        ([STRICT], Thinking.AUTO, f"<think>\nhm\n</think>\n\nNow.\n{PING}\n{PING}", True),
        ([STRICT], Thinking.OFF, '<tool_call>\n{"name": "nope", "arguments": {}}\n</tool_call>', False),
        ([TAGS], Thinking.OFF, "words <f=a>7</f> and <f=b>null, more", True),
        ([TAGS], Thinking.OFF, "words <f=a>null</f>", False),
        ([TAGS], Thinking.OFF, "words <f=c>", False),
        ([TAGS], Thinking.AUTO, "words < f", True),
    ],
)
def test_answers(
    vocabulary: tuple[Tokenizer, LLTokenizer], forms: list[str], thinking: Thinking, text: str, passes: bool
) -> None:
    tokenizer, compiled = vocabulary
    matcher = LLMatcher(compiled, whole_answer(forms, thinking), log_level=0)
    ids = tokenizer.encode(text, allow_special=True)
    taken = matcher.try_consume_tokens(ids)
    assert (taken == len(ids) and matcher.is_accepting()) is passes
