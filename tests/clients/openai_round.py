"""What a user of the `openai` package does, in one go: `python openai_round.py URL`. Runs under any of its versions."""

import json
import sys
from typing import Any, Literal

import openai
from pydantic import BaseModel


class Capital(BaseModel):
    capital: Literal["Paris", "Rome"]


TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
ASK = [{"role": "user", "content": "What is 12 + 7?"}]
FAST: dict[str, Any] = {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}


def chat(client: Any) -> None:
    plain = client.chat.completions.create(model="demo", messages=ASK, temperature=0)
    assert plain.choices[0].message.content
    assert plain.usage.total_tokens > 0
    stream = client.chat.completions.create(model="demo", messages=ASK, temperature=0, stream=True)
    words = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert words == plain.choices[0].message.content


def tools(client: Any) -> None:
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    choice = {"type": "function", "function": {"name": "get_weather"}}
    fields: dict[str, Any] = {"model": "demo", "tools": [TOOL], **FAST}
    first = client.chat.completions.create(messages=messages, tool_choice=choice, **fields)
    (call,) = first.choices[0].message.tool_calls
    assert "city" in json.loads(call.function.arguments)
    messages += [first.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    assert client.chat.completions.create(messages=messages, **fields).choices[0].finish_reason


def parsing(client: Any) -> None:
    reply = client.beta.chat.completions.parse(model="demo", messages=ASK, response_format=Capital, **FAST)
    assert isinstance(reply.choices[0].message.parsed, Capital)
    response = client.responses.parse(model="demo", input="hi", text_format=Capital, reasoning={"effort": "none"})
    assert isinstance(response.output_parsed, Capital)


def responses(client: Any) -> None:
    first = client.responses.create(model="demo", input="What is 12 + 7?", temperature=0)
    assert first.output_text
    with client.responses.stream(model="demo", input="What is 12 + 7?", temperature=0) as stream:
        assert stream.get_final_response().output_text == first.output_text
    again = client.responses.create(model="demo", input="And 1 + 1?", previous_response_id=first.id)
    assert again.previous_response_id == first.id
    (listed,) = client.responses.input_items.list(first.id).data
    assert listed.content[0].text == "What is 12 + 7?"


def errors(client: Any) -> None:
    found = None
    try:
        client.chat.completions.create(model="none", messages=ASK)
    except openai.NotFoundError as error:
        found = error.param
    assert found == "model"


def rest(client: Any) -> None:
    text = client.completions.create(model="demo", prompt="one two", max_tokens=4, logprobs=2, echo=True)
    assert len(text.choices[0].logprobs.tokens) == text.usage.total_tokens
    for form in ({}, {"encoding_format": "float"}):
        vectors = client.embeddings.create(model="demo", input=["one", "two"], dimensions=8, **form).data
        assert [len(vector.embedding) for vector in vectors] == [8, 8]
    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").id == "demo"


def main(url: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0)
    for part in (chat, tools, parsing, responses, errors, rest):
        part(client)
    print(f"openai {openai.__version__}")


if __name__ == "__main__":
    main(sys.argv[1])
