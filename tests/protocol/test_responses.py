"""Response objects: the shapes that evaluation tools index into, and floats that JSON can hold."""

from dataclasses import dataclass

from nanoserve.protocol import responses


@dataclass(frozen=True)
class Entry:
    token: str
    token_id: int
    bytes: bytes
    logprob: float | None
    top: "tuple[Entry, ...]" = ()
    text_offset: int = 0


BEST = Entry("b", 2, b"b", -0.1)
WORST = Entry("w", 3, b"w", float("-inf"))
FIRST = Entry("a", 1, b"a", None)
SECOND = Entry("w", 3, b"w", float("-inf"), top=(BEST, WORST), text_offset=1)


def test_minus_infinity_is_a_finite_floor() -> None:
    assert responses.completion_logprobs([SECOND])["token_logprobs"] == [responses.LOGPROB_FLOOR]
    assert responses.chat_logprobs([SECOND]) == {
        "content": [
            {
                "token": "w",
                "logprob": responses.LOGPROB_FLOOR,
                "bytes": [119],
                "top_logprobs": [
                    {"token": "b", "logprob": -0.1, "bytes": [98]},
                    {"token": "w", "logprob": responses.LOGPROB_FLOOR, "bytes": [119]},
                ],
            }
        ],
        "refusal": None,
    }


def test_completion_logprobs_are_parallel_and_null_for_the_first_prompt_token() -> None:
    logprobs = responses.completion_logprobs([FIRST, SECOND])
    assert logprobs["tokens"] == ["a", "w"]
    assert logprobs["token_logprobs"] == [None, responses.LOGPROB_FLOOR]
    assert logprobs["top_logprobs"] == [None, {"b": -0.1, "w": responses.LOGPROB_FLOOR}]
    assert logprobs["text_offset"] == [0, 1]


def test_of_two_ids_with_one_text_the_chosen_one_counts_then_the_better() -> None:
    twins = (Entry("x", 5, b"x", -1.0), Entry("x", 6, b"x", -2.0), Entry("y", 7, b"y", -3.0))
    chosen = Entry("z", 8, b"z", -9.0, top=twins)
    assert responses.completion_logprobs([chosen])["top_logprobs"] == [{"x": -1.0, "y": -3.0, "z": -9.0}]
    second = Entry("x", 6, b"x", -2.0, top=twins)
    assert responses.completion_logprobs([second])["top_logprobs"] == [{"x": -2.0, "y": -3.0}]


def test_prompt_logprobs_are_keyed_by_id_with_ranks() -> None:
    assert responses.prompt_logprobs([FIRST, SECOND]) == [
        None,
        {
            "3": {"logprob": responses.LOGPROB_FLOOR, "rank": 2, "decoded_token": "w"},
            "2": {"logprob": -0.1, "rank": 1, "decoded_token": "b"},
        },
    ]


def test_usage_adds_up() -> None:
    assert responses.usage(3, 4, cached_tokens=2, reasoning_tokens=1) == {
        "prompt_tokens": 3,
        "completion_tokens": 4,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 2},
        "completion_tokens_details": {"reasoning_tokens": 1},
    }


def test_a_tool_call_names_itself_once() -> None:
    assert responses.tool_call("c1", "add", "{") == {
        "id": "c1",
        "type": "function",
        "function": {"name": "add", "arguments": "{"},
    }
    assert responses.tool_call(None, None, "}") == {"function": {"arguments": "}"}}
