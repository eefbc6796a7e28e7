"""Real clients against `nanoserve serve demo`, each as its users call it. A package that is not installed is skipped.

`make test-slow` installs them (requirements.txt); NANOSERVE_TEST_OPENAI names a folder with `openai` of another major
version.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.clients import openai_round
from tests.serving.service import command, free_port

# The clients' own warnings are not ours to answer for.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.serve,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("default"),
]

ASK: list[Any] = [{"role": "user", "content": "What is 12 + 7?"}]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port = free_port()
    log = (tmp_path_factory.mktemp("serve") / "log").open("w+")
    process = subprocess.Popen(
        command("serve", "demo", "--port", str(port), "--max-model-len", "512"),
        env=os.environ | {"TMPDIR": "/tmp"},
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        wait_until_ready(process, f"http://127.0.0.1:{port}", log.name)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(60)
        log.close()


def wait_until_ready(process: subprocess.Popen[bytes], url: str, log: str) -> None:
    """Blocks until the service answers; fails with what it printed when it ends before."""
    transport = httpx.HTTPTransport(retries=3)
    with httpx.Client(transport=transport, timeout=5) as client:
        for _ in range(400):
            assert process.poll() is None, Path(log).read_text()
            try:
                if client.get(f"{url}/ready").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            try:
                process.wait(0.5)
            except subprocess.TimeoutExpired:
                continue
    raise AssertionError(Path(log).read_text())


def test_openai(url: str) -> None:
    openai_round.main(url)


def test_openai_of_another_major_version(url: str) -> None:
    folder = os.environ.get("NANOSERVE_TEST_OPENAI")
    if not folder or not Path(folder, "openai").is_dir():
        pytest.skip("NANOSERVE_TEST_OPENAI names no folder with another version")
    environment = os.environ | {"PYTHONPATH": folder}
    script = str(Path(openai_round.__file__))
    run = subprocess.run([sys.executable, script, url], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    import openai

    assert run.stdout.split()[1].split(".")[0] != openai.__version__.split(".")[0]


def test_the_examples_of_the_readme(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Run one after the other, they print what stands behind them."""
    readme = Path(__file__).parents[2].joinpath("README.md").read_text(encoding="utf-8")
    section = readme.split("## Talk to it")[1].split("\n## ")[0]
    code = "\n".join(re.findall(r"```python\n(.*?)```", section, re.DOTALL)).replace("http://127.0.0.1:8000", url)
    exec(code, {"__name__": "readme"})
    printed = capsys.readouterr().out.splitlines()
    wanted = re.findall(r"^print\(.*\)  # (.*)$", code, re.MULTILINE)
    assert len(wanted) == 5
    assert printed[: len(wanted)] == wanted


def test_anthropic(url: str) -> None:
    import anthropic

    tool: Any = {"name": "get_weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}
    client: Any = anthropic.Anthropic(base_url=url, api_key="k", max_retries=0)
    fields: dict[str, Any] = {"model": "demo", "max_tokens": 100, "extra_body": {"temperature": 0}}
    plain = client.messages.create(**fields, messages=ASK)
    with client.messages.stream(**fields, messages=ASK) as stream:
        assert "".join(stream.text_stream) == plain.content[0].text
    thoughtful = client.messages.create(**fields, messages=ASK, thinking={"type": "enabled", "budget_tokens": 1024})
    assert [block.type for block in thoughtful.content][:1] == ["thinking"]
    called = client.messages.create(**fields, messages=ASK, tools=[tool], tool_choice={"type": "any"})
    assert called.stop_reason == "tool_use"
    use = called.content[-1]
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "sunny"}]}
    history = [*ASK, {"role": "assistant", "content": called.content}, result]
    assert client.messages.create(**fields, messages=history, tools=[tool]).stop_reason
    counted = client.messages.count_tokens(model="demo", messages=ASK).input_tokens
    assert counted == plain.usage.input_tokens + plain.usage.cache_read_input_tokens


def test_langchain(url: str) -> None:
    langchain = pytest.importorskip("langchain_openai", reason="pip install langchain-openai")

    def get_weather(city: str) -> str:
        """Weather of a city."""
        return city

    model = langchain.ChatOpenAI(base_url=f"{url}/v1", api_key="k", model="demo", temperature=0, max_retries=0)
    assert model.invoke("What is 12 + 7?").content
    assert "".join(chunk.content for chunk in model.stream("What is 12 + 7?"))
    (call,) = model.bind_tools([get_weather], tool_choice="get_weather").invoke("Weather in Paris?").tool_calls
    assert call["name"] == "get_weather"
    parsed = model.with_structured_output(openai_round.Capital, method="json_schema").invoke("Capital of France?")
    assert isinstance(parsed, openai_round.Capital)


def test_litellm(url: str) -> None:
    litellm = pytest.importorskip("litellm", reason="pip install litellm")
    hosted: dict[str, Any] = {"model": "hosted_vllm/demo", "api_base": f"{url}/v1", "api_key": "k", "temperature": 0}
    plain = litellm.completion(messages=ASK, **hosted)
    stream = litellm.completion(messages=ASK, stream=True, **hosted)
    words = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert words == plain.choices[0].message.content
    claude = litellm.completion(
        model="anthropic/demo", api_base=url, api_key="k", messages=ASK, max_tokens=50, temperature=0
    )
    assert claude.choices[0].message.content


def test_lm_eval(url: str, tmp_path: Path) -> None:
    """A task of log likelihoods, built here: which ending the model finds more likely."""
    evaluator = pytest.importorskip("lm_eval.evaluator", reason="pip install 'lm-eval[api]'")
    tasks = pytest.importorskip("lm_eval.tasks", reason="pip install 'lm-eval[api]'")
    rows = [{"q": f"{n} + 1 =", "choices": [str(n + 1), str(n + 40)], "label": 0} for n in range(2, 10)]
    (tmp_path / "rows.json").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "sums.yaml").write_text(
        f"task: sums\ndataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {tmp_path}/rows.json\n"
        "test_split: test\noutput_type: multiple_choice\ndoc_to_text: '{{q}}'\ndoc_to_target: label\n"
        "doc_to_choice: '{{choices}}'\nmetric_list:\n  - metric: acc\n"
    )
    folder = Path(__file__).parents[2] / "nanoserve" / "demo_model"
    arguments = f"model=demo,base_url={url}/v1/completions,tokenizer={folder},num_concurrent=2,max_length=256"
    found: Any = evaluator.simple_evaluate(
        model="local-completions",
        model_args=arguments,
        tasks=["sums"],
        task_manager=tasks.TaskManager(include_path=str(tmp_path), include_defaults=False),
    )
    assert 0 <= found["results"]["sums"]["acc,none"] <= 1
    assert found["n-samples"]["sums"]["effective"] == len(rows)
